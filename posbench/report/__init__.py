"""`posbench report`: tables, curves and one self-contained page from run folders."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbench import files
from posbench.errors import PosbenchError, UserError
from posbench.runs.rows import PLAIN, EvaluationRow

if TYPE_CHECKING:
    from rich.console import Console

    from posbench.comparison.load import Group, RunData
    from posbench.portrait.properties import Properties
    from posbench.report.page import Part


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a user may ask of a report; None: the default."""

    least: float | None = None  # nats per token; a smaller difference is not called better or worse
    columns: str | None = None  # of the LaTeX table, a comma list


def main(paths: list[Path], out: Path | None = None, least: float | None = None, columns: str | None = None) -> None:
    """Report on run folders: tables in the terminal, and files in a folder.

    Args:
        paths: run folders, study folders, globs.
        out: where the files go; default: `report` in the study's folder.
        least: nats per token; a smaller difference is not called better or worse. None: `summary.LEAST`.
        columns: of the LaTeX table, a comma list. None: `latex.DEFAULT`.

    Raises:
        UserError: a path does not exist, nothing there is a run, no such column, or the files cannot be written.
    """
    from posbench.report import latex
    from posbench.terminal import console as terminal
    from posbench.terminal import exits

    latex.check(columns)

    runs, warnings = _read(paths)
    folder = out or _study(runs) / "report"
    if out is None:
        files.refuse_unusual(folder)
    console = terminal.stdout()
    if not console.is_terminal:
        console.width = max(console.width, 132)  # a file or a pipe has no right edge
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with console.capture() as said:
            _write(folder, runs, warnings, console, Wanted(least, columns))
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror or error}") from None
    print(said.get(), end="")  # what cannot be printed costs no file
    where = f"Report: {folder / 'index.html'} (also report.md, table.tex, curves.png and .pdf, CSV)"
    console.print(exits.spelt_out(where), soft_wrap=True)


def _read(paths: list[Path]) -> "tuple[list[RunData], list[str]]":
    """Every run once, and what has to be said about those left out."""
    from posbench.comparison import load
    from posbench.runs import finding

    runs, warnings = [], []
    for folder in finding.run_folders(paths):
        try:
            runs.append(load.read(folder))
        except UserError as error:
            warnings.append(f"Left out, unreadable: {error}")
    if not runs:
        raise UserError(f"none of the runs can be read: {warnings[0]}")
    runs.sort(key=lambda run: not run.done)
    twice, never_begun = load.repeated(runs), load.never_begun(runs)
    if never_begun:
        names = ", ".join(run.folder.name for run in never_begun)
        warnings.append(f"Left out, since they ended before they had read their text: {names}")
    warnings += [f"Left out: {run.folder} repeats a run of the same settings and seed" for run in twice]
    warnings += [f"Lost by its sweep, without a run folder: {line}" for line in load.lost(runs)]
    return [run for run in runs if run not in twice and run not in never_begun], warnings


def _study(runs: "list[RunData]") -> Path:
    parents = {run.folder.absolute().parent for run in runs}
    return parents.pop() if len(parents) == 1 else Path(*_common([list(parent.parts) for parent in parents]))


def _common(paths: list[list[str]]) -> list[str]:
    return [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]


def _write(folder: Path, runs: "list[RunData]", warnings: list[str], console: "Console", wanted: Wanted) -> None:
    """All files of a report; the main tables go to the console, too."""
    from posbench.comparison import load
    from posbench.report import csv_files, page, tables, text

    groups = load.groups(runs)
    if len(groups) > 1:
        keys = ", ".join(groups[0].settings)
        warnings = [f"Not all of these runs may be compared: they are in {len(groups)} sets by {keys}", *warnings]
    measured, missing = _measured(sorted({run.config.encoding.name for run in runs}))
    warnings = [*warnings, *missing]
    outcomes, title = tables.outcomes(runs), ", ".join(sorted({run.config.study for run in runs}))
    text.print_lines(console, [f"{title}: {outcomes}", *warnings])
    parts, pieces = [], [f"# {text.markdown(title)}\n\n{text.markdown(outcomes)}\n"]
    pieces += [f"**{text.markdown(warning)}**\n" for warning in warnings]
    for number, group in enumerate(groups, start=1):
        place = folder if number == 1 else folder / f"set-{number}"
        part, piece = _group(group, f"Set {number}" if len(groups) > 1 else "", place, folder, console, wanted)
        parts.append(part)
        pieces.append(piece)
    text.write(folder / "report.md", "\n".join(pieces))
    csv_files.write(folder, groups, runs)
    text.write(folder / "index.html", page.render(title, outcomes, warnings, parts, tables.properties(measured), runs))


