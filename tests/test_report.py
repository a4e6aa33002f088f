"""The report: its answer, its table in four outputs, its figures and its page."""

import csv
import io
import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from fake_study import (
    Truth,
    begin_run,
    configured,
    rows_of_study,
    write_run,
    write_study,
)
from rich.console import Console
from support import posbench

from posbench import api, encodings, reports
from posbench.errors import UserError
from posbench.reports import answer, card, charts, one_run, sweeps, tables
from posbench.reports.render import Table
from posbench.results.compare import compare, curves
from posbench.results.frame import read


@pytest.fixture(scope="module")
def study(template, tmp_path_factory):
    folder = write_study(tmp_path_factory.mktemp("outputs") / "fake", template, seeds=2)
    write_run(
        folder,
        configured(template, "fire", 0),
        None,
        "failed",
        reason="diverged",
        message="loss <b>is</b> nan",
    )
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the files of figures empty, which take most of a report's time."""
    monkeypatch.setattr(charts, "drawn", lambda figure, kind: b"")


def test_a_report_of_six_schemes_begins_with_the_figure_and_fits_on_a_screen(
    tmp_path, capsys, monkeypatch
):
    plain = charts.drawn
    monkeypatch.setattr(
        charts,
        "drawn",
        lambda figure, kind: plain(figure, kind) if kind == "svg" else b"",
    )
    six, frame = tmp_path / "six.parquet", rows_of_study("six")
    frame[frame["checkpoint_step"] == frame["checkpoint_step"].max()].to_parquet(six)
    assert len(api.report(str(six))) == 30
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[0].startswith(
        f"Figure: {six.with_suffix('') / 'report' / 'curves.png'}"
    )
    assert len(lines) <= 25
    assert max(map(len, lines[1:])) <= 100
    text = " ".join(" ".join(lines).split())
    assert "At 128 tokens fox has the lowest loss 2.774" in text
    assert (
        "Worse than rope: sinusoidal +0.423, none +0.544; not resolved: fox, t5, alibi."
        in text
    )
    assert "Holds: fox, t5, alibi to at least 8x; rope to 1x." in text
    (head,) = [n for n, line in enumerate(lines) if line.startswith("encoding ")]
    first = [line.split()[0] for line in lines[head + 2 : head + 8]]
    assert first == ["fox", "rope", "t5", "alibi", "sinusoidal", "none"]  # by loss
    page = (six.with_suffix("") / "report" / "index.html").read_text()
    # of rope at 4x, of fox at 8x
    assert "+1.266 ±0.182" in page
    assert "-0.049 ±0.025" in page
    # it needs no network
    assert len(page) < 100_000
    assert not re.search(r"(src|href)=.(?!#)|@import|url\((?!#)", page)


