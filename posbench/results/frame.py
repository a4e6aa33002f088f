"""Run folders and saved studies as one tidy frame: a row per run, protocol, variant,
task, length and tokens trained.

A row has the facts of its run, its numbers, and lists by unit of text: `unit_documents`
(the document of each), `unit_tokens`, and in nats `unit_nll`, `unit_ngram` and
`unit_cached_ngram` (`evaluation.ngrams`). A run without results keeps one row. What is
undefined has a `status` and no number. All that is printed or drawn is selected from
the frame.
"""

import functools
import hashlib
import itertools
import json
import re
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from posbench.config import shipped
from posbench.config.identity import (
    NOT_IDENTITY,
    one_number,
)
from posbench.config.schema import flat
from posbench.errors import UserError
from posbench.run import CONFIG
from posbench.run import rows as run_rows
from posbench.run.find import run_folders
from posbench.run.rows import number
from posbench.run.run import in_use, load_record

SUFFIX = ".parquet"  # of a study that is one file
# share of right tokens that a run needs at every trained length to have learned a task
GATE = 0.99

_TEXTS = [
    "folder",
    "run",
    "study",
    "encoding",
    "run_status",
    "run_reason",
    "trained_task",
    "text",
    "text_sha256",
    "text_split",
    "tokenizer_sha256",
    "installed_encodings",
    "command",
    "settings",
]
_WHOLE = [
    "seed",
    "train_length",
    "trained_tokens",
    "parameters",
    "encoding_parameters",
    "steps_to_gate",
]
_NUMBERS = ["learning_rate", "train_seconds", "cpu_seconds"]
# and their keys in a row's `units`
_UNITS = {"unit_documents": "document", "unit_tokens": "tokens"}
_UNITS |= {f"unit_{name}": name for name in ("nll", "ngram", "cached_ngram")}
_COLUMNS = [
    *_TEXTS,
    *_WHOLE,
    *_NUMBERS,
    *run_rows.COLUMNS,
    "variant",
    "main",
    "newest",
    *_UNITS,
]
_HINTS = typing.get_type_hints(run_rows.EvaluationRow)
_TYPES = {
    name: "Int64"
    for name in _COLUMNS
    if name in _WHOLE or _HINTS.get(name) in (int, int | None)
}
_TYPES |= {
    name: "float64"
    for name in _COLUMNS
    if name in _NUMBERS or _HINTS.get(name) in (float, float | None)
}

# What may differ between schemes that are compared: the encoding, the learning rate
# that suits it, where a run began.
_RATE, _START = "training.learning_rate", "start"
# of the run that one began from
_STARTS = ("start.encoding", "start.tokens", "start.options", "start.text_sha256")
_SCHEME = ("encoding.", "model.attention.", _RATE)
_NOT_COMPARED = (
    "study",
    "seed",
    *_SCHEME,
    *(f"{name}." for name in (*NOT_IDENTITY, "data", _START)),
)
# the digest of the text stands for the rest
_TEXT = ("data.name", "data.task", "data.offset", "data.document_mask")
_OFF = ("null", "false", "0")  # as JSON: values of an option that is off or unset
_RUN_NAME = re.compile(r"(.+)-s\d+-[0-9a-f]{8}")
# a SHA-256, of which twelve digits are shown
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


