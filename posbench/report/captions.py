"""The captions of a set of runs: the data behind the figures, and notes for the reader."""

from collections.abc import Iterable
from typing import Any

from posbench.config.external import ModelElsewhere, TrainedElsewhere, TrainedOn
from posbench.config.schema import Config, ModelConfig, flat
from posbench.evaluation.answers import GATE
from posbench.report import families
from posbench.report.comparison import load
from posbench.report.comparison.judgement import SeedRange
from posbench.report.comparison.load import Group
from posbench.report.comparison.standing import Standing, known_at
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.report.comparison.summary import ENDPOINT_RATIO, Summary, documents
from posbench.run_folder.rows import PLAIN, WINDOWED, EvaluationRow

MOST = 3  # most commands that are all listed


def of_text(group: Group, summaries: list[Summary]) -> str:
    """The caption of a set: corpus, budget, seeds, blocks, initialisation, protocol, units, marks."""
    config = group.runs[0].config
    known = (run.record.get("data") for run in group.runs)
    data: dict[str, Any] = next((one for one in known if isinstance(one, dict)), {})
    rows = [level.row for run in group.runs for level in run.levels.at.values() if level.status == "ok"]
    sentences = [
        f"Corpus {config.data.name}, sha256 {str(data.get('sha256'))[:12]}, split {_all(rows, 'split')}.",
        _trained(config, group) if isinstance(config, Config) else _elsewhere(config, group),
        *([*_protocol(group, rows), *_marks(group, summaries)] if rows else []),
        _commands(group),
    ]
    return " ".join(sentences)


def _trained(config: Config, group: Group) -> str:
    runs = [run.config for run in group.runs if isinstance(run.config, Config)]
    begun = [one for one in runs if one.start]
    if begun:
        others = "; the others are trained at that length from the start, on as many tokens in all"
        before = [one.start for one in begun if one.start]
        tokens, length = _any(one.tokens for one in before), _any(one.train_length for one in before)
        return (
            f"Begun from runs trained on {tokens} tokens at {length} tokens of context, then "
            f"trained on {_any(one.training.tokens for one in begun)} at {begun[0].training.train_length}"
            f"{others if len(begun) < len(runs) else ''}, {_trained_by(begun[0], group)}."
        )
    return (
        f"Trained on {config.training.tokens:,} tokens at {config.training.train_length} tokens of context, "
        f"{_trained_by(config, group)}."
    )


def _any(numbers: Iterable[int]) -> str:
    return " or ".join(f"{number:,}" for number in sorted(set(numbers)))


def _elsewhere(config: TrainedElsewhere | TrainedOn, group: Group) -> str:
    model, reading = config.model, config.reading
    revision = f" at {model.revision[:12]}" if model.revision else ""
    where = "before each document and first in every window" if reading.first else "before each document"
    before, then = config.training.train_length, ""
    if isinstance(config, TrainedOn):
        before, training, how = config.start.train_length, config.training, ", ".join(_seeds_and_rates(group))
        then = f", then here on {training.tokens:,} tokens at {training.train_length}, {how}"
    return (
        f"{model.name} ({model.kind}, {model.source}{revision}, sha256 {model.sha256[:12]}) was trained elsewhere at "
        f"{before} tokens of context{then}; {_size(model)}; token {reading.separator} {where}."
    )


def _protocol(group: Group, rows: list[EvaluationRow]) -> list[str]:
    behind = documents(group)
    documents_told = behind.told if behind else f"{_all(rows, 'n_documents')} documents"
    return [
        f"Protocol fixed_target: the same {_all(rows, 'n_tokens')} target tokens in {_all(rows, 'n_blocks')} blocks "
        f"at every context length, from {documents_told} ({_all(rows, 'documents')}), evaluated "
        f"in {_all(rows, 'dtype')}.",
        "Unit: nats per token, a sum over all target tokens over their number; bits per byte: over the bytes of the "
        f"original text, {_all(rows, 'n_bytes')}.",
    ]


def _marks(group: Group, summaries: list[Summary]) -> list[str]:
    """The meaning of the marks that a picture has."""
    points = [point for one in summaries if not one.bimodal for point in one.plain.points]
    bands = {
        "of levels over seeds on this text, which all schemes share": any(point.band for point in points),
        "of rises over seeds and documents": any(point.rise and point.rise.seeds > 1 for point in points),
        "of rises of a single run over documents": any(point.rise and point.rise.seeds == 1 for point in points),
    }
    curves = [curve for one in summaries for curve in one.curves]
    windowed, families_apart = any(one.kind == WINDOWED for one in curves), len(families.rows(summaries)) > 1
    marks = {
        "dashed: attention narrowed to the training length": windowed,
        "dotted: with an extension": any(one.kind not in (PLAIN, WINDOWED) for one in curves),
        "grey, in the picture with a row per family: for comparison": families_apart and (windowed or group.reference),
    }
    banded = "; ".join(words for words, there in bands.items() if there)
    said = "; ".join(words for words, there in marks.items() if there)
    ranges = any(isinstance(point.rise, SeedRange) or isinstance(point.band, SeedRange) for point in points)
    instead = f", the range of seeds where they are fewer than {SEEDS_FOR_A_CLAIM}" if ranges else ""
    return [
        *([f"Bands: 95 %, {banded}{instead}."] if banded else []),
        *([f"{said[:1].upper()}{said[1:]}."] if said else []),
    ]