def test_columns_drop_until_the_table_fits(study):
    table = tables.main_table(compare(read([study])))
    for width in (40, 100, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        table.print(console)
        head, *lines = console.export_text().splitlines()
        assert (
            head.startswith("encoding")
            and "loss" in head
            and "none" in (rest := str(lines))
        ), width
        assert ("at 16x" in head) == (width == 200) == ("Left out" not in rest)
        assert ("adjusted" in head) == (width > 40)


def test_the_card_has_cost_beside_none_retrieval_and_models_that_transformers_has():
    frame = rows_of_study("six")
    far = (frame["length_ratio"] == 4) & frame["newest"]
    asked = frame[far & (frame["label"] == "rope") & (frame["curve"] == "fixed_target")]
    asked = asked.assign(
        protocol="task", task="passkey", accuracy=[0.2, 0.4, 0.6, 0.4, 0.4]
    )
    cards = card.card_table(
        pd.concat([frame, asked], ignore_index=True), compare(frame)
    )
    names = [column.name for column in cards.columns]
    cells = {row[0]: dict(zip(names, row, strict=True)) for row in cards.cells}
    assert cells["rope"]["right"] == "40%"
    assert cells["fox"]["right"] == ""
    assert cells["none"]["time"] == "1.00"
    fox = ("fox", "2.774", "≥ 8x", "with a bias", "with x")
    assert (
        tuple(
            cells["fox"][name]
            for name in ("encoding", "loss", "holds_to", "kernels", "cache")
        )
        == fox
    )
    auto = pytest.importorskip("transformers").models.auto.configuration_auto
    named = {
        word
        for text in card.MODELS.values()
        for word in re.sub(r"rope_type \w+:?", "", text).split(", ")
    }
    assert card.MODELS.keys() <= {*encodings.names()}
    assert {*map(str.strip, named)} <= {
        *auto.CONFIG_MAPPING_NAMES,
        "",
    }


@pytest.mark.slow
def test_what_failed_is_counted_and_files_are_the_same_each_time(
    study, tmp_path, capsys
):
    for name in ("a", "b"):
        reports.main([study], tmp_path / name)
    text = capsys.readouterr().out
    assert "Of 13 runs not done: 1 diverged, the first: loss <b>is</b> nan" in text
    assert re.search(r"learned .* undefined", text)
    page = (tmp_path / "a" / "index.html").read_text()
    assert "0, 1 diverged" in page
    assert "<b>is</b>" not in page
    assert "&lt;b&gt;is" in page
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == [
        "curves.pdf",
        "curves.png",
        "index.html",
        "rows.csv",
        "table.csv",
        "table.tex",
    ]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (
            tmp_path / "b" / name
        ).read_bytes(), name
    frame = read([study])
    with (tmp_path / "a" / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(frame)
    assert {row["label"] for row in rows} == set(frame["label"])
    table = pd.read_csv(tmp_path / "a" / "table.csv").set_index("label")
    assert table.loc["none", "nll"] == pytest.approx(
        compare(frame).set_index("label").loc["none", "nll"], rel=1e-5
    )
    assert r"\textbf{3." in (tmp_path / "a" / "table.tex").read_text()
    odd = pd.DataFrame({"label": [r"a_b & 50% ~ \\x {±}"], "nll": [1.0]})
    made = Table("T", odd, [tables.ENCODING]).latex("x")
    assert (
        r"a\_b \& 50\% \textasciitilde{} \textbackslash{}\textbackslash{}x \{$\pm$\}"
        in made
    )


@pytest.mark.usefixtures("undrawn")
def test_few_seeds_and_unlearned_models_get_a_command(template, tmp_path, capsys):
    truths = {"rope": Truth(3.6, 0.1, ngram=4.0), "none": Truth(4.4, 0.0, ngram=4.0)}
    study = write_study(tmp_path / "fake", template, truths, seeds=2)
    words = ["encoding=none,rope", "seed=0,1"]
    sweeps.record([*study.glob("*-s*")], words, None)
    reports.main([study])
    text = capsys.readouterr().out
    assert "verdicts need 5" in text
    assert "worse" not in text
    assert (
        "Not shown to have learned more than an n-gram model (4.000): 'none'." in text
    )
    tokens = 4 * template.training.tokens
    command = "posbench sweep encoding=none,rope seed=0,1,2,3,4 training.tokens="
    assert f"{command}{tokens}\n" in text
    assert re.search(r"none +4\.\d+ +no ", text)
    assert "learned: below the n-gram model" in text


def test_a_command_has_the_words_of_the_sweeps_that_made_the_runs(tmp_path):
    runs = [tmp_path / name for name in ("a", "b", "c")]
    frame = pd.DataFrame({"folder": map(str, runs)})
    changes = {"seed": "0,1,2"}
    assert answer.command(frame, changes) == ""

    words = ["encoding=a,b", "seed=0", "ratio=1,2,4", "data.path=my text's.txt"]
    sweeps.record(runs[:2], words, None)
    typed = answer.command(frame, changes).splitlines()
    assert typed[0] == " Type:"
    (line,) = typed[1:]
    expected = ["encoding=a,b", "ratio=1,2,4", "data.path=my text's.txt", "seed=0,1,2"]
    assert shlex.split(line) == ["posbench", "sweep", *expected]

    sweeps.record(runs[1:], ["encoding=c"], Path("mine"))
    last = answer.command(frame, {}).splitlines()[-1]
    assert last == "  posbench sweep encoding=c --config-dir=mine"
    assert len(answer.command(frame, {}).splitlines()) == 3


@pytest.mark.usefixtures("undrawn")
def test_settings_that_may_not_be_compared_are_sets_and_a_broken_run_stops_no_report(
    template, tmp_path, capsys
):
    study = write_study(tmp_path / "fake", template, {"rope": Truth(3.6, 0.1)}, seeds=2)
    data = {
        "name": "text",
        "sha256": "d00d" + "0" * 60,
        "split": "document",
        "revision": None,
        "tokens": {},
    }
    for seed in range(2):
        code = {"own": f"digest {seed}"}
        write_run(
            study,
            configured(template, "alibi", seed),
            Truth(3.7, 0.0),
            data=data,
            installed_encodings=code,
        )
    broken = next(study.glob("rope-s1-*"))
    (broken / "run.json").write_text("{")
    reports.main([study])
    text = capsys.readouterr().out
    assert "Set 1: text_sha256 " in text
    assert "Set 2: text_sha256 " in text
    assert f"Left out, unreadable: {broken}" in text
    assert "'own' was trained with 2 versions" in text
    assert (study / "report" / "set-2" / "curves.png").exists()
    with pytest.raises(
        UserError, match="these runs may not be compared, they differ in text_sha256"
    ):
        charts.of_runs(read(study.glob("*-s0-*")))
    assert posbench("report", str(broken)) == 2
    with pytest.warns(UserWarning, match="left out, unreadable"):
        assert api.runs(broken).empty
    begin_run(tmp_path / "new", configured(template, "rope", 0), "stopped", tokens=None)
    reports.main([tmp_path / "new"])
    text = capsys.readouterr().out
    assert "No run has a loss" in text
    assert "Of 1 run not done: 1 stopped" in text


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_is_evaluated_further_stays_in_its_study(template, tmp_path, capsys):
    study = write_study(
        tmp_path / "fake",
        template,
        {"rope": Truth(3.6, 0.1), "alibi": Truth(3.7, 0.0)},
        seeds=2,
    )
    before = compare(read([study]))
    folder = min(study.glob("rope-*"))
    with (folder / "rows.jsonl").open("r+") as file:
        rows = [
            json.loads(line) | {"targets_sha256": "b2", "nll": 9.0} for line in file
        ]
        rows.append(rows[0] | {"length": 32 * rows[0]["length"], "length_ratio": 32.0})
        file.write(further := "".join(json.dumps(row) + "\n" for row in rows))
    pd.testing.assert_frame_equal(compare(read([study])), before)
    one_run.print_results(folder, lengths=[rows[0]["length"], rows[-1]["length"]])
    assert re.search(
        r"\(1x\) +9\.000.*\(32x\) +9\.000", capsys.readouterr().out, re.DOTALL
    )
    (folder / "rows.jsonl").write_text(further)
    reports.main([study])
    asked = (
        f"1 run without the targets that most share: 'posbench evaluate {folder}"
        " ratio=1,2,4,8,16 longest=16'"
    )
    assert asked in capsys.readouterr().out


def test_the_band_of_a_curve_is_its_interval():
    frame = rows_of_study("six")
    figure = charts.of_text(frame, compare(frame), "curve")
    assert figure is not None
    bands = {band.get_gid(): band for band in figure.axes[0].collections}

    points = curves(frame).query("label == 'rope' and variant == 'plain'")
    points = points[points["ratio"] >= 1 / 4]
    assert (points["nll_high"] - points["nll_low"] > 0.01).all()

    drawn = bands["curve-rope"].get_paths()[0].vertices[:, 1]
    assert set(points["nll_low"]) | set(points["nll_high"]) <= set(drawn)


def test_the_intervals_of_differences_are_the_adjusted_ones():
    frame = rows_of_study("six")
    table = compare(frame)
    figure = charts.of_text(frame, table)
    assert figure is not None

    fox = table.set_index("label").loc["fox"]
    low, high = fox["nll_difference_adjusted_low"], fox["nll_difference_adjusted_high"]
    assert low < fox["nll_difference_low"]

    drawn = [line for line in figure.axes[2].lines if line.get_gid() == "curve-fox"]
    assert drawn[0].get_xdata() == pytest.approx([low, high])
    assert drawn[1].get_xdata() == pytest.approx([fox["nll_difference"]])


@pytest.mark.slow
def test_names_at_the_ends_of_curves_do_not_collide():
    frame = rows_of_study("six")
    figure = charts.of_text(frame, compare(frame))
    assert figure is not None
    assert len(figure.axes) == 3
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        boxes += [label.get_window_extent() for label in axes.get_xticklabels()]
        assert not any(
            a.overlaps(b) for at, a in enumerate(boxes) for b in boxes[at + 1 :]
        )
    other = charts.of_text(frame, compare(frame), kind="perplexity")
    assert other is not None
    assert len(other.axes) == 1
    assert other.axes[0].get_ylabel() == "perplexity"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_what_was_measured_on_the_way_and_narrowed_models_are_folded(
    template, tmp_path
):
    truth = Truth(3.5, 0.1, ngram=3.8, earlier=(Truth(4.2, 0.0, ngram=3.8),))
    study = write_study(tmp_path / "fake", template, {"rope": truth})
    reports.main([study])
    page = (study / "report" / "index.html").read_text()
    assert "<summary>Over training</summary>" in page and "<td class=t>windowed" in page
    (made,) = tables.training_tables(read([study]))
    assert [row[1] for row in made.cells] == ["1M", "2M"] and [
        row[4] for row in made.cells
    ] == ["no", "yes"]


@pytest.mark.usefixtures("undrawn")
def test_a_report_on_a_task_from_a_study_in_one_file(tmp_path, capsys):
    frame = rows_of_study("ledger")
    frame[(frame["trained_task"] == "copy") & (frame["seed"] < 10)].to_parquet(
        tmp_path / "copy.parquet"
    )
    reports.main([tmp_path / "copy.parquet"])
    text = capsys.readouterr().out
    assert "copy: 4 encodings, 5 seeds" in text
    assert "Learned by most seeds: alibi, rope." in text
    assert re.search(r"alibi +5 of 5 .*0\.98 \[0\.96, 0\.98\] +better", text)
