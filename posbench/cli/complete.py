"""Shell completion. Reads only YAML files and dataclasses, so it is quick.

A completion that would end in `=` is followed by its values, since shells put a space behind a single completion.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from posbench.config.overrides import OF_A_FINISHED_RUN, OF_A_SWEEP, WORDS, full_key
from posbench.config.settings import settings
from posbench.config.shipped import GROUPS, choices, configs_dir, nested

_BREAKS = "=:"  # bash splits words at these


def train(incomplete: str) -> list[str]:
    """Groups, keys and their values."""
    return _completed(incomplete, lambda typed: _overrides(typed, GROUPS))


def sweep(incomplete: str) -> list[str]:
    """As for `train`, plus the keys of sweeps."""
    return _completed(incomplete, lambda typed: _overrides(typed, (*OF_A_SWEEP, *GROUPS)))


def reproduce(incomplete: str) -> list[str]:
    """Names of claims, and what `train` takes."""
    names = ["all", "fragility=true", *choices("claim")]
    return _completed(
        incomplete,
        lambda typed: [*(name for name in names if name.startswith(typed)), *_overrides(typed, GROUPS)],
    )


def evaluate(incomplete: str) -> list[str]:
    """Run folders, and settings of a finished run."""
    return _completed(incomplete, lambda typed: [*_runs(typed), *_assignments(typed, OF_A_FINISHED_RUN)])


def sync(incomplete: str) -> list[str]:
    """Run folders, and the settings of the destination."""
    keys = [key for key in settings() if key.startswith("tracking.") and key != "tracking.backend"]
    return _completed(incomplete, lambda typed: [*_runs(typed), *_assignments(typed, keys)])


def report(incomplete: str) -> list[str]:
    """Study folders and run folders."""
    return _completed(incomplete, _runs)


def encodings(incomplete: str) -> list[str]:
    """Names of encodings."""
    return _completed(incomplete, _encodings)


def schemes(incomplete: str) -> list[str]:
    """Names of encodings, and run folders."""
    return _completed(incomplete, lambda typed: [*_encodings(typed), *_runs(typed)])


def _completed(incomplete: str, words: Callable[[str], Iterable[str]]) -> list[str]:
    """The completions of the word being typed; for bash only the part after a word break."""
    typed = _word_in_bash() if "bash" in os.environ.get("_POSBENCH_COMPLETE", "") else incomplete
    found = words(typed)
    if typed == incomplete:
        return list(found)
    behind = max(typed.rfind(char) for char in _BREAKS) + 1
    return [word[behind:] for word in found if word.startswith(typed[:behind])]


def _word_in_bash() -> str:
    """The whole word before the cursor, joined from the parts into which bash splits it."""
    parts, at = os.environ.get("COMP_WORDS", "").split(), int(os.environ.get("COMP_CWORD") or 0)
    word = parts[at] if at < len(parts) else ""
    while at > 1 and (word[:1] in [*_BREAKS] or parts[at - 1][-1:] in [*_BREAKS]):
        at -= 1
        word = parts[at] + word
    return word


# -- key=value ---------------------------------------------------------------------------------------------------------


def _overrides(typed: str, groups: Iterable[str]) -> list[str]:
    """Without a dot, groups and sections; with one, the keys of its section."""
    key, equals, _ = typed.partition("=")
    if equals or "." in key:
        return _assignments(typed, [*groups, *settings(), *WORDS, *_options()])
    sections = {key.partition(".")[0] for key in settings() if "." in key}
    names = [*groups, "seed", "study", *sorted(f"{section}." for section in {*sections, "encoding"})]
    found = [name if name.endswith(".") else f"{name}=" for name in names if name.startswith(typed)]
    if found and found[0].endswith(".") and len(found) == 1:
        return _overrides(found[0], groups)
    return found if len(found) != 1 else _assignments(found[0], names)


def _assignments(typed: str, keys: Iterable[str]) -> list[str]:
    """`key=` for every key that begins so; for a single key, also its values."""
    key, equals, value = typed.partition("=")
    found = [key] if equals else list(dict.fromkeys(known for known in keys if known.startswith(key)))
    if len(found) != 1:
        return [f"{known}=" for known in found]
    before, comma, last = value.rpartition(",")  # `rope,al` becomes `rope,alibi`
    values = [f"{found[0]}={before}{comma}{one}" for one in _values(found[0]) if one.startswith(last)]
    return values if equals else [f"{found[0]}=", *values]


def _values(key: str) -> list[str]:
    """The values of a group or a key; the default if there is no list."""
    if key in (*GROUPS, "sweep"):
        return list(_choices(key))
    full = full_key(key)
    if full == "evaluation.tasks":
        from posbench.evaluation import probes

        return probes.names()
    if full == "evaluation.extensions":
        from posbench.encodings.extend import NAMES

        return list(NAMES)
    if key == "tune":
        return ["true", "false"]
    return list(settings().get(full, ())) or _default(full)


def _options() -> list[str]:
    """Keys of the encoding and of the task that the command line chooses."""
    encoding = _read(_choices("encoding")[_chosen("encoding", "rope")])
    task = _read(_choices("data")[_chosen("data", "builtin")]).get("task") or {}
    owners = {"encoding": encoding, "data.task": task}
    return [f"{key}.{name}" for key, own in owners.items() for name in own if name != "name"]


def _default(key: str) -> list[str]:
    """The default value of a key, given the encoding and the experiment on the command line."""
    primary = _read(configs_dir() / "train.yaml")
    sources = [_read(_choices("experiment")[_chosen("experiment", "demo")]), primary]
    section = key.partition(".")[0]
    if section in GROUPS:
        usual = next(entry[section] for entry in primary["defaults"] if isinstance(entry, dict) and section in entry)
        sources.insert(1, {section: _read(_choices(section)[_chosen(section, usual)])})
    for source in sources:
        for name in key.split("."):
            source = source.get(name, {}) if isinstance(source, dict) else {}
        if source != {}:
            return [json.dumps(source, separators=(",", ":")).replace('"', "")]
    return []


def _chosen(group: str, usual: str) -> str:
    """The choice of a group on the command line."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    words = " ".join(line.split()).replace(" = ", "=").split()  # bash splits them
    given = [word.partition("=")[2] for word in words if word.startswith(f"{group}=")]
    return next((name for name in reversed(given) if name in _choices(group)), usual)


def _choices(group: str) -> dict[str, Path]:
    """The choices of a group, with its folders: layered/gemma3, task/copy."""
    return choices(group) | nested(group)


def _read(path: Path) -> dict[str, Any]:
    """One of posbench's YAML files, merged with its bases: in its folder, or written as /data/_base@_here_."""
    import yaml

    own: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    named = [name.partition("@")[0] for name in own.get("defaults", []) if isinstance(name, str) and name != "_self_"]
    bases = [configs_dir() / name[1:] if name.startswith("/") else path.parent / name for name in named]
    return {key: value for base in bases for key, value in _read(base.with_name(f"{base.name}.yaml")).items()} | own


def _encodings(typed: str) -> list[str]:
    return [name for name in choices("encoding") if name.startswith(typed)]


# -- paths -------------------------------------------------------------------------------------------------------------


def _runs(typed: str) -> Iterator[str]:
    """Folders of studies and runs under the folder being typed, or under `outputs`."""
    above = Path(typed.rpartition("/")[0] or ".") if "/" in typed else Path("outputs")
    for folder in sorted(above.glob("*/")):
        if (str(folder).startswith(typed) and (folder / "run.json").is_file()) or any(folder.glob("*/run.json")):
            yield str(folder)
