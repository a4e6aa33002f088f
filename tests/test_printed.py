"""One run as a table in the terminal: what it says, and that it fits."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from posbench.config.schema import to_container
from posbench.reports import one_run
from posbench.results.frame import read

Row = dict[str, Any]
LENGTHS = (16, 32, 64)


def row(length: int, nll: float | None, **more: Any) -> Row:
    """Return an evaluation row as `rows.jsonl` has it; without a loss it is
    undefined.
    """
    line: Row = {
        "protocol": "fixed_target",
        "length": length,
        "length_ratio": length / 16,
        "split": "test",
        "documents": "doc",
        "checkpoint_step": 1,
        "status": "undefined",
        "dtype": "fp32",
        "targets_sha256": "ab",
    }
    if nll is not None:
        line["status"] = "ok"
        line["nll"] = nll
        line["ci_low"] = nll - 0.1
        line["ci_high"] = nll + 0.1
        line["perplexity"] = math.exp(nll)
        line["bits_per_byte"] = nll / 2
    return line | more


def shifted(offset: int, **more: Any) -> Row:
    """Return a row of the passage at an offset, whose loss rises with it."""
    place = {"protocol": "task", "task": "offset", "offset": offset or None}
    nll = 4 + offset / 1600
    return row(16, nll, **place, **more)


@pytest.fixture
def draw(tiny_config, tmp_path, capsys, monkeypatch) -> Callable[..., str]:
    """Return what is printed of a run with these rows, in a terminal so wide."""

    def drawn(rows: list[Row], width: int = 80, split: str | None = None) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        config = yaml.safe_dump(to_container(tiny_config))
        record = json.dumps({"schema": 3, "id": tiny_config.id, "status": "done"})
        lines = [json.dumps({"run": tiny_config.id, **row}) + "\n" for row in rows]
        (tmp_path / "config.yaml").write_text(config)
        (tmp_path / "run.json").write_text(record)
        (tmp_path / "rows.jsonl").write_text("".join(lines))
        one_run.print_results(tmp_path, split)
        return capsys.readouterr().out

    return drawn


def lines_of_curve(out: str) -> list[str]:
    """Return the lines of the first table below its head."""
    return [line for line in out.splitlines() if re.match(r"\d+ \(\S+x\)", line)]


RISING = [row(16, 4.0), row(32, 4.5), row(64, 5.0)]


def test_a_line_has_the_context_and_its_loss(draw):
    out = draw(RISING, 120)

    lines = lines_of_curve(out)
    first_words = [line.split()[:3] for line in lines]
    assert first_words == [
        ["16", "(1x)", "4.000"],
        ["32", "(2x)", "4.500"],
        ["64", "(4x)", "5.000"],
    ]


def test_bars_rise_with_the_loss(draw):
    out = draw(RISING)

    lines = lines_of_curve(out)
    sizes = [line.count("▇") for line in lines]
    assert sizes == [1, 9, 17]


def test_a_wide_terminal_shows_the_perplexity(draw):
    out = draw([row(16, 4.0), row(64, 5.0)], 120)

    assert "148.41" in out


def test_a_context_without_a_loss_says_why_and_has_no_bar(draw):
    out = draw([row(16, 4.0), row(128, None)])

    last = lines_of_curve(out)[-1]
    assert "undefined" in last
    assert "▇" not in last


def test_a_curve_is_on_one_text(draw):
    asked_for = row(16, 4.0, split="validation")
    of_test = [row(16, 4.1), row(32, 4.2)]
    earlier = row(32, 4.3, checkpoint_step=0)

    out = draw([asked_for, *of_test, earlier], split="validation")

    assert "4.000" in out
    assert "4.200" not in out
    assert "4.300" not in out


def test_a_curve_is_of_one_checkpoint(draw):
    earlier = row(32, 4.3, checkpoint_step=0)
    out = draw([row(16, 4.1), earlier])

    assert "4.100" in out
    assert "4.300" not in out


def test_rows_in_two_precisions_are_named(draw):
    in_fp32 = row(16, 4.1)
    in_bf16 = row(64, 4.4, dtype="bf16")

    out = draw([in_fp32, in_bf16])

    assert "Rows in fp32 and bf16: only those in one precision are comparable." in out


ON_OTHER_TARGETS = [((16, 32), "earlier"), ((16, 32, 64), "later")]


@pytest.mark.parametrize(("lengths", "targets"), ON_OTHER_TARGETS)
def test_the_curve_is_on_the_newest_targets_that_have_all_lengths(
    draw, tmp_path, lengths, targets
):
    earlier = [row(n, 4.0, targets_sha256="earlier") for n in LENGTHS]
    later = [row(n, 4.1, targets_sha256="later") for n in lengths]
    draw([*earlier, *later])

    rows = read([tmp_path], "test")

    main = rows.query("main")
    assert set(main["targets_sha256"]) == {targets}


def test_extensions_do_not_outvote_the_plain_lengths(draw, tmp_path):
    rows = [row(n, 4.0, targets_sha256="plain") for n in LENGTHS]
    for n in (16, 32):
        rows.append(row(n, 4.1, targets_sha256="extended", extension="yarn"))
        rows.append(row(n, 4.1, targets_sha256="extended", extension="pi"))
    draw(rows)

    found = read([tmp_path], "test")

    main = found.query("main and extension.isna()")
    assert set(main["targets_sha256"]) == {"plain"}


MOVED = [row(16, 4.0), shifted(0), shifted(16), shifted(48)]


def test_a_moved_passage_has_a_column_by_where_it_ends(draw):
    out = draw(MOVED, 120)

    assert re.search(r"\nmeasured +16 +32 +64\n", out)
    assert re.search(r"\noffset +4\.000 +4\.010 +4\.030\n", out)


def test_the_position_from_which_a_moved_passage_changes_is_named(draw):
    out = draw(MOVED, 120)

    jump = "the same passage's loss changes by more than 0.02 nats from position 64 on."
    assert f"\nOffset: {jump}\n" in out


def test_a_moved_passage_that_hardly_changes_has_its_largest_change(draw):
    out = draw([row(16, 4.0), shifted(0), shifted(16)], 120)

    assert "loss changes by 0.0100 nats at most up to position 32.\n" in out


def test_positions_with_different_factors_are_not_compared(draw):
    rows = [row(16, 4.0)]
    for offset in (0, 16, 48):
        options = {"factor": offset + 1}
        rows.append(shifted(offset, extension="pi", extension_options=options))

    out = draw(rows, 120)

    assert "\nOffset with pi: not compared: the factor differs between positions" in out


def test_a_table_of_losses_has_the_legend_of_losses_alone(draw):
    out = draw([row(16, 4.0), row(16, 4.1, extension="yarn")], 120)

    assert "\na number: loss, nats per token.\n" in out


def test_a_long_name_leaves_room_for_the_losses(draw):
    name = "longrope:factor=1:short_factor=" + ",".join(["0.5"] * 16)

    out = draw([row(16, 4.0), row(16, 4.125, extension=name)])

    assert re.search(r"\nlongrope:factor=1.*\.\.\..*0\.5 +4\.125\n", out)


def test_a_table_of_answers_has_the_legend_of_shares_alone(draw):
    answers = {"protocol": "task", "task": "passkey", "accuracy": 0.5, "n_blocks": 8}

    of_task = row(16, 4.1, **answers)
    out = draw([row(16, 4.0), of_task], 120)

    shares = "%: share of right answers"
    interval = "in brackets its 95 % interval (Clopper & Pearson)"
    assert f"\n{shares}; {interval}.\n" in out


REMARKS = [
    (5.5, "Not learned: loss 5.500 at 1x, an n-gram model of order 3 has 4.000"),
    (4.02, "Not shown to have learned: loss 4.020 at 1x"),
    (4.02, "a difference that may be chance over 8 documents."),
]


@pytest.mark.parametrize(("nll", "remark"), REMARKS)
def test_a_run_that_does_not_beat_its_reader_says_so(draw, nll, remark):
    high = 10 * (nll + 0.5)
    low = 10 * (nll - 0.5)
    units = {
        "document": [*range(8)],
        "tokens": [10] * 8,
        "nll": [high, low] * 4,
        "ngram": [40.0] * 8,
        "cached_ngram": [40.0] * 8,
    }
    reader = {"ngram_nll": 4.0, "ngram_order": 3, "n_documents": 8}

    measured = row(16, nll, units=units, **reader)
    out = draw([measured])

    in_one_line = " ".join(out.split())
    assert remark in in_one_line
