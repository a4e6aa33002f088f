"""Run folders, read and sorted: which runs may be compared, and what each of them is called.

Runs are compared only where data, tokenizer, model and budget are equal; each such set is a `Group`. Within it runs of
one encoding with equal options are a `Scheme`, told apart by seed. Folders may come from strangers.
"""

import collections
import dataclasses
import functools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from posbench.config import plain_yaml, shipped
from posbench.config.external import AnyConfig, TrainedElsewhere, TrainedOn
from posbench.config.identity import NOT_IDENTITY, one_number
from posbench.config.schema import Config, flat, to_container
from posbench.errors import UserError
from posbench.evaluation.answers import Answers
from posbench.evaluation.headline import measure_of
from posbench.evaluation.levels import Levels
from posbench.evaluation.measure import Headline, Measure
from posbench.run_folder.folder import load_any_config, load_record
from posbench.run_folder.jsonl import number
from posbench.run_folder.lock import died
from posbench.run_folder.rows import (
    EvaluationRow,
    evaluation_rows,
    headline_split,
    newest_of_split,
    on_shared_targets,
)
from posbench.terminal.exits import counted

REFERENCE = "rope"

# What may differ between the schemes of one comparison: what is compared, and the learning rate that suits each.
# Where a run began belongs to its scheme as well (`scheme_options`).
_RATE = "training.learning_rate"
_SCHEME_KEYS = ("encoding.", "model.attention.", _RATE)
_START = "start"  # the training length before; beside it `start.encoding`, `start.tokens` and `start.warmup_tokens`
_OFF = ("null", "false", "0")  # as JSON: an option that is off, or left as it is
_NOT_COMPARED = (*NOT_IDENTITY, "study", "seed")
_OF_ENCODING = re.compile(r"(.+)-s\d+-[0-9a-f]{8}")  # a run's name
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # a SHA-256, of which twelve digits are shown