def _measured(names: list[str]) -> "tuple[list[Properties], list[str]]":
    """The measured properties of encodings, and a line about those that cannot be measured here and why."""
    from posbench.portrait import properties

    measured, missing = [], []
    for name in names:
        try:
            measured += properties.measure([name])
        except (ImportError, PosbenchError, RuntimeError) as error:  # not installed here, or not made for this torch
            missing.append(f"{name} ({error})")
    return measured, [f"Without measured properties: {'; '.join(missing)}"] if missing else []


def _group(
    group: "Group", name: str, place: Path, folder: Path, console: "Console", wanted: Wanted
) -> "tuple[Part, str]":
    """The files of one set of comparable runs, its part of the page, and its part of the Markdown report."""
    from posbench.comparison import summary
    from posbench.report import figures, latex, page, tables, text
    from posbench.report.answer import answer

    if place != folder:
        files.refuse_unusual(place)
    place.mkdir(exist_ok=True)
    least = summary.LEAST if wanted.least is None else wanted.least
    summaries = summary.summarise(group, least)
    said = answer(group, summaries)
    shown, more = tables.main_tables(group, summaries, least), tables.more_tables(group, summaries, least)
    settings = ", ".join(f"{key} {value}" for key, value in group.settings.items())
    heading, caption = f"{name}: {settings}" if name else "", _caption(group)
    notes = _notes(group)
    text.print_lines(console, [*([heading] if heading else []), *said])
    for table in shown:
        text.print_table(console, table)
        text.print_lines(console, [table.note] if place == folder else [])  # said once, not for every set
    text.print_lines(console, [*notes, caption])
    title = f"{group.runs[0].config.study} {name}".strip()
    text.write(place / "table.tex", latex.table(group, summaries, wanted.columns, title, " ".join([caption, *notes])))
    pictures = figures.save(group, summaries, place)
    pieces = [f"## {text.markdown(heading)}\n"] if heading else []
    pieces += [f"**{text.markdown(' '.join(said))}**\n"] if said else []
    pieces += [f"![Curves of nll by context length]({picture.relative_to(folder)})\n" for picture in pictures[:1]]
    pieces += [text.markdown(line) + "\n" for line in (caption, *notes)]
    pieces += map(text.markdown_table, [*shown, *more])
    data = page.curves(group, summaries, figures.baseline(group, summaries))
    return page.Part(heading, said, caption, [*shown, *more], notes, data), "\n".join(pieces)


def _caption(group: "Group") -> str:
    """What every figure of a set rests on: corpus, budget, seeds, blocks, initialisation, protocol, units."""
    config = group.runs[0].config
    data: dict[str, Any] = next((run.record["data"] for run in group.runs if _knows_data(run)), {})
    rows = [level.row for run in group.runs for level in run.levels.values() if level.status == "ok"]
    seeds = sorted({run.config.seed for run in group.runs})
    sentences = [
        f"Corpus {config.data.name}, sha256 {str(data.get('sha256'))[:12]}, split {_all(rows, 'split')}.",
        f"Trained on {config.training.tokens:,} tokens at {config.training.train_length} tokens of context, "
        f"seeds {_listed(seeds)}; {config.model.n_layers} layers, width {config.model.d_model}, "
        f"{config.model.n_heads} heads; initialisation {config.model.init}; "
        f"learning rate {_listed(sorted({run.config.training.learning_rate for run in group.runs}))}.",
        *(_protocol(rows) if rows else []),
        f"Command: {_command()}",
    ]
    return " ".join(sentences)


