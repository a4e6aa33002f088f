"""What a paper takes from a report: its table, and its numbers as CSV."""

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_study import SCHEMES, Truth, configured, read_csv, read_rows, write_rows, write_run, write_study

from posbench import report
from posbench.config.schema import Config
from posbench.report import figures, latex

PDFLATEX = shutil.which("pdflatex")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda group, summaries, folder: [])
        yield


@pytest.fixture(scope="module")
def study(template: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of five seeds: rope and a scheme like it, one that rises less, one that ends, one that has not learned."""
    schemes = {name: SCHEMES[name] for name in ("rope", "alibi", "learned")}
    schemes |= {"alibi": Truth(3.655, -0.05), "yarn": SCHEMES["rope"], "none": Truth(3.0, 0.0, ngram=2.9)}
    return write_study(tmp_path_factory.mktemp("outputs") / "fake", template, schemes)


def table_of(study: Path, out: Path, columns: str | None = None) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        report.main([study], out, columns=columns)
    return (out / "table.tex").read_text()


@pytest.fixture(scope="module")
def written(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report with the columns that it chooses."""
    out = tmp_path_factory.mktemp("written")
    table_of(study, out)
    return out


def cells(latex: str) -> dict[str, list[str]]:
    """Head and rows by their first cell."""
    inside = re.findall(r"\\toprule(.*)\\bottomrule", latex, re.DOTALL)[0]
    rows = [line.removesuffix(r" \\").lstrip().split(" & ") for line in inside.splitlines() if line.endswith(r"\\")]
    assert len({len(row) for row in rows}) == 1
    return {row[0]: row[1:] for row in rows}


def caption(latex: str) -> str:
    return re.findall(r"\\caption\{(.*)\}\n", latex)[0]


def test_the_table_has_the_headline_a_label_and_true_minus_signs(written: Path) -> None:
    table = (written / "table.tex").read_text()
    assert table.isascii() and table.count(r"\begin{table}") == 1 and r"\label{tab:fake}" in table
    rows = cells(table)
    assert rows["scheme"] == [r"nll 1$\times$", r"rise 4$\times$", r"rise 16$\times$", "reach"]
    assert re.fullmatch(r"\$\\mathbf\{-0\.\d{3}\}_\{\\pm 0\.\d{3}\}\$", rows["alibi"][2])
    assert rows["learned"][1:3] == ["undefined", "undefined"]


@pytest.mark.full
def test_bold_are_the_best_and_what_is_not_told_from_it(study: Path, tmp_path: Path) -> None:
    rows = cells(table_of(study, tmp_path, "nll_1x,nll_16x,rise_4x,reach"))
    bold = {name: ["mathbf" in cell for cell in row] for name, row in rows.items()}
    assert bold["alibi"][1:] == [True, True, True] and bold["rope"][1:] == [False, False, False]
    assert bold["rope"][0] and bold["yarn"][0]  # made alike: 3.66, where alibi is 3.655
    assert bold["none (not learned)"] == [False] * 4  # the lowest nll, of what is not ranked
    assert rows["none (not learned)"][3] == ""  # nor has it a reach


def test_levels_on_different_targets_are_not_bold(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "fake", template, {name: SCHEMES[name] for name in ("rope", "alibi")})
    assert "mathbf" in table_of(folder, tmp_path / "before", "rise_4x")
    for path in folder.glob("alibi-*/evaluation.jsonl"):
        write_rows(path, [row | {"targets_sha256": "0f" * 32} for row in read_rows(path)])
    table = table_of(folder, tmp_path / "after", "nll_1x,rise_4x,verdict")
    assert "mathbf" not in table and "Bold" not in table and "verdict: against rope" in caption(table)


def test_with_fewer_seeds_than_a_claim_takes_nothing_is_bold(template: Config, tmp_path: Path) -> None:
    few = write_study(tmp_path / "few", template, {name: SCHEMES[name] for name in ("rope", "alibi")}, seeds=4)
    table = table_of(few, tmp_path / "out")
    assert "mathbf" not in table and "Bold" not in table and "4 seeds" in caption(table)


def test_latex_spells_out_every_special_character() -> None:
    assert latex.latex(r"\input{a}_$#%&~^") == (
        r"\textbackslash{}input\{a\}\_\$\#\%\&\textasciitilde{}\textasciicircum{}"
    )


def typeset(folder: Path) -> str:
    """What pdflatex says of the table in a two-column paper of narrow columns."""
    document = (
        r"\documentclass[twocolumn]{article}\setlength{\textwidth}{448pt}\usepackage{booktabs,tabularx}"
        r"\begin{document}\typeout{\the\columnwidth}\input{table.tex}\ref{tab:fake}\end{document}"
    )
    (folder / "paper.tex").write_text(document)
    command = [str(PDFLATEX), "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    for _ in range(2):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "219.0pt" in done.stdout and "undefined on input" not in done.stdout
    return done.stdout


@pytest.mark.skipif(PDFLATEX is None, reason="no pdflatex (apt-get install texlive-latex-recommended)")
def test_it_fits_a_column_of_a_paper(study: Path, tmp_path: Path) -> None:
    table_of(study, tmp_path)
    said = typeset(tmp_path)
    assert "Overfull" not in said and "too narrow" not in said


# -- CSV ---------------------------------------------------------------------------------------------------------------


def test_runs_of_one_encoding_are_told_apart_by_label_options_length_and_rate(template: Config, tmp_path: Path) -> None:
    for base, rise in ((64, 0.05), (10000, 0.2)):
        for seed in range(2):
            write_run(tmp_path / "bases", configured(template, "rope", seed, base=base), Truth(3.7, rise))
    table_of(tmp_path / "bases", tmp_path)
    for name, lines in (("runs.csv", 4), ("evaluation.csv", 4 * 9)):
        rows = read_csv(tmp_path / name)
        assert len(rows) == lines and {row["label"] for row in rows} == {"rope base=64", "rope base=10000"}
        for row in rows:
            assert row["label"] == f"rope base={json.loads(row['options'])['base']}"
            assert (row["train_length"], row["learning_rate"], row["encoding"]) == ("64", "0.006", "rope")


def test_runs_csv_has_the_headline_of_each_run(written: Path) -> None:
    rows, levels = read_csv(written / "runs.csv"), read_csv(written / "evaluation.csv")
    plain = {(row["run"], row["length_ratio"]): row["nll"] for row in levels if not row["window"]}
    for row in rows:
        at_one, at_four = plain[row["run"], "1.0"], plain[row["run"], "4.0"]
        assert row["nll_1x"] == at_one
        assert row["rise_4x"] == "" if not at_four else float(row["rise_4x"]) == float(at_four) - float(at_one)
    reach = {row["encoding"]: row["reach"] for row in rows if row["seed"] == "0"}
    assert reach["learned"] == "64" == reach["rope"] and int(reach["alibi"]) > 64
    for table in (rows, levels):  # of the others nobody knows what the best n-gram model has
        assert {row["encoding"]: row["learned"] for row in table if row["learned"]} == {"none": "no"}
    assert reach["none"] == ""