@dataclasses.dataclass(frozen=True)
class RunData:
    """A run folder's content."""

    folder: Path
    record: dict[str, Any]
    config: AnyConfig
    rows: list[EvaluationRow]

    @functools.cached_property
    def results(self) -> Measure:
        """What it is measured by. Reads the sums by block when first asked."""
        return measure_of(self.config).of(self.folder, self.config, self.rows)

    @property
    def levels(self) -> Levels:
        """Its results on text; none of a run on a task."""
        return self.results if isinstance(self.results, Levels) else Levels({}, self.config.training.train_length)

    @property
    def answers(self) -> Answers:
        """Its results on a task; none of a run on text."""
        return self.results if isinstance(self.results, Answers) else Answers({}, None)

    @property
    def headline(self) -> Headline:
        """The run in a few values by name."""
        return self.results.headline

    @property
    def task(self) -> str | None:
        """The name of the task that it was trained on; None for text."""
        task = self.config.data.task
        return None if task is None else str(task.get("name"))

    @property
    def split(self) -> str:
        """The text of its results."""
        return headline_split(self.rows, self.config.evaluation.split)

    @property
    def apart(self) -> set[str]:
        """Names of curves that have rows on other targets than its curve; no table takes such rows."""
        own = newest_of_split([row for row in self.rows if row.is_headline], self.split)
        joined = {row.key for row in on_shared_targets(own)}
        return {row.curve_name for row in own if row.key not in joined}

    @property
    def name(self) -> str:
        """The name of its curve: the encoding, or the external model."""
        config = self.config
        return config.model.name if isinstance(config, TrainedElsewhere) else config.encoding.name

    @property
    def seed(self) -> int:
        """Runs are paired by it. 0 for a model trained elsewhere, which has no known seed and is paired with none."""
        return self.config.seed or 0

    @property
    def done(self) -> bool:
        return self.record.get("status") == "done"

    @property
    def outcome(self) -> str:
        """done, running, stopped, died (killed before it could say so), or why it failed."""
        status, reason = self.record.get("status"), self.record.get("reason")
        return str(reason or status) if status == "failed" else str(status)

    @property
    def tokens_per_second(self) -> float | None:
        tokens, seconds = number(self.record.get("tokens")), number(self.record.get("train_seconds"))
        return tokens / seconds if tokens and seconds else None

    def parameters(self, kind: str) -> int | None:
        counts = self.record.get("parameters")
        value = number(counts.get(kind)) if isinstance(counts, dict) else None
        return None if value is None else int(value)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Runs that differ in nothing but the seed. `label` is the name, with options where those tell schemes apart.

    A pattern of layers that has a name is labelled with it: `layered/gemma3`.
    """

    name: str
    label: str
    runs: list[RunData]

    @property
    def by_seed(self) -> dict[int, RunData]:
        """Runs that ended well; those that did not are counted elsewhere."""
        return {run.seed: run for run in self.runs if run.done}


@dataclasses.dataclass(frozen=True)
class Group:
    """Schemes that may be compared, and what sets them apart from the other groups of the report."""

    schemes: list[Scheme]
    settings: dict[str, str]  # only keys that differ between groups of text, or of this task
    compared_with: str | None = None  # name or label of the reference that was asked for; None: `REFERENCE`

    @property
    def task(self) -> str | None:
        """The name of the task that the runs were trained on; None for text."""
        return self.runs[0].task

    @property
    def runs(self) -> list[RunData]:
        return [run for scheme in self.schemes for run in scheme.runs]

    @property
    def train_length(self) -> int:
        return self.runs[0].config.training.train_length

    @property
    def original_length(self) -> int | None:
        """The earlier training length, if runs here began from others; None if none did, or if the lengths differ."""
        found = {
            run.config.start.train_length
            for run in self.runs
            if isinstance(run.config, Config | TrainedOn) and run.config.start
        }
        return found.pop() if len(found) == 1 else None

    @property
    def reference(self) -> Scheme | None:
        """The first of `references`; None if there is none."""
        return next(iter(self.references), None)

    @property
    def references(self) -> list[Scheme]:
        """The scheme of that label, else those of that name, `rope` by default.

        Those with the usual base come first, then those with most seeds.
        """
        wanted = self.compared_with or REFERENCE
        found = [scheme for scheme in self.schemes if scheme.label == wanted]
        found = found or [scheme for scheme in self.schemes if scheme.name == wanted]
        return sorted(found, key=lambda one: (not by_default(one.runs[0].config), -len(one.by_seed), one.label))


# -- finding and reading -----------------------------------------------------------------------------------------------


def read(folder: Path) -> RunData:
    """One run folder.

    Raises:
        UserError: its files cannot be read as what they should be.
    """
    run = described(folder)
    run.results  # noqa: B018  (an error is this function's)
    return run


def described(folder: Path) -> RunData:
    """The same, but the sums by block, most of what there is to read, are read when they are first asked for."""
    rows, config, record = evaluation_rows(folder), load_any_config(folder), load_record(folder)
    if record.get("status") == "running" and died(folder):
        record["status"] = "died"
    shown = {key: str(record[key]) for key in ("command", "message") if record.get(key)}
    if record.get("status") == "done" and "message" in shown:
        shown["message"] = f"a later evaluation ended early ({record.get('reason')}): {shown['message']}"
    return RunData(folder, record | shown, config, rows)


# -- sorting -----------------------------------------------------------------------------------------------------------


def groups(runs: list[RunData], reference: str | None = None) -> list[Group]:
    """Runs sorted into sets that may be compared: of text before tasks, those with results first, then the largest.

    Args:
        reference: name or label of the scheme that the others are compared with, where a set has it; None: `rope`.

    Raises:
        UserError: no set has such a scheme.
    """
    sets: dict[str, list[RunData]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: _corpus(run) is None):
        sets[_home(run, list(sets))].append(run)
    ordered = sorted(sets.items(), key=lambda item: (*_rank(item[1]), item[0]))
    settings = [{**settings, **(corpus or {})} for settings, corpus in (json.loads(key) for key, _ in ordered)]
    found = []
    for setting, (_, members) in zip(settings, ordered, strict=True):
        alike = [one for one, (_, others) in zip(settings, ordered, strict=True) if others[0].task == members[0].task]
        apart = {key: spelt(setting.get(key)) for key in differing(alike)}
        found.append(Group(_schemes(members), apart, reference))
    if reference is not None and not any(group.reference for group in found):
        known = sorted({name for group in found for one in group.schemes for name in (one.name, one.label)})
        raise UserError(f"no scheme is called '{reference}': expected one of {', '.join(known)}")
    return found


def _rank(members: list[RunData]) -> tuple[str, bool, int]:
    return members[0].task or "", not any(run.results.at for run in members), -len(members)


def _home(run: RunData, known: list[str]) -> str:
    """The key of a run's set. One that failed before it knew its corpus joins the runs that asked for the same."""
    wanted, corpus = asked(run.config), _corpus(run)
    if corpus is None:
        for key in known:
            if json.loads(key)[0] == wanted:
                return key
    return json.dumps([wanted, corpus], sort_keys=True)


