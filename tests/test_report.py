"""The report: its answer, its table in four outputs, its files and its page."""

import contextlib
import csv
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_study import (
    Truth,
    begin_run,
    configured,
    demo_config,
    rows_of_study,
    write_run,
    write_study,
)
from rich.console import Console
from support import posbench, script

from posbench import api, encodings, listing, reports
from posbench.reports import charts, decision, one_run, tables
from posbench.reports.answer import text_answer
from posbench.reports.render import Column, Table
from posbench.results.compare import compare
from posbench.results.frame import read
from posbench.run import sweeps

FILES = [
    "curves.pdf",
    "curves.png",
    "explore.html",
    "index.html",
    "rows.csv",
    "table.csv",
    "table.tex",
]
UNLEARNED = {"rope": Truth(3.6, 0.1, ngram=4.0), "none": Truth(4.4, 0.0, ngram=4.0)}
TWO = {"rope": Truth(3.6, 0.1), "alibi": Truth(3.7, 0.0)}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """Return six schemes with two seeds, and a run that failed."""
    outputs = tmp_path_factory.mktemp("outputs")
    folder = write_study(outputs / "fake", seeds=2)
    failed = configured("fire", 0)
    message = "loss <b>is</b> nan"
    write_run(folder, failed, None, "failed", reason="diverged", message=message)
    return folder


def kept(folder: Path, name: str, rows: pd.DataFrame) -> Path:
    """Write rows into one file."""
    path = folder / f"{name}.parquet"
    rows.to_parquet(path)
    return path


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Path:
    """Return the last checkpoints of the study `six` in one file."""
    frame = rows_of_study("six_reader")
    is_last = frame["checkpoint_step"] == frame["checkpoint_step"].max()
    return kept(tmp_path_factory.mktemp("kept"), "six", frame[is_last])


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Leave the files of figures empty, which take most of a report's time."""
    monkeypatch.setattr(charts, "image_bytes", lambda figure, kind: b"")


def report_text(*paths: Path) -> str:
    """Return what a report prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        reports.main([*paths])
    return printed.getvalue()


def report_words(*paths: Path) -> str:
    """Return what a report prints as one line."""
    return " ".join(report_text(*paths).split())


@pytest.fixture(scope="module")
def text_of_six(six) -> str:
    """Return what the report of `six` prints, with figures in its page alone."""
    image_bytes = charts.image_bytes

    def drawn(figure: Any, kind: str) -> bytes:
        return image_bytes(figure, kind) if kind == "svg" else b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "image_bytes", drawn)
        return report_text(six)


@pytest.fixture(scope="module")
def page_of_six(six, text_of_six) -> str:
    return page_of(six.with_suffix(""))


@pytest.fixture(scope="module")
def text_of_study(study) -> str:
    """Return what the report of the study prints, without figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "image_bytes", lambda figure, kind: b"")
        return report_text(study)


@pytest.fixture(scope="module")
def page_of_study(study, text_of_study) -> str:
    return page_of(study)


def page_of(folder: Path) -> str:
    return (folder / "report" / "index.html").read_text(encoding="utf-8")


# -- the terminal --


def test_a_report_begins_with_its_files_and_fits_on_a_screen(six, text_of_six):
    first, *lines = text_of_six.rstrip().splitlines()

    figure = six.with_suffix("") / "report" / "curves.png"
    assert first.startswith(f"Figure: {figure}; page: ")
    # a command is not broken, so that it can be pasted
    sentences = [line for line in lines if not line.startswith("  posbench ")]
    assert len(lines) < 25
    assert max(map(len, sentences)) <= 100


