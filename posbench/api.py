"""The commands of `posbench` as functions for scripts and notebooks. Errors are
exceptions.
"""

import contextlib
import functools
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from posbench import encodings, machine
from posbench.config.overrides import KEYS
from posbench.config.schema import AnyConfig, value_type
from posbench.config.shipped import GROUPS
from posbench.data.tokenizer import Tokenizer
from posbench.errors import RunFailed, UserError
from posbench.evaluation.job import evaluate_run
from posbench.launch import execute as launch
from posbench.launch import plans
from posbench.launch import sweep as many
from posbench.model.gpt import GPT
from posbench.results import frame as results
from posbench.results.headline import TEXTS, Headline, Measure, headline, measures
from posbench.run import find
from posbench.run.folder import evaluated_config, load_config
from posbench.run.model import model_of, tokenizer_of
from posbench.run.rows import (
    COLUMNS,
    EVALUATION_KEY,
    PLAIN,
    EvaluationRow,
    evaluation_rows,
    number,
    training_rows,
)
from posbench.run.saved import load_any, load_record
from posbench.terminal import console
from posbench.typed import Typed

if TYPE_CHECKING:
    from posbench.reports import charts

logger = logging.getLogger(__name__)
Words = Sequence[str]  # key=value, as typed after a command

# The columns of `runs` that come before the measured ones, by their names in the frame.
_FACTS = {
    "study": "study",
    "run": "id",
    "encoding": "encoding",
    "label": "label",
    "seed": "seed",
    "train_length": "train_length",
    "learning_rate": "learning_rate",
    "parameters": "parameters",
    "trained_tokens": "tokens",
    "run_status": "status",
    "text_sha256": "data",
}
_LAST = {"trained_task": "task", "train_seconds": "seconds", "folder": "folder"}
# The first columns of `curve`, then its columns of whole numbers in which a row may
# have none.
_FIRST = (
    "curve",
    "protocol",
    "length",
    "length_ratio",
    "nll",
    "ci_low",
    "ci_high",
    "learned",
    "perplexity",
)
_FIRST_OF_TASK = (
    "curve",
    "task",
    "problem_length",
    "length_ratio",
    "offset",
    "accuracy",
    "exact_match",
    "learned",
)
_COUNTS = (
    "problem_length",
    "offset",
    "window",
    "n_tokens",
    "n_bytes",
    "n_blocks",
    "n_documents",
)
# The order of the measured columns of `runs`.
_ORDER = (
    "ngram",
    "mixture",
    "cached_ngram",
    "nll",
    "rise",
    "reach",
    "uses",
    "steps_to_gate",
    "accuracy",
    "exact_match",
)