def repeated(runs: list[RunData]) -> list[RunData]:
    """Runs that another folder of the same encoding, options and seed has already: they would count one seed twice."""
    seen, again = set(), []
    for run in (run for run in runs if _corpus(run) is not None):
        key = json.dumps([asked(run.config), _corpus(run), scheme_options(run), run.seed], sort_keys=True)
        if key in seen:
            again.append(run)
        seen.add(key)
    return again


def mixed_code(runs: list[RunData]) -> list[str]:
    """A line for each encoding that is not posbench's own and of whose file these runs have several versions."""
    versions: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # runs by encoding and digest
    for run in runs:
        trained = run.record.get("installed_encodings")
        for name, digest in trained.items() if run.done and isinstance(trained, dict) else ():
            versions[name][spelt(digest)].append(run.folder.name)
    return [
        f"'{name}' was trained with {len(by_digest)} versions of its file, so these runs differ in more than they say: "
        + "; ".join(f"{counted(len(names), 'run')} of sha256 {one}, as {names[0]}" for one, names in by_digest.items())
        + ". 'posbench train ... --restart' trains a run anew"
        for name, by_digest in versions.items()
        if len(by_digest) > 1
    ]


@dataclasses.dataclass(frozen=True)
class Failure:
    """The outcome of runs that are not done; equal ones are grouped."""

    outcome: str
    message: str
    runs: list[str]  # their names


def failures(runs: list[RunData]) -> list[Failure]:
    """Runs that are not done, and cells of the studies' `sweep.json` that left no run folder; the most frequent first.

    A message may name its own run: such messages are alike, too.
    """
    known = [(run.folder.name, run.outcome, str(run.record.get("message") or "")) for run in runs if not run.done]
    for study in studies(runs):
        for cell in listed(study / "sweep.json", "cells"):
            name = str(cell.get("id"))
            if not (study / str(cell.get("id")) / "run.json").is_file():
                outcome = str(cell.get("reason") or cell.get("status"))
                known.append((name, f"{outcome}, without a run folder", str(cell.get("message") or "")))
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, outcome, message in known:
        found[outcome, message.replace(name, "RUN")].append(name)
    alike = [Failure(*key, names) for key, names in found.items()]
    one = {name: message for name, _, message in known}
    alike = [dataclasses.replace(each, message=one[each.runs[0]]) if len(each.runs) == 1 else each for each in alike]
    return sorted(alike, key=lambda each: -len(each.runs))


