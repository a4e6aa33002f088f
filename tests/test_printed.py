"""One run as a table in the terminal: what it says, and that it fits."""

import json
from typing import Any

import pytest
import yaml

from posbench.config.schema import to_container
from posbench.reports import one_run


def row(length: int, nll: float | None, **more: Any) -> dict[str, Any]:
    status = "ok" if nll is not None else "undefined"
    return {
        "protocol": "fixed_target",
        "length": length,
        "length_ratio": length / 16,
        "window": None,
        "extension": None,
        "task": None,
        "split": "test",
        "documents": "doc",
        "checkpoint_step": 1,
        "status": status,
        "reason": None,
        "dtype": "fp32",
        "targets_sha256": "ab",
        "nll": nll,
        "ci_low": nll and nll - 0.1,
        "ci_high": nll and nll + 0.1,
        "perplexity": nll and 2.718281828**nll,
        "bits_per_byte": nll and nll / 2,
        **more,
    }


@pytest.fixture
def draw(tiny_config, tmp_path, capsys, monkeypatch):
    def drawn(
        rows: list[dict[str, Any]], width: int = 80, split: str | None = None
    ) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        (tmp_path / "config.yaml").write_text(
            yaml.safe_dump(to_container(tiny_config)), encoding="utf-8"
        )
        (tmp_path / "run.json").write_text(
            json.dumps({"schema": 1, "id": "x", "status": "done"}), encoding="utf-8"
        )
        (tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
        one_run.print_results(tmp_path, split)
        return capsys.readouterr().out

    return drawn


def test_the_numbers_stand_in_the_table_and_bars_rise_with_them(draw):
    out = draw([row(16, 4.0), row(32, 4.5), row(64, 5.0), row(128, None)], 120)
    # perplexity at 64
    assert "148.41" in out
    assert "undefined" in out
    lines = [line for line in out.splitlines() if line.endswith("x)") or "x)  " in line]
    assert [" ".join(line.split()[:3]) for line in lines[:3]] == [
        "16 (1x) 4.000",
        "32 (2x) 4.500",
        "64 (4x) 5.000",
    ]
    assert [line.count("▇") for line in lines] == [1, 9, 17, 0]


def test_two_splits_or_two_checkpoints_are_never_one_curve(draw):
    rows = [
        row(16, 4.0, split="validation"),
        row(16, 4.1),
        row(32, 4.2),
        row(32, 4.3, checkpoint_step=0),
    ]
    words = draw(rows, split="validation").split()
    assert "4.000" in words
    assert not {"4.200", "4.300"} & {*words}
    assert "curve: 1 on test text at step 0, 2 on test text at step 1." in " ".join(
        words
    )
    out = draw([*rows, row(64, 4.4, dtype="bf16")])
    assert "4.100" in out
    assert "4.200" in out
    assert "4.000" not in out
    assert "4.300" not in out
    assert "fp32 and bf16:" in out


def test_the_curve_is_on_the_targets_of_the_lengths_and_extensions_asked_for(
    draw, tmp_path
):
    asked = [
        row(n, 4.1, targets_sha256="cd", extension=name)
        for n in (16, 32)
        for name in (None, "yarn")
    ]
    earlier = [
        row(n, 4.0, extension=name) for n in (16, 32, 64) for name in (None, "pi")
    ]
    draw([*earlier, *asked])
    assert {
        *one_run.read(tmp_path, "test", (16, 32)).query("main")["targets_sha256"]
    } == {"cd"}
    assert {
        *one_run.read(tmp_path, "test", (16, 64)).query("main")["targets_sha256"]
    } == {"ab"}


def test_a_moved_passage_has_a_column_by_where_it_ends_and_a_sentence_that_names_the_jump(
    draw,
):
    moved = [
        row(16, 4 + at / 1600, protocol="task", task="offset", offset=at or None)
        for at in (0, 16, 48)
    ]
    factors = [
        each
        | {
            "extension": "pi",
            "extension_options": {"factor": (each["offset"] or 0) + 1},
        }
        for each in moved
    ]
    out = draw([row(16, 4.0), *moved, *factors], 120)
    assert "\nmeasured      16     32     64\n" in out
    assert "\noffset     4.000  4.010  4.030\n" in out
    assert (
        "\nOffset: the same passage's loss changes by more than 0.02 nats from position"
        " 64 on.\n" in out
    )
    assert "\nOffset with pi: not compared: the factor differs between positions" in out
    assert "loss changes by 0.0100 nats at most up to position 32.\n" in draw(
        [row(16, 4.0), *moved[:2]], 120
    )