def _protocol(rows: list[EvaluationRow]) -> list[str]:
    return [
        f"Protocol fixed_target: the same {_all(rows, 'n_tokens')} target tokens in {_all(rows, 'n_blocks')} blocks "
        f"at every context length, from {_all(rows, 'n_documents')} documents ({_all(rows, 'documents')}), evaluated "
        f"in {_all(rows, 'dtype')}.",
        "Unit: nats per token, a sum over all target tokens over their number; bits per byte: over the bytes of the "
        f"original text, {_all(rows, 'n_bytes')}.",
        "Bands: 95 %; of levels over seeds on this text, which all schemes share; of rises over seeds and documents, "
        "of a single run over documents. Dashed: attention narrowed to the training length; grey: for comparison; "
        "arrow: leaves the picture, its highest value is said; stop sign: undefined.",
    ]


def _notes(group: "Group") -> list[str]:
    from posbench.evaluation.intervals import documents_of

    notes = []
    blocks = [level.blocks for run in group.runs if run.done and (level := run.levels.get((PLAIN, group.train_length)))]
    documents = next((documents_of(one) for one in blocks if one), None)
    if documents and documents.warning:
        notes.append(documents.warning)
    if any(one and one.documents is None for one in blocks):
        notes.append(
            "Some runs were evaluated by an earlier version, which did not say in which document a block stands: where "
            "a cell says so their intervals are over blocks, which makes them too narrow, or over seeds on this very "
            "text. 'posbench evaluate' gives them new ones."
        )
    measured = [level.row for run in group.runs if run.done for level in run.levels.values() if level.row.measured]
    if len(precisions := sorted({str(row.dtype) for row in measured})) > 1:
        notes.append(
            f"Evaluated in {_listed(precisions)}: levels of different precision are not subtracted from each other. "
            "evaluation.precision=fp32 gives all of them one."
        )
    if group.reference is None:
        notes.append("No rope among these runs: nothing is compared with it and there are no verdicts.")
    levels = [run.levels.get((PLAIN, group.train_length)) for run in group.runs if run.done]
    if len({level.targets for level in levels if level and level.status == "ok"}) > 1:
        notes.append(
            "Not all runs were scored on the same target tokens: their levels may not be compared. Rises are within a "
            "run, and runs are paired only where their target tokens are equal."
        )
    rates: dict[float, list[str]] = {}
    for scheme in group.schemes:
        rates.setdefault(scheme.runs[0].config.training.learning_rate, []).append(scheme.label)
    if len(rates) > 1:
        each = "; ".join(f"{rate:g} for {', '.join(labels)}" for rate, labels in rates.items())
        notes.append(f"Learning rates differ: {each}.")
    if tuned := _tuned(group):
        notes.append(tuned)
    return notes


def _tuned(group: "Group") -> str:
    """Whose learning rate is the best of those tried, and whose is not; empty where nothing was tried."""
    from posbench.comparison import rates

    known = rates.of_schemes(group)
    if not any(found.tried for _, found in known):
        return ""
    said = {
        "the best of those tried": [scheme.label for scheme, found in known if found.best == found.ran],
        "not the best": [scheme.label for scheme, found in known if found.best not in (None, found.ran)],
        "not tuned": [scheme.label for scheme, found in known if found.best is None],
    }
    each = "; ".join(f"{what} for {', '.join(labels)}" for what, labels in said.items() if labels)
    return f"Learning rates, by nll on validation text at the training length: {each}."


def _all(rows: list[EvaluationRow], column: str) -> str:
    values = [getattr(row, column) for row in rows]
    return ", ".join(sorted({_listed([value]) for value in values if value is not None})) or "unknown"


def _listed(values: list[Any]) -> str:
    return ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values)


def _command() -> str:
    from posbench.runs.redaction import redact

    return redact(shlex.join(["posbench", *sys.argv[1:]]))


def _knows_data(run: "RunData") -> bool:
    return isinstance(run.record.get("data"), dict)