def commands(runs: list[RunData]) -> list[str]:
    """The command lines that runs were started with, each once: that of their sweep where its record has it."""
    swept = {
        study / str(cell.get("id")): cell["command"]
        for study in studies(runs)
        for cell in listed(study / "sweep.json", "cells")
        if isinstance(cell.get("command"), str)
    }
    found = (swept.get(run.folder) or str(run.record.get("command") or "") for run in runs)
    return [command for command in dict.fromkeys(found) if command]


def families(group: Group) -> list[tuple[set[str], int]]:
    """The schemes that one sweep named, by label, and how many it named with the reference.

    Verdicts are joint over a family, so that they do not depend on what else lies in the folder. Schemes that no sweep
    named are one family. A scheme that several sweeps named belongs to the one that named most.
    """
    named: dict[str, set[str]] = defaultdict(set)  # command -> labels
    lost: dict[str, int] = defaultdict(int)
    labels = {run.folder: scheme.label for scheme in group.schemes for run in scheme.runs}
    for study in studies(group.runs):
        cells = [cell for cell in listed(study / "sweep.json", "cells") if isinstance(cell.get("command"), str)]
        own = {json.dumps(_split(cell)[1]) for cell in cells if study / str(cell.get("id")) in labels}
        missing: dict[str, set[str]] = defaultdict(set)
        there: dict[str, set[str]] = defaultdict(set)
        for cell in cells:
            label = labels.get(study / str(cell.get("id")))
            scheme, rest = map(json.dumps, _split(cell))
            if label is not None:
                named[cell["command"]].add(label)
                there[cell["command"]].add(scheme)
            elif rest in own:
                missing[cell["command"]].add(scheme)
        for command, schemes in missing.items():
            lost[command] += len(schemes - there[command])
    found: list[tuple[set[str], int]] = []
    taken: set[str] = set()
    reference = {group.reference.label} if group.reference else set()
    size = {command: len(each | reference) + lost[command] for command, each in named.items()}
    for command in sorted(named, key=lambda one: (-size[one], one)):
        found.append((named[command] - taken, size[command]))
        taken |= named[command]
    if alone := {one.label for one in group.schemes} - taken:
        found.append((alone, len(alone | reference)))
    return found


