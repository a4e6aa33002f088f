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
from posbench.errors import UserError
from posbench.report import figures, latex, text

PDFLATEX = shutil.which("pdflatex")
HOSTILE = "[x] * \\input{x} ^^M % # & $x^2$ _{y} ~"


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


def test_the_caption_is_short_and_what_the_numbers_rest_on_is_a_comment(written: Path) -> None:
    table = (written / "table.tex").read_text()
    assert "5 seeds" in caption(table) and len(caption(table)) < 400
    comments = " ".join(line[2:] for line in table.splitlines() if line.startswith("% "))
    assert "Command: " in comments and "sha256 c0ffee000000" in comments and "Command" not in caption(table)


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


def test_columns_without_a_value_are_left_out_and_named(template: Config, tmp_path: Path) -> None:
    one = write_study(tmp_path / "one", template, {"rope": SCHEMES["rope"]}, seeds=1)
    table = table_of(one, tmp_path / "out", "nll_1x, sd_seeds,learned,rise_32x,against_nll_1x,perplexity")
    assert cells(table)["scheme"] == [r"nll 1$\times$", "ppl"]
    assert "one seed" in caption(table) and "ddagger" not in table
    told = "value for it: sd_seeds, learned, rise_32x, against_nll_1x. Evaluated here: 1x, 2x, 4x, 8x, 16x."
    assert text.markdown(told) in (tmp_path / "out" / "report.md").read_text()
    table_of(one, tmp_path / "out")  # of the usual columns those without a value are nobody's wish
    assert "Not in table.tex" not in (tmp_path / "out" / "report.md").read_text()


def test_marks_stand_in_the_cells_where_seeds_differ(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "some", template, {"rope": SCHEMES["rope"]})
    write_run(folder, configured(template, "alibi", 0), SCHEMES["alibi"])
    table = table_of(folder, tmp_path / "out")
    assert cells(table)["alibi"][1].endswith(r"$$^\ddagger$") and r"\ddagger$: one checkpoint" in caption(table)


def test_a_column_that_is_not_known_is_one_clear_line_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--columns has no 'rize_4x': did you mean 'rise_4x'"):
        report.main([tmp_path / "nowhere"], columns="nll_1x,rize_4x")


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


needs_latex = pytest.mark.skipif(PDFLATEX is None, reason="no pdflatex (apt-get install texlive-latex-recommended)")


@needs_latex
@pytest.mark.parametrize("columns", [None, "nll_1x,rise_2x,rise_4x,rise_8x,rise_16x", "runs,verdict"])
def test_it_fits_a_column_or_says_that_it_takes_the_page(study: Path, tmp_path: Path, columns: str | None) -> None:
    table = table_of(study, tmp_path, columns)
    assert (r"\begin{table}" in table) == (columns is None)
    said = typeset(tmp_path)
    assert "Overfull" not in said and "too narrow" not in said


@needs_latex
def test_names_of_strangers_are_only_text_to_latex(template: Config, tmp_path: Path) -> None:
    for option in (HOSTILE, HOSTILE[1:]):
        write_run(tmp_path / "study", configured(template, "cope", 0, option=option), SCHEMES["none"], command=HOSTILE)
    table_of(tmp_path / "study", tmp_path)
    typeset(tmp_path)


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