class LoadedRun:
    """A run folder as it was when it was read. `config` is its configuration, `record`
    the content of `run.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # also after a change of directory
        self.config: AnyConfig = load_any(folder)
        self.record = load_record(folder)
        self._rows = evaluation_rows(folder)
        self._frame = results.read([folder])
        if self.status == "unreadable":
            raise UserError(f"{folder}: {self._frame['run_reason'].iloc[0]}")

    @property
    def id(self) -> str:
        """The run's name; its last eight digits are a digest of all that shapes its
        weights.
        """
        return self.record.id

    @property
    def status(self) -> str:
        """`done`, `running`, `stopped`, or why it failed: `diverged`, `oom`, `disk`,
        `error`.
        """
        return str(self._frame["run_status"].iloc[0])

    @functools.cached_property
    def headline(self) -> Headline:
        """The values of the run's row in `runs`, by name."""
        return headline(self._frame)

    @property
    def learned(self) -> str | None:
        """Whether it beats the best n-gram model: `yes`, `no` or `not resolved`; None
        if that is not known.
        """
        learned: str | None = self.headline["learned"]
        return learned

    def curve(self) -> pd.DataFrame:
        """Return a row per evaluation, in tokens and nats per token; `reason` says why
        a value is undefined (NaN).

        `curve` names the rows that belong together: fixed_target, windowed,
        fixed_target_yarn ...
        """

        def as_trained_first(row: EvaluationRow) -> tuple[Any, ...]:
            is_variant = ":" in (row.task or "") or row.variant != PLAIN
            return (
                is_variant,
                row.curve_name != "fixed_target",
                row.offset or 0,
                row.curve_name,
                row.length_ratio,
            )

        rows = sorted(self._rows, key=as_trained_first)
        first = _FIRST_OF_TASK if self.config.data.task else _FIRST
        columns = list(dict.fromkeys(first + COLUMNS))
        values = [{"curve": row.curve_name, **row.to_json()} for row in rows]
        frame = pd.DataFrame(values, columns=columns)
        frame["learned"] = self.learned
        return frame.astype(dict.fromkeys(_COUNTS, "Int64"))

    def metrics(self) -> pd.DataFrame:
        """Return training metrics, a row per logged step: `step`, `tokens`,
        `train/loss`, `val/loss` (nats), ...
        """
        rows = []
        for line in training_rows(self.folder):
            rows.append({key: number(value) for key, value in line.items()})
        frame = pd.DataFrame(rows or {"step": [], "tokens": []})
        last = frame.groupby("step", as_index=False).last()
        return last.astype({"step": "int64", "tokens": "int64"})

    def units(self) -> pd.DataFrame:
        """Return the sums behind `curve` in nats, a row per document (per segment,
        where documents are few).

        Where `targets_sha256` is equal, the nth units cover the same tokens, in other
        runs, too.
        """
        keys = (*EVALUATION_KEY, "targets_sha256")
        frames = []
        for row in self._rows:
            if row.units:
                of_row = {name: getattr(row, name) for name in keys}
                frames.append(pd.DataFrame(of_row | row.units))
        if not frames:
            return pd.DataFrame()
        return pd.concat(frames, ignore_index=True)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with: `encode(texts)`, `decode(ids)`,
        `separator`.
        """
        return tokenizer_of(self.folder)

    def model(self, device: str = "cpu") -> GPT:
        """Return the trained model in eval mode: `model(run.ids(text))` gives logits
        (1, T, vocab_size).
        """
        model = model_of(self.folder, load_config(self.folder), self.tokenizer)
        return model.to(machine.resolve(device))

    def ids(self, text: str) -> torch.Tensor:
        """Return token ids (1, T) of a text, the separator first."""
        (ids,) = self.tokenizer.encode([text])
        return torch.tensor([[self.tokenizer.separator, *ids.tolist()]])

    def attention(self, text: str) -> torch.Tensor:
        """Return the attention weights of a text, (layers, heads, T, T) for the tokens
        of `ids(text)`, by the definition: row t holds the weights of query t.
        """
        from posbench.model.definition import by_definition

        with torch.no_grad():
            _, layers = by_definition(self.model(), self.ids(text))
            return torch.cat([layer.weights for layer in layers])

    def plot(self) -> "charts.Picture":
        """Draw the curve beyond the training length; for a run on a task, accuracy by
        problem length.
        """
        return plot(self)

    def __repr__(self) -> str:
        return f"<run {self.id}: {self.status}, learned {self.learned}; {self.folder}>"


def load(run: LoadedRun | str | Path) -> LoadedRun:
    """Read a run, finished or not, by its folder or id; a run that was read is read
    again. Raises UserError if there is none or it cannot be read.
    """
    return LoadedRun(find.run_folder(_path_of(run)))


def runs(*paths: LoadedRun | str | Path) -> pd.DataFrame:
    """Return a table with a row per run. A run that cannot be read is left out with a
    warning.

    `paths`: run folders, study folders, globs, `outputs/**`, and what `load` returned;
    default: `outputs`.

    Returns:
        `learned` and `beats_reader` (yes, no, not resolved) say whether a run beats the
        simple readers, whose losses are `ngram` and `mixture`. `nll_1x`, `nll_2x` ..
        are nats per token of the same target tokens at a context of 1, 2 .. training
        lengths; `rise_2x` .. is that less `nll_1x`. `reach` is the longest context in
        tokens up to which the rise has an upper bound of at most 0.05. The run uses
        more than `uses` tokens: the loss at so many is above `nll_1x` by a lower bound
        of over 0.02.
    """
    frame = results.read(map(_path_of, paths or ["outputs"]))
    unreadable = frame["run_status"] == "unreadable"
    for run in frame[unreadable].itertuples():
        warnings.warn(
            f"left out, unreadable: {run.folder}: {run.run_reason}", stacklevel=2
        )
    frame = frame[~unreadable]
    found = {folder: measures(rows) for folder, rows in frame.groupby("folder")}
    headlines = {}
    for folder, values in found.items():
        headlines[folder] = {measure.name: value for measure, value in values.items()}
    measured = pd.DataFrame.from_dict(headlines, "index")

    known = {Measure("nll", 1)}.union(*found.values())
    of_numbers = [measure for measure in known if measure.kind not in TEXTS]
    of_numbers.sort(key=lambda each: (_ORDER.index(each.kind), each.ratio or 0))
    numbers = [measure.name for measure in of_numbers]

    names = _FACTS | _LAST
    facts = frame.drop_duplicates("folder", ignore_index=True)[[*names]]
    facts = facts.rename(columns=names)
    task = ["task"] if facts["task"].notna().any() else []
    columns = [*_FACTS.values(), *TEXTS, *task, *numbers, "seconds", "folder"]
    table = facts.join(measured, on="folder").reindex(columns=columns)
    return table.astype(
        dict.fromkeys([*numbers, "seconds", "learning_rate"], "float64")
    )


def plot(
    *runs: LoadedRun | str | Path, reference: str | None = None
) -> "charts.Picture":
    """Draw the curves of comparable runs. Give what `load` returned, run folders, study
    folders or globs.

    `reference`: the encoding or label that the others are compared with. None: `rope`.
    """
    from posbench.reports import charts

    frame = results.read(map(_path_of, runs))
    for run in frame[frame["run_status"] == "unreadable"].itertuples():
        raise UserError(f"{run.folder}: {run.run_reason}")
    each_seed_once = frame[~frame["repeated"]]
    return charts.runs_figure(each_seed_once, reference)


def report(
    *paths: LoadedRun | str | Path,
    out: str | Path | None = None,
    least: float | None = None,
    reference: str | None = None,
    figure: "charts.FigureKind" = "panels",
) -> pd.DataFrame:
    """Print and write the report on runs as `posbench report` does, and return the runs
    as `runs` does.

    Args:
        paths: run folders, study folders, globs, kept studies (`*.parquet`), and what
            `load` returned.
        out: folder for the files; None: `report` in the study's folder.
        least: the smallest difference, in nats per token, that gets a word.
        reference: label, encoding or extension that others are compared with. None:
            `rope`, or `none` on tasks without it.
        figure: `panels` or `curve`, the loss alone.
    """
    from posbench import reports

    if figure not in ("panels", "curve"):
        raise UserError(f"figure is {figure!r}: expected 'panels' or 'curve'")
    places = [_path_of(path) for path in paths]
    reports.main(places, out, least, reference, figure)
    return runs(*places)


def train(
    overrides: Words = (),
    *,
    restart: bool = False,
    config_dir: str | Path | None = None,
    **settings: Any,
) -> LoadedRun:
    """Train and evaluate as `posbench train` does, in this process. The same settings
    continue or complete a run.

    Args:
        overrides: words as typed after the command, ["encoding=alibi",
            "training.tokens=500000"].
        restart: move an existing run aside and begin anew.
        config_dir: a folder of further YAML files.
        settings: values by key: encoding="alibi", training={"tokens": 500_000}. An
            encoding may be a class.

    Raises:
        RunFailed: the run diverged or ran out of memory or disk; what was computed is
            kept.
        Stopped: it was interrupted, as by a notebook's stop button, and has been saved.
    """
    words = _words(overrides, settings)
    directory = None if config_dir is None else Path(config_dir)
    plan = plans.resolve_one(words, directory)
    with _shown_log():
        launch.train(plan, restart)
        return _load_logged(plan.folder)


def evaluate(
    run: LoadedRun | str | Path, overrides: Words = (), **settings: Any
) -> LoadedRun:
    """Evaluate a finished run, or a HuggingFace model, as `posbench evaluate` does, and
    return it with its new rows.

    Args:
        run: what `load` or `train` returned, a run folder, or a HuggingFace model: its
            folder or its name on the hub.
        overrides, settings: as for `train`: ["length=128,256", "extension=yarn"], or
            length=[128, 256].
    """
    words = _words(overrides, settings)
    path = _path_of(run)
    with _shown_log():
        if find.is_model(str(path)):
            from posbench.huggingface.evaluate import evaluate_model

            folder = evaluate_model(str(path), words)
        else:
            folder = find.run_folder(path)
            config = evaluated_config(folder, words)
            work = functools.partial(evaluate_run, folder, config)
            launch.in_processes(config, work)
        return _load_logged(folder)


def sweep(
    overrides: Words = (),
    *,
    n_jobs: int | None = None,
    config_dir: str | Path | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """Train every combination of the settings' values, write the report, and return the
    runs as `runs` does.

    Each run is a process, and several run at a time. With a class that was registered
    here, they run one by one here.

    Args:
        overrides, settings: as for `train`; a list holds values to combine:
            encoding=["rope", "alibi"], seed=range(5).
        n_jobs: runs at a time; None = one per CPU core, or one per GPU (four of a
            small model).
    """
    from posbench import reports

    words = _words(overrides, settings, several=True)
    directory = None if config_dir is None else Path(config_dir)
    with _shown_log():
        # perhaps inside another encoding
        names = {*re.findall(r"\w+", " ".join(words))}
        if names & encodings.REGISTERED.keys():
            todo = plans.resolve([words], directory)
            for plan in todo:
                with contextlib.suppress(RunFailed):  # the report counts it
                    launch.train(plan)
            reports.main([plan.folder for plan in todo])
        else:
            todo = many.sweep(words, n_jobs, directory, report=reports.main)
    return runs(*(plan.folder for plan in todo))


def _words(
    overrides: Words, settings: Mapping[str, Any], several: bool = False
) -> list[str]:
    """Return settings as words of the command line. With `several`, the items of a list
    are values to combine.
    """
    if isinstance(overrides, str):
        raise UserError(
            "overrides are a list, a string each:"
            f" [{', '.join(map(repr, overrides.split()))}]"
        )
    words: list[str] = [Typed(word) for word in overrides]
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            parts = {f"{key}.{name}": part for name, part in value.items()}
            if "encoding.name" in parts:  # it is typed encoding=NAME
                parts = {"encoding": parts.pop("encoding.name"), **parts}
            words += _words((), parts, several)
            continue
        if hasattr(value, "tolist"):  # an array
            value = value.tolist()
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
        type_ = value_type(KEYS.get(key))
        has_items = key not in GROUPS and (type_.is_list or type_.item == "yaml")
        if is_sequence and several:
            items = [_typed_value(_quoted(key, item)) for item in value]
            words.append(Typed(f"{key}={','.join(items)}"))
        elif is_sequence and not has_items:
            raise UserError(
                f"{key} is a list: expected one value; posbench.sweep runs each of"
                " several"
            )
        else:
            words.append(Typed(f"{key}={_typed_value(_quoted(key, value))}"))
    return words


def _quoted(key: str, value: Any) -> Any:
    """Return a text with a comma in quotation marks, if its key holds one text: in
    Python a list has several values.
    """
    type_ = value_type(KEYS.get(key))
    holds_text = type_.item == "text" and not type_.is_list
    if holds_text and isinstance(value, str) and "," in value:
        mark = "'" if '"' in value else '"'
        if not value.startswith(("'", '"')):
            return f"{mark}{value}{mark}"
    return value


def _typed_value(value: Any) -> str:
    """Return a value as it is typed at the command line: a class as its name."""
    if isinstance(value, type):
        return encodings.register(value).name
    if isinstance(value, LoadedRun):  # start=run
        return str(value.folder)
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        value = list(value)
    if value is None or isinstance(value, bool | list | dict):
        marks = (",", ": ")
        return json.dumps(value, default=_typed_value, separators=marks)
    return str(value)


def _path_of(run: LoadedRun | str | Path) -> Path:
    if isinstance(run, LoadedRun):
        return run.folder
    if isinstance(run, str | Path):
        return Path(run)
    raise UserError(
        f"{run!r} is no run: expected a path, an id, or what posbench.load returns"
    )


def _load_logged(folder: Path) -> LoadedRun:
    run = load(folder)
    logger.info("%r", run)
    return run


@contextlib.contextmanager
def _shown_log() -> Iterator[None]:
    """Show the log, and work as in a fresh process; restore logging, warnings and
    torch's state afterwards.
    """
    with warnings.catch_warnings(), console.log_shown(), machine.fresh_state():
        # tqdm's warning about a bar that is never shown
        warnings.filterwarnings("ignore", "IProgress not found")
        yield