def _split(cell: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The overrides of a sweep's cell that make the scheme, and all others but the seed."""
    given = cell.get("overrides")
    overrides = sorted(str(one) for one in given) if isinstance(given, list) else []
    scheme = [one for one in overrides if one.startswith(("encoding", *_SCHEME_KEYS))]
    return scheme, [one for one in overrides if one not in scheme and not one.startswith(("seed=", "start="))]


def studies(runs: list[RunData]) -> list[Path]:
    """The folders that the runs lie in."""
    return sorted({run.folder.parent for run in runs})


def listed(path: Path, key: str) -> list[dict[str, Any]]:
    """The objects of a list in a JSON file; none if it is not such a file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    rows = content.get(key) if isinstance(content, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def asked(config: AnyConfig) -> dict[str, Any]:
    """The settings that must be equal in runs that are compared: model, initialisation, budget."""
    plain = {k: v for k, v in to_container(config).items() if k not in _NOT_COMPARED}
    data = config.data  # a path may differ: the digest says whether the text does
    settings = flat({"data.name": data.name, "data.task": data.task, "data.offset": data.offset})
    settings |= {k: v for k, v in flat(plain).items() if not k.startswith((*_SCHEME_KEYS, "data.", "start"))}
    if isinstance(config, Config) and (start := config.start):  # compared with training as long from 0
        settings["training.tokens"] = start.tokens + config.training.tokens
        settings["training.warmup_tokens"] = start.warmup_tokens
    found: dict[str, Any] = one_number(settings)
    return found


def _corpus(run: RunData) -> dict[str, Any] | None:
    data = run.record.get("data")
    if not isinstance(data, dict):
        return None
    facts = {"data.sha256": data.get("sha256"), "data.split": data.get("split")}
    return facts | {"tokenizer_sha256": run.record.get("tokenizer_sha256")}


def scheme_options(run: RunData) -> dict[str, Any]:
    """What makes its scheme beside the name: the encoding's options, its learning rate, where it began."""
    plain = to_container(run.config)
    options = {key: value for key, value in flat(plain).items() if key.startswith(_SCHEME_KEYS)}
    if isinstance(run.config, Config) and (start := run.config.start):
        name = _OF_ENCODING.match(Path(start.run).name)
        options[_START] = start.train_length
        options[f"{_START}.encoding"] = name[1] if name else None
        options[f"{_START}.tokens"] = start.tokens
        options[f"{_START}.warmup_tokens"] = run.config.training.warmup_tokens
    found: dict[str, Any] = one_number(options)
    return found


def _schemes(members: list[RunData]) -> list[Scheme]:
    variants: dict[str, dict[str, list[RunData]]] = defaultdict(lambda: defaultdict(list))
    for run in members:
        variants[run.name][_text(scheme_options(run))].append(run)
    schemes = []
    for name, by_options in variants.items():
        options = [json.loads(key) for key in by_options]
        told = _telling(options)
        for chosen, same in zip(options, by_options.values(), strict=True):
            pattern = _patterns().get(_text(one_number(same[0].config.encoding.options)))
            keys = [key for key in told if not (pattern and key.startswith("encoding."))]
            parts = [_part(key, chosen) for key in keys if _text(chosen.get(key)) != told[key]]
            same.sort(key=lambda run: run.seed)
            schemes.append(Scheme(name, " ".join([pattern or name, *parts]), same))
    return sorted(schemes, key=lambda scheme: scheme.label)


@functools.cache
def _patterns() -> dict[str, str]:
    """The names of patterns of layers, such as `layered/gemma3`, by their options."""
    options = {name: plain_yaml.load(path) for name, path in shipped.nested("encoding").items()}
    own = {name: {key: value for key, value in one.items() if key != "name"} for name, one in options.items()}
    return {_text(one_number(each)): name for name, each in own.items()}


def _telling(options: list[dict[str, Any]]) -> dict[str, str | None]:
    """The keys that tell variants of one encoding apart, each with the value that is not spelt out.

    That is the value of more than half of the variants, else one that switches the option off, if a variant has it. A
    run that begins from another has a rate of its own: it is not spelt out, unless nothing else tells runs apart.
    """
    begun = differing([one for one in options if _START in one])
    keys = [key for key in differing(options) if not key.startswith(f"{_START}.") or key in begun]
    if _START in keys and len({_text({**one, _RATE: None}) for one in options}) == len(options):
        keys = [key for key in keys if key != _RATE]
    usual: dict[str, str | None] = {}
    for key in keys:
        counted = collections.Counter(_text(one.get(key)) for one in options)
        value, count = counted.most_common(1)[0]
        off = next((text for text in _OFF if text in counted), None)
        usual[key] = _OFF[0] if key.startswith(_START) else value if 2 * count > len(options) else off
    return usual


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _part(key: str, chosen: dict[str, Any]) -> str:
    """`base=500000`; of a run that began from another, `start=128`, the length that this one was trained at."""
    name = key if key.startswith(_START) else key.rpartition(".")[2]
    return f"{name}={spelt(chosen.get(key))}"


def differing(settings: list[dict[str, Any]]) -> list[str]:
    """The keys, sorted, whose values are not the same in all."""
    keys = sorted({key for setting in settings for key in setting})
    return [key for key in keys if len({json.dumps(setting.get(key), sort_keys=True) for setting in settings}) > 1]


def spelt(value: Any) -> str:
    """A setting as it may be shown anywhere, digests by their first digits."""
    return _DIGEST.sub(r"\1", value if isinstance(value, str) else json.dumps(value))


def by_default(config: AnyConfig) -> bool:
    """Whether the rotary base is the usual one: of several variants such a one is the reference."""
    return config.encoding.options.get("base") in (None, 10000)