def read(
    paths: Iterable[Path],
    split: str | None = None,
    counts: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Read runs into one frame.

    Args:
        paths: run folders, study folders, globs, and studies in one file, as
            `read(...).to_parquet(path)` writes.
        split: the split of the main rows of runs in folders; None: the split that each
            run asks for.
        counts: by folder and digest of targets; the highest wins. None: how many runs
            of its setting have them at 1x.

    Returns:
        A row per run and `EVALUATION_KEY`: the columns of `EvaluationRow`, sums by
        unit, and among others `run_status` (done, running, stopped, died, unreadable,
        or why it failed: diverged, oom ...), `setting` (digest of all that must be
        equal in runs that are compared), `scheme` (JSON of what may differ), `label`
        (the encoding, with what sets it apart in its setting), `options` (what sets it
        apart from others of the encoding), `repeated` (another run has the same
        setting, scheme and seed), `main` (a row of the split that its run asks for, on
        the targets of its curve), and `newest` (a main row of the newest checkpoint).

    Raises UserError if a path does not exist or there is no run. A run that cannot be
    read is a row that says so.
    """
    paths = list(dict.fromkeys(map(Path, paths)))
    studies, run_paths = (
        [path for path in paths if (path.suffix == SUFFIX) == is_study]
        for is_study in (True, False)
    )
    folders = run_folders(run_paths) if run_paths or not studies else []
    rows = [
        row
        for run in folders
        for row in _rows(
            run, split, None if counts is None else counts.get(str(run), {})
        )
    ]
    # without copies
    kept = [
        study[~study["folder"].isin([*map(str, folders)])]
        for study in map(_load, studies)
    ]
    parts = [*kept, *([_typed(pd.DataFrame(rows, columns=_COLUMNS))] if rows else [])]
    frame = _with_derived(pd.concat(parts, ignore_index=True))
    if counts is None and frame.duplicated(["folder", *run_rows.EVALUATION_KEY]).any():
        at_one = frame[
            (frame["length_ratio"] == 1)
            & (frame["variant"] == run_rows.PLAIN)
            & (frame["status"] == "ok")
        ]
        runs = at_one.drop_duplicates(["folder", "targets_sha256"]).value_counts(
            ["setting", "targets_sha256"]
        )
        return read(
            paths,
            split,
            {
                run: dict(runs.get(s, {}))
                for run, s in frame[["folder", "setting"]].to_numpy()
            },
        )
    assert not frame.duplicated(["folder", *run_rows.EVALUATION_KEY]).any(), (
        "a run has two rows of one key"
    )
    return frame


def _load(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(path)
        frame["folder"] = [str(path.with_suffix("") / run) for run in frame["run"]]
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return _typed(frame.reindex(columns=_COLUMNS))


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with the types of its columns. Whole numbers may be missing; a
    missing text or list is None.
    """
    marks = {name: frame[name].eq(True) for name in ("main", "newest")}
    names = [name for name in _COLUMNS if name not in _TYPES and name not in marks]
    texts = {
        name: frame[name].astype("object").where(frame[name].notna(), None)
        for name in names
    }
    # in a file it has one type
    texts |= {name: texts[name].map(np.float64, na_action="ignore") for name in _UNITS}
    return frame.astype(_TYPES).assign(**texts, **marks)


def _rows(
    folder: Path, split: str | None, counts: Mapping[str | None, int] | None
) -> list[dict[str, Any]]:
    """Return the rows of a run with its facts. A run without rows, or one that cannot
    be read, has one row of facts.
    """
    facts: dict[str, Any] = {"folder": str(folder), "run": folder.name}
    try:
        facts |= _facts(folder)
        rows = _measured_rows(
            folder,
            split or json.loads(facts["settings"]).get("evaluation.split", ""),
            counts,
        )
    # whatever is wrong with one run is said in its row, and the others are read
    except Exception as error:
        return [
            facts
            | {
                "run_status": "unreadable",
                "run_reason": str(error) or type(error).__name__,
            }
        ]
    return [facts | row for row in rows] or [facts]


def _facts(folder: Path) -> dict[str, Any]:
    """Return the facts of a run, without importing its encoding."""
    record, container = load_record(folder), shipped.load(folder / CONFIG)
    elsewhere = "reading" in container  # a model that was only evaluated here
    settings = {
        key: value
        for key, value in one_number(flat(container)).items()
        if value is not None
    }
    if "start.run" in settings:
        match = _RUN_NAME.match(Path(settings["start.run"]).name)
        settings["start.encoding"] = match[1] if match else None

    status = record["status"]
    if status == "failed":
        status = record.get("reason") or status
    if status == "running" and not in_use(folder):
        status = "died"

    task = settings.get("data.task.name")
    training = run_rows.training_rows(folder) if task else []
    at_gate = [
        row["step"]
        for row in training
        if (number(row.get("val/accuracy")) or 0) >= GATE
    ]
    data, parameters = record.get("data") or {}, record.get("parameters") or {}
    return {
        "study": settings.get("study"),
        "encoding": settings["model.name" if elsewhere else "encoding.name"],
        # 0 if it is unknown: the model was trained elsewhere
        "seed": settings.get("seed", 0),
        "run_status": status,
        "run_reason": record.get("message"),
        "train_length": settings["training.train_length"],
        "learning_rate": settings.get(_RATE),
        "trained_tokens": record.get("tokens"),
        "trained_task": task,
        "parameters": parameters.get("total"),
        "encoding_parameters": parameters.get("encoding"),
        **{name: number(record.get(name)) for name in ("train_seconds", "cpu_seconds")},
        "steps_to_gate": min(at_gate, default=None),
        "text": data.get("name"),
        **{f"text_{name}": data.get(name) for name in ("sha256", "split")},
        "tokenizer_sha256": record.get("tokenizer_sha256"),
        "installed_encodings": _json(record.get("installed_encodings") or {}),
        "command": record.get("command"),
        "settings": _json(settings),
    }


def _measured_rows(
    folder: Path, split: str, counts: Mapping[str | None, int] | None
) -> list[dict[str, Any]]:
    """Return a run's rows by column, with marks and sums by unit. Without `counts` they
    are on all targets.
    """
    rows = (
        run_rows.every_row(folder)
        if counts is None
        else run_rows.evaluation_rows(folder, counts)
    )
    split = run_rows.headline_split(rows, split)
    main = {
        row.key
        for row in run_rows.on_shared_targets(
            [row for row in rows if row.split == split], counts
        )
    }
    last = max(
        (row.checkpoint_step for row in rows if row.split == split), default=None
    )
    return [
        row.to_json()
        | {
            "extension_options": _json(row.extension_options)
            if row.extension_options
            else None
        }
        | {
            "status": "failed"
            if row.status == "ok" and not row.measured
            else row.status
        }
        | {
            "variant": row.kind,
            "main": row.key in main,
            "newest": row.key in main and row.checkpoint_step == last,
        }
        | {
            name: np.array(row.units[key])
            for name, key in _UNITS.items()
            if row.units and key in row.units
        }
        for row in rows
    ]


def _with_derived(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with the columns that depend on what else is in it."""
    runs = frame.drop_duplicates("folder").set_index("folder")
    settings = [json.loads(text) if text else {} for text in runs["settings"]]
    compared = [_json(_comparable(of_run)) for of_run in settings]
    texts = [
        *zip(
            runs["text_sha256"],
            runs["text_split"],
            runs["tokenizer_sha256"],
            strict=True,
        )
    ]
    known_texts = {
        key: text for key, text in zip(compared, texts, strict=True) if any(text[:2])
    }
    runs["scheme"] = [_json(_scheme(of_run)) for of_run in settings]
    # a run that ended before it knew its text joins those with its configuration
    runs["setting"] = [
        hashlib.sha256(
            _json([key, text if any(text[:2]) else known_texts.get(key, text)]).encode()
        ).hexdigest()[:12]
        for key, text in zip(compared, texts, strict=True)
    ]
    for column, keys in (("label", ["setting", "encoding"]), ("options", ["encoding"])):
        runs[column] = ""
        for _, group in runs.groupby(keys):
            names = _names(
                group["scheme"].unique(),
                str(group["encoding"].iloc[0]) if column == "label" else None,
            )
            runs.loc[group.index, column] = group["scheme"].map(names)
    finished_first = runs.sort_values(
        "run_status", key=lambda status: status != "done", kind="stable"
    )
    repeated = finished_first.duplicated(["setting", "encoding", "scheme", "seed"])
    runs["repeated"] = repeated & (
        runs["text_sha256"].notna() | runs["text_split"].notna()
    )
    derived = runs[["setting", "scheme", "label", "options", "repeated"]].reindex(
        frame["folder"]
    )
    parts = frame[["protocol", "task", "offset", "extension", "window"]].astype(object)
    curves = [
        run_rows.curve_name(*p) if p[0] else ""
        for p in parts.where(parts.notna(), None).itertuples(index=False)
    ]
    return pd.concat([frame, derived.set_axis(frame.index)], axis=1).assign(
        curve=curves
    )


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must be equal in runs that are compared: model,
    initialisation, budget, kind of text.
    """
    compared = {
        k: v
        for k, v in settings.items()
        if k.startswith(_TEXT) or not k.startswith(_NOT_COMPARED)
    }
    if "start.tokens" in settings:  # compared with runs that train as long from 0
        compared["training.tokens"] = (
            settings["start.tokens"] + settings["training.tokens"]
        )
        compared["training.warmup_tokens"] = settings["start.warmup_tokens"]
    return compared


def _scheme(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run's scheme: the encoding's options, the learning rate,
    and where the run began.
    """
    options = {
        k: v
        for k, v in settings.items()
        if k.startswith(_SCHEME) and k != "encoding.file" and v is not None
    }
    if "start.tokens" in settings:
        options |= {k: v for k, v in settings.items() if k.startswith(_STARTS)}
        options |= {
            _START: settings["start.train_length"],
            "start.warmup_tokens": settings["training.warmup_tokens"],
        }
    return options


def _names(schemes: Sequence[str], encoding: str | None) -> dict[str, str]:
    """Return the words that set each scheme of one encoding apart from the others:
    `base=500`, `start=128`.

    A value is left out if more than half of the schemes have it or, if none is so
    common, if it turns the option off. A run that begins from another has its own rate,
    which is left out unless nothing else sets schemes apart. The words follow the name
    of the encoding, or of the configuration choice that has a scheme's options.
    """
    options_of = {scheme: json.loads(scheme) for scheme in schemes}
    start_keys = _differing(
        [options for options in options_of.values() if _START in options]
    )
    keys = [
        key
        for key in _differing([*options_of.values()])
        if not key.startswith(f"{_START}.") or key in start_keys
    ]
    if _START in keys and len(
        {_json({**options, _RATE: None}) for options in options_of.values()}
    ) == len(options_of):
        keys = [key for key in keys if key != _RATE]
    usual = {}
    for key in keys:
        counts = Counter(_json(options.get(key)) for options in options_of.values())
        value, count = counts.most_common(1)[0]
        off_value = next((text for text in _OFF if text in counts), None)
        usual[key] = (
            _OFF[0]
            if key.startswith(_START)
            else value
            if 2 * count > counts.total()
            else off_value
        )
    names = {}
    for scheme, options in options_of.items():
        pattern = _patterns().get(
            _json({k: v for k, v in options.items() if k.startswith("encoding.")})
        )
        spelt_keys = [key for key in keys if _json(options.get(key)) != usual[key]]
        spelt_keys = [
            key
            for key in spelt_keys
            if not (encoding and pattern and key.startswith("encoding."))
        ]
        short = {
            key: key if key.startswith(_START) else key.rpartition(".")[2]
            for key in spelt_keys
        }
        words = [
            f"{name.removesuffix('_sha256')}={setting_text(options.get(key))}"
            for key, name in short.items()
        ]
        names[scheme] = " ".join([pattern or encoding, *words] if encoding else words)
    return names


@functools.cache
def _patterns() -> dict[str, str]:
    """Return the names of configuration choices such as `layered/gemma3` by their
    options.
    """
    paths = shipped.choices("encoding", pattern=shipped.NESTED)
    names = {}
    for name, path in paths.items():
        settings = one_number(flat({"encoding": shipped.load(path)}))
        names[_json(_scheme(settings))] = name
    return names


def differing_settings(frame: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Return, by setting, the values of its compared keys that are not the same in all
    settings of the frame.
    """
    runs = (
        frame[frame["settings"].notna()].drop_duplicates("setting").set_index("setting")
    )
    texts = runs[["text_sha256", "text_split", "tokenizer_sha256"]].to_dict("index")
    facts = {
        str(setting): _comparable(json.loads(text)) | texts[setting]
        for setting, text in runs["settings"].items()
    }
    keys = _differing([*facts.values()])
    return {
        name: {k: setting_text(row[k]) for k in keys if row.get(k) is not None}
        for name, row in facts.items()
    }


def setting_text(value: Any) -> str:
    """Return a setting as text: digests by their first digits, layers as `3 rope
    window=64 + none`.
    """
    if isinstance(value, list) and value and all(isinstance(d, dict) for d in value):
        words = [
            [
                f"{key}={setting_text(d[key])}"
                for key in sorted(d, key=lambda key: key != "name")
            ]
            for d in value
        ]
        groups = [
            (len([*run]), " ".join(layer).removeprefix("name="))
            for layer, run in itertools.groupby(words)
        ]
        return " + ".join(
            f"{count} {layer}" if count > 1 else layer for count, layer in groups
        )
    return _DIGEST.sub(r"\1", value if isinstance(value, str) else _json(value))


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sorted keys whose values are not the same in all settings."""
    keys = sorted({key for setting in settings for key in setting})
    return [
        key
        for key in keys
        if len({_json(setting.get(key)) for setting in settings}) > 1
    ]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