def notes_on_text(group: Group) -> list[str]:
    notes = []
    behind = documents(group)
    if behind and behind.warning:
        notes.append(behind.warning)
    measured = [level.row for run in group.runs if run.done for level in run.levels.at.values() if level.row.measured]
    if len(precisions := sorted({str(row.dtype) for row in measured})) > 1:
        notes.append(
            f"Evaluated in {_listed(precisions)}: levels of different precision are not subtracted from each other. "
            "evaluation.precision=fp32 gives them the same precision."
        )
    if group.reference is None:
        wanted = group.compared_with or load.REFERENCE
        notes.append(f"No {wanted} among these runs: nothing is compared with it and there are no verdicts.")
    elif others := group.references[1:]:
        notes.append(
            f"The reference is '{group.reference.label}'; --reference takes another: "
            f"{_listed([repr(one.label) for one in others])}."
        )
    notes += _lacking(group)
    levels = [run.levels.at_one for run in group.runs if run.done]
    if len({level.targets for level in levels if level and level.status == "ok"}) > 1:
        notes.append(
            "Not all runs were scored on the same target tokens: their levels cannot be compared. Rises are within a "
            "run, and runs are paired only where their target tokens are equal."
        )
    return [*notes, *_learning_rates(group)]


def _lacking(group: Group) -> list[str]:
    """Notes on runs without a row that verdicts need and others of the group have."""
    runs, notes = [run for run in group.runs if run.done], []
    for ratio in (1, ENDPOINT_RATIO):
        place = (PLAIN, ratio * group.train_length)
        lacking = [run for run in runs if place not in run.levels.at]
        if lacking and len(lacking) < len(runs):
            few = _listed([run.folder.name for run in lacking[:3]] + [f"{len(lacking) - 3} more"] * (len(lacking) > 3))
            notes.append(
                f"Without a row at {ratio}x, so without a part in verdicts: {few}. 'posbench evaluate "
                f"{lacking[0].folder} length=...' with all lengths adds it."
            )
    return notes


def _learning_rates(group: Group) -> list[str]:
    """A note where schemes differ in their learning rate."""
    found: dict[float, list[str]] = {}
    for scheme in group.schemes:
        if rate := scheme.runs[0].config.training.learning_rate:
            found.setdefault(rate, []).append(scheme.label)
    each = "; ".join(f"{rate:g} for {', '.join(labels)}" for rate, labels in found.items())
    return [f"Learning rates differ: {each}."] if len(found) > 1 else []


# -- tasks -------------------------------------------------------------------------------------------------------------


def of_task(group: Group, found: list[Standing]) -> str:
    """The caption of a task: options, budget, seeds, test problems, precision, and what the picture shows."""
    config = group.runs[0].config
    assert isinstance(config, Config)  # runs on tasks are posbench's own
    options = flat({key: value for key, value in (config.data.task or {}).items() if key != "name"})
    rows = [one.row for run in group.runs for one in run.answers.at.values() if one.status == "ok"]
    said = f" ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else ""
    sentences = [
        f"Task {group.task}{said}: problems of trained lengths drawn anew at every step; tested on the same "
        f"{_all(rows, 'n_blocks')} problems of each length, answered in {_all(rows, 'dtype')}.",
        f"{config.training.steps:,} steps of {config.training.batch_size * config.training.accumulation} problems, "
        f"{_trained_by(config, group)}.",
        "Picture: a dot per seed, a line through the median of all; "
        + ("hollow: did not learn; " if any(one.learned < one.seeds for one in found) else "")
        + f"thin line: the gate, {100 * GATE:g} %"
        + ("; dashes: a trivial reader" if known_at(found, "trivial") else "")
        + ".",
        _commands(group),
    ]
    return " ".join(sentences)


def notes_on_task(group: Group) -> list[str]:
    notes = []
    tested = [(place, one) for run in group.runs if run.done for place, one in run.answers.at.items()]
    measured = [(place, one.row) for place, one in tested if one.status == "ok"]
    if len(precisions := sorted({str(row.dtype) for _, row in measured})) > 1:
        notes.append(f"Answered in {_listed(precisions)}: accuracies of different precision are not tested.")
    problems = {(place, row.targets_sha256) for place, row in measured}
    if len(problems) > len({place for place, _ in measured}):
        notes.append("Not all runs were tested on the same problems: runs with different problems are not compared.")
    return [*notes, *_learning_rates(group)]


def _trained_by(config: Config, group: Group) -> str:
    seeds, rates = _seeds_and_rates(group)
    return f"{seeds}; {_size(config.model)}; initialisation {config.model.init}; {rates}"


def _seeds_and_rates(group: Group) -> tuple[str, str]:
    rates = sorted({run.config.training.learning_rate or 0.0 for run in group.runs})
    seeds = sorted({run.seed for run in group.runs})
    return f"seed{'' if len(seeds) == 1 else 's'} {_listed(seeds)}", f"learning rate {_listed(rates)}"


def _size(model: ModelConfig | ModelElsewhere) -> str:
    layers, heads = ("" if number == 1 else "s" for number in (model.n_layers, model.n_heads))
    attention = "no attention" if model.n_heads is None else f"{model.n_heads} head{heads}"
    return f"{model.n_layers} layer{layers}, width {model.d_model}, {attention}"


# -- what both say -----------------------------------------------------------------------------------------------------


def _all(rows: list[EvaluationRow], column: str) -> str:
    values = [getattr(row, column) for row in rows]
    return ", ".join(sorted({_listed([value]) for value in values if value is not None})) or "unknown"


def _listed(values: list[Any]) -> str:
    return ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values)


def _commands(group: Group) -> str:
    """The commands of the group's runs: all if few, else the first."""
    found = load.commands(group.runs)
    if not found:
        return "Command: not known."
    more = f" (and {len(found) - 1} more: each run has its own below and in runs.csv)" if len(found) > MOST else ""
    return f"Command: {'; '.join(found[:1] if more else found)}{more}."