ANSWERS = [
    "At 128 tokens fox has the lowest loss 2.774.",
    "Worse than rope: sinusoidal +0.423, none +0.544; not resolved: fox, t5, alibi.",
    "Holds: fox, t5, alibi to at least 8x; rope to 1x.",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_report_says_what_is_best_and_what_holds(text_of_six, answer):
    assert answer in " ".join(text_of_six.split())


def test_what_holds_of_few_seeds_is_said_of_these_checkpoints_alone():
    rows = rows_of_study("six_reader")
    two = rows[rows["seed"].isin(rows["seed"].unique()[:2])]

    sentences = text_answer(two, compare(two)).sentences

    (holds,) = [text for text in sentences if text.startswith("Holds")]
    assert holds.startswith("Holds, these checkpoints alone: ")


def test_the_legend_says_how_often_holds_is_wrong(text_of_six, page_of_six):
    sentence = "with ordinary seeds 2.5 % of simulated reports have any wrong word"

    assert sentence in " ".join(text_of_six.split())
    assert sentence in html.unescape(page_of_six)


def test_the_share_of_wrong_words_is_that_of_the_protocol_page():
    page = Path(__file__).parents[1] / "docs" / "protocol.md"
    printed = page.read_text(encoding="utf-8")

    shares = re.findall(r"\d[\d.]*", tables.WRONG_WORDS)

    assert shares == ["2.5"]
    for share in shares:
        assert f"| {share}% |" in printed


def test_the_lowest_loss_is_the_first_line_of_the_table(text_of_six):
    _, _, table = text_of_six.partition("\nencoding ")
    _head, _rule, *lines = table.splitlines()

    names = [line.split()[0] for line in lines[:6]]

    assert names == ["fox", "rope", "t5", "alibi", "sinusoidal", "none"]


WIDTHS = [(40, False, False), (100, True, False), (200, True, True)]


@pytest.mark.parametrize(("width", "has_interval", "has_longest"), WIDTHS)
def test_columns_drop_until_the_table_fits(study, width, has_interval, has_longest):
    compared = compare(read([study]))
    table = tables.main_table(compared)
    console = Console(width=width, record=True, file=io.StringIO())

    table.print(console)

    text = console.export_text()
    head = text.splitlines()[0]
    columns = head.split()
    assert "encoding" in columns
    assert "loss" in columns
    assert "\nnone" in text
    assert ("adjusted" in head) == has_interval
    assert ("at 16x" in head) == has_longest
    assert ("Left out" in text) != has_longest


def test_what_failed_is_counted_with_its_reason(text_of_study, page_of_study):
    counted = r"Of 13 runs not done: 1 diverged; \S+: loss <b>is</b> nan"

    assert re.search(counted, text_of_study)
    assert "0 done, 1 diverged" in page_of_study


def test_a_length_that_an_encoding_lacks_is_undefined(text_of_study):
    assert re.search(r"\nlearned .* undefined", text_of_study)


@pytest.mark.usefixtures("undrawn")
def test_few_seeds_and_unlearned_models_get_one_command(tmp_path):
    study = write_study(tmp_path / "fake", UNLEARNED, seeds=2)
    runs = list(study.glob("*-s*"))
    sweeps.record(runs, ["encoding=none,rope", "seed=0,1"], None)

    text = report_words(study)

    tokens = 4 * demo_config().training.tokens
    command = "posbench sweep encoding=none,rope seed=0,1,2,3,4 training.tokens="
    assert "worse" not in text
    assert "Missing for verdicts: seeds (2 of 5), tokens (4 times as many)." in text
    time = "10 runs to do for this table. How long is not known"
    page = page_of(study)
    assert f"Type: {command}{tokens} {time}" in text
    assert f"<pre>{command}{tokens}</pre>" in page
    assert time in page


@pytest.mark.usefixtures("undrawn")
def test_unlearned_models_are_named_beside_the_reader(tmp_path):
    study = write_study(tmp_path / "fake", UNLEARNED, seeds=2)

    text = report_words(study)

    sentence = "Not shown to have learned more than an n-gram model (4.000): 'none'."
    assert sentence in text
    assert re.search(r"none 4\.\d+ no ", text)
    assert "learned: below the n-gram model" in text


@pytest.mark.usefixtures("undrawn")
def test_runs_without_a_loss_are_a_report_that_says_so(tmp_path):
    config = configured("rope", 0)
    begin_run(tmp_path / "new", config, "stopped", tokens=None)

    text = report_words(tmp_path / "new")

    assert "No run has a loss at its training length yet." in text
    assert "Of 1 run not done: 1 stopped" in text


@pytest.mark.usefixtures("undrawn")
def test_runs_without_their_training_length_get_the_command_that_adds_it(tmp_path):
    run = write_run(tmp_path / "fake", configured("rope", 0), Truth(3.6, 0.1))
    lines = (run / "rows.jsonl").read_text("utf-8").splitlines(keepends=True)
    longer = [line for line in lines if json.loads(line)["length_ratio"] > 1]
    (run / "rows.jsonl").write_text("".join(longer), "utf-8")

    text = report_words(tmp_path / "fake")

    assert "No run has a loss at its training length yet." in text
    command = "posbench sweep encoding=rope seed=0 ratio=1,2,4,8,16"
    assert f"Missing for verdicts: lengths (1x). Type: {command}" in text


# -- sets of runs, and runs that are left out --


@pytest.fixture
def two_texts(tmp_path) -> Path:
    """Return a study of runs on two texts, one with an encoding of the user's own."""
    rope = {"rope": Truth(3.6, 0.1)}
    study = write_study(tmp_path / "fake", rope, seeds=2)
    data: dict[str, Any] = {"name": "text", "split": "document", "tokens": {}}
    data["sha256"] = "d00d" + "0" * 60
    for seed in range(2):
        config = configured("alibi", seed)
        code = {"own": f"digest {seed}"}
        truth = Truth(3.7, 0.0)
        write_run(study, config, truth, data=data, installed_encodings=code)
    return study


@pytest.mark.usefixtures("undrawn")
def test_settings_that_may_not_be_compared_are_sets(two_texts):
    text = report_words(two_texts)

    assert "Set 1: text_sha256 " in text
    assert "Set 2: text_sha256 " in text
    assert (two_texts / "report" / "set-2" / "curves.png").exists()


@pytest.mark.usefixtures("undrawn")
def test_two_versions_of_an_encoding_of_ones_own_are_named(two_texts):
    text = report_words(two_texts)

    assert "'own' was trained with 2 versions of its file" in text


@pytest.fixture
def broken(two_texts) -> Path:
    """Return a run that cannot be read."""
    run = next(two_texts.glob("rope-s1-*"))
    (run / "run.json").write_text("{", encoding="utf-8")
    return run


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_cannot_be_read_stops_no_report(broken):
    text = report_words(broken.parent)

    assert f"Left out, unreadable: {broken}" in text
    assert "At 64 tokens rope has a loss of" in text


def test_a_report_of_nothing_that_can_be_read_is_an_error(broken):
    assert posbench("report", str(broken)) == 2


def test_from_python_a_run_that_cannot_be_read_is_a_warning(broken):
    with pytest.warns(UserWarning, match="left out, unreadable"):
        runs = api.runs(broken)
    assert runs.empty


@pytest.mark.usefixtures("undrawn")
def test_a_mean_of_fewer_seeds_than_its_scheme_has_is_marked(tmp_path):
    study = write_study(tmp_path / "fake", TWO, seeds=2)
    rows = min(study.glob("rope-*")) / "rows.jsonl"
    lines = rows.read_text(encoding="utf-8").splitlines(keepends=True)
    plain = [line for line in lines if json.loads(line)["window"] is None]
    rows.write_text("".join(plain), encoding="utf-8")

    (table,) = tables.length_tables(read([study]))

    means = table.frame.set_index("label")["128"]
    assert means["rope"].endswith(" (1)")
    assert not means["alibi"].endswith(")")


@pytest.fixture
def extended(tmp_path) -> tuple[Path, list[dict[str, Any]]]:
    """Return a run of a study, and rows of it on other targets, one of them longer."""
    study = write_study(tmp_path / "fake", TWO, seeds=2)
    run = min(study.glob("rope-*"))
    lines = (run / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    other = {"targets_sha256": "b2", "nll": 9.0}
    # of the former loss
    other |= dict.fromkeys(("perplexity", "bits_per_byte", "units"))
    rows = [json.loads(line) | other for line in lines]
    longer = dict(rows[0])
    longer["length"] *= 32
    longer["length_ratio"] = 32.0
    return run, [*rows, longer]


def append(run: Path, rows: list[dict[str, Any]]) -> None:
    with (run / "rows.jsonl").open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def test_a_run_that_is_evaluated_further_stays_in_its_study(extended):
    run, rows = extended
    before = compare(read([run.parent])).frame

    append(run, rows)

    after = compare(read([run.parent])).frame
    pd.testing.assert_frame_equal(after, before)


def test_what_was_asked_for_last_is_printed(extended, capsys):
    run, rows = extended
    append(run, rows)

    one_run.print_results(run)

    out = capsys.readouterr().out
    assert re.search(r"\(1x\) +9\.000.*\(32x\) +9\.000", out, re.DOTALL)


@pytest.mark.usefixtures("undrawn")
def test_a_length_of_one_run_has_the_command_that_gives_it_to_the_others(extended):
    run, rows = extended
    append(run, rows)

    text = report_words(run.parent)

    command = f"'posbench evaluate {run.parent} ratio=1,2,4,8,16,32 longest=32'"
    line = f"3 of 4 runs without the targets of 32x that others have: {command}"
    assert line in text


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_the_shared_targets_gets_the_command_that_computes_them(
    extended,
):
    run, rows = extended
    (run / "rows.jsonl").unlink()
    append(run, rows[:-1])

    text = report_words(run.parent)

    command = f"'posbench evaluate {run.parent} ratio=1,2,4,8,16 longest=16'"
    line = f"1 of 4 runs without the targets of 16x that others have: {command}"
    assert line in text


@pytest.mark.usefixtures("undrawn")
def test_a_run_in_another_precision_gets_the_command_that_evaluates_all_alike(tmp_path):
    study = write_study(tmp_path / "fake", TWO, seeds=2)
    path = min(study.glob("rope-*")) / "rows.jsonl"
    path.write_text(path.read_text("utf-8").replace("fp32", "bf16"), "utf-8")

    text = report_words(study)

    words = "ratio=1,2,4,8,16 longest=16 precision=fp32"
    command = f"'posbench evaluate {study} {words}'"
    lacking = "1 of 4 runs without the targets and the precision of 16x"
    assert f"{lacking} that others have: {command} computes them" in text


# -- the page and the other files --


def test_the_page_needs_no_network(page_of_six):
    assert len(page_of_six) < 100_000
    assert not re.search(
        r"(src|href)=.(?!#|explore\.html)|@import|url\((?!#)", page_of_six
    )


def test_the_page_has_all_columns(page_of_six):
    assert "+1.266 ±0.182" in page_of_six  # rope at 4x
    assert "-0.049 ±0.025" in page_of_six  # fox at 8x


def test_the_page_has_a_figure_per_panel(page_of_six):
    assert page_of_six.count("<svg") == 3


def test_the_losses_by_length_are_the_first_folded_table(page_of_six):
    _, _, rest = page_of_six.partition("<details>")
    first, _, _ = rest.partition("</details>")

    assert first.startswith("<summary>Loss by length</summary>")
    assert re.search("<td>rope<td>.*<td>2.879<td>3.719<td>4.146<td>4.714", first)


def test_what_a_run_says_is_escaped(page_of_study):
    assert "<b>is</b>" not in page_of_study
    assert "&lt;b&gt;is" in page_of_study


def test_narrowed_models_are_folded(page_of_study):
    assert "<summary>Other curves by length</summary>" in page_of_study
    assert "<td class=t>windowed" in page_of_study


@pytest.mark.slow
def test_files_are_the_same_each_time(study, tmp_path):
    reports.main([study], tmp_path / "a")
    reports.main([study], tmp_path / "b")

    one = tmp_path / "a"
    other = tmp_path / "b"
    names = sorted(path.name for path in one.iterdir())
    assert names == FILES
    for name in names:
        first = (one / name).read_bytes()
        second = (other / name).read_bytes()
        assert first == second, name


def test_rows_csv_has_every_row(study, text_of_study):
    with (study / "report" / "rows.csv").open(encoding="utf-8") as file:
        labels = [row["label"] for row in csv.DictReader(file)]

    expected = read([study])["label"]
    assert labels == list(expected)


def test_table_csv_has_the_digits_of_the_table(study, text_of_study):
    table = pd.read_csv(study / "report" / "table.csv")

    expected = compare(read([study])).frame
    losses = list(expected["nll"])
    assert list(table["label"]) == list(expected["label"])
    assert list(table["nll"]) == pytest.approx(losses, rel=1e-5, nan_ok=True)


def test_latex_has_the_main_table_and_the_losses_by_length(study, text_of_study):
    latex = (study / "report" / "table.tex").read_text(encoding="utf-8")

    assert latex.count(r"\begin{tabular}") == 2
    assert r"\textbf{3." in latex
    assert r"\label{tab:posbench-1-lengths}" in latex


LATEX = [
    ("a_b & 50% ~", r"a\_b \& 50\% \textasciitilde{}"),
    (r"\x {±}", r"\textbackslash{}x \{$\pm$\}"),
    ("-0.106", r"$-$0.106"),
    ("[-0.351, +0.140]", r"[$-$0.351, +0.140]"),
    ("n-gram at 8x", r"n-gram at 8$\times$"),
]


@pytest.mark.parametrize(("text", "expected"), LATEX)
def test_latex_writes_signs_as_latex_does(text, expected):
    frame = pd.DataFrame({"label": [text]})
    table = Table("", frame, [tables.ENCODING])

    latex = table.latex("x")

    assert f"\n{expected} \\\\\n" in latex


NUMBERS = [
    (-0.0004, "+.3f", "0.000"),
    (0.0, "+.3f", "0.000"),
    (-0.0006, "+.3f", "-0.001"),
    (-0.0, ".3f", "0.000"),
    (1.25, "+.3f", "+1.250"),
]


@pytest.mark.parametrize(("value", "form", "expected"), NUMBERS)
def test_a_number_that_is_rounded_to_zero_has_no_sign(value, form, expected):
    frame = pd.DataFrame({"x": [value]})
    column = Column("x", "x", form)
    table = Table("", frame, [column])

    assert table.cells == [(expected,)]


# -- other tables --


def test_what_was_measured_on_the_way_is_a_table(tmp_path):
    on_the_way = Truth(4.2, 0.0, ngram=3.8)
    truth = Truth(3.5, 0.1, ngram=3.8, earlier=(on_the_way,))
    study = write_study(tmp_path / "fake", {"rope": truth})

    (table,) = tables.training_tables(read([study]))

    tokens = [row[1] for row in table.cells]
    learned = [row[4] for row in table.cells]
    assert tokens == ["1M", "2M"]
    assert learned == ["no", "yes"]


def card_cells(frame: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Return the cells of the card by scheme and column."""
    table = decision.card_table(frame, compare(frame))
    names = [column.name for column in table.columns]
    return {row[0]: dict(zip(names, row, strict=True)) for row in table.cells}


def test_the_card_has_results_kernels_and_cache():
    fox = card_cells(rows_of_study("six_reader"))["fox"]

    assert fox["loss"] == "2.774"
    assert fox["holds_to"] == "≥ 8x"
    assert fox["kernels"] == "with a bias"
    assert fox["cache"] == "with x"


def test_the_cards_in_the_file_are_those_of_the_encodings():
    """`python scripts/cards.py` writes the file."""
    assert listing.CARDS.read_text("utf-8") == script("cards").written()


def test_the_card_has_cost_as_a_multiple_of_none():
    assert card_cells(rows_of_study("six_reader"))["none"]["time"] == "1.00"


def test_the_card_has_the_mean_of_retrieval_over_seeds():
    frame = rows_of_study("six_reader")
    at_four = frame[(frame["length_ratio"] == 4) & frame["newest"]]
    is_rope = (at_four["label"] == "rope") & (at_four["curve"] == "fixed_target")
    right = [0.2, 0.4, 0.6, 0.4, 0.4]
    asked = at_four[is_rope].assign(protocol="task", task="passkey", accuracy=right)

    cells = card_cells(pd.concat([frame, asked], ignore_index=True))

    assert cells["rope"]["right"] == "40%"
    assert cells["fox"].get("right") == ""


def test_the_card_names_models_that_transformers_has():
    transformers = pytest.importorskip("transformers")
    known = set(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    named = set()
    for text in listing.MODELS.values():
        without_types = re.sub(r"rope_type \w+:?", "", text)
        named.update(word.strip() for word in without_types.split(", "))

    assert listing.MODELS.keys() <= set(encodings.names())
    assert named <= {*known, ""}


# -- tasks --


@pytest.fixture
def copy(tmp_path) -> Path:
    """Return the task `copy` of a kept study in one file."""
    frame = rows_of_study("ledger")
    frame = frame[frame["trained_task"] == "copy"]
    frame = frame[frame["seed"] < 10]
    return kept(tmp_path, "copy", frame)


@pytest.mark.usefixtures("undrawn")
def test_a_report_on_a_task_says_which_schemes_learned_it(copy):
    text = report_words(copy)

    assert "Task copy: 4 encodings, 5 seeds" in text
    assert "Learned by most seeds: alibi, rope." in text
    assert re.search(r"alibi 5 of 5 .*0\.98 \[0\.96, 0\.98\] better", text)


@pytest.mark.usefixtures("undrawn")
def test_a_task_with_few_seeds_asks_for_more(copy):
    frame = pd.read_parquet(copy)
    first, second, *_ = sorted(frame["seed"].unique())
    of_two = frame[frame["seed"].isin([first, second])]
    of_two.to_parquet(copy)

    text = report_words(copy)

    assert "Missing for verdicts: seeds (2 of 5, better 10)" in text
