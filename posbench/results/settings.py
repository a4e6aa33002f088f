"""What runs have in common and what sets them apart: their setting, scheme and label.

A setting is all that must be equal in runs that are compared; a scheme is what may
differ: the encoding, the learning rate that suits it, and where a run began.
"""

import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from posbench.config import shipped
from posbench.config.digest import NOT_IDENTITY
from posbench.run.facts import as_json, flat_settings

_RATE = "training.learning_rate"
_SCHEME = ("encoding.", "model.attention.", _RATE)
# In a scheme, `start` itself is the training length of the run that it began from.
_START = "start"
_LAYERS = "encoding.layers"
_FROM_LAYERS = "start.options.layers"
# Of the run that one began from.
_STARTS = ("start.encoding", "start.tokens", "start.options", "start.text_sha256")
# The digest of a text stands for the other settings of `data`.
_TEXT = ("data.name", "data.task", "data.offset", "data.document_mask")
_TEXT_FACTS = ["text_sha256", "text_split", "tokenizer_sha256"]
_SECTIONS = tuple(f"{section}." for section in (*NOT_IDENTITY, "data", _START))
_NOT_COMPARED = ("study", "seed", *_SCHEME, *_SECTIONS)

_OFF = ("null", "false", "0")  # as JSON: values of an option that is off or unset
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # twelve digits are shown


def with_schemes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with `setting`, `scheme`, `label` and `repeated`."""
    runs = frame.drop_duplicates("folder").set_index("folder")
    settings = [json.loads(text or "{}") for text in runs["settings"]]
    runs["scheme"] = [as_json(_scheme(of_run)) for of_run in settings]

    # A digest of what must be equal. A run that ended before it knew its text joins
    # those with its configuration.
    known: dict[str, list[Any]] = {}  # the facts of a text, by what is compared
    compared = [as_json(_compared(of_run)) for of_run in settings]
    texts = runs[_TEXT_FACTS].to_numpy(dtype=object).tolist()
    for key, text in zip(compared, texts, strict=True):
        if any(text[:2]):
            known[key] = text
    digests = []
    for key, text in zip(compared, texts, strict=True):
        facts = text if any(text[:2]) else known.get(key, text)
        digest = hashlib.sha256(as_json([key, facts]).encode())
        digests.append(digest.hexdigest()[:12])
    runs["setting"] = digests
    runs["label"] = ""
    for (_, encoding), group in runs.groupby(["setting", "encoding"]):
        labels = _labels(str(encoding), group["scheme"].unique())
        runs.loc[group.index, "label"] = group["scheme"].map(labels)

    # Of equal runs a finished one counts, and the others repeat it. A run that ended
    # before it knew its text repeats none, and none repeats it.
    has_text = runs["text_sha256"].notna() | runs["text_split"].notna()
    is_later = 2 * ~has_text + (runs["run_status"] != "done")
    in_order = runs.loc[is_later.sort_values(kind="stable").index]
    repeated = in_order.duplicated(["setting", "encoding", "scheme", "seed"])
    runs["repeated"] = repeated & has_text

    derived = runs[["setting", "scheme", "label", "repeated"]]
    return frame.join(derived, on="folder")


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must be equal in runs that are compared: model,
    initialisation, budget, kind of text.
    """
    compared = {}
    for key, value in settings.items():
        if key.startswith(_TEXT) or not key.startswith(_NOT_COMPARED):
            compared[key] = value
    if "start.tokens" in settings:  # compared with runs that train as long from 0
        compared["training.tokens"] += settings["start.tokens"]
        compared["training.warmup_tokens"] = settings["start.warmup_tokens"]
    return compared


def _scheme(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run's scheme: the encoding's options, the learning rate,
    and where the run began.
    """
    scheme = {}
    for key, value in settings.items():
        if key.startswith(_SCHEME) and key != "encoding.file":
            scheme[key] = value
    if "start.tokens" in settings:
        for key, value in settings.items():
            if key.startswith(_STARTS):
                scheme[key] = value
        scheme[_START] = settings["start.train_length"]
        scheme["start.warmup_tokens"] = settings["training.warmup_tokens"]
    return scheme


def _labels(encoding: str, schemes: Sequence[str]) -> dict[str, str]:
    """Return the label of each scheme of one encoding: `rope base=500`.

    That is the name of the encoding and the words that set the scheme apart. The name
    of a configuration choice that has a scheme's options stands for those.
    """
    labels = {}
    for scheme, words in _words(schemes).items():
        of_encoding = {}
        for key, value in json.loads(scheme).items():
            if key.startswith("encoding."):
                of_encoding[key] = value
        choice = _choices().get(as_json(of_encoding))
        names = [choice or encoding]
        for key, word in words.items():
            if choice is None or not key.startswith("encoding."):
                names.append(word)
        labels[scheme] = " ".join(names)
    return labels


def _words(schemes: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the words that set each scheme of one encoding apart from the others, by
    key: `base=500`, `start=128`.

    A value is left out if more than half of the schemes have it or, if none is so
    common, if it turns the option off.
    """
    options = {scheme: json.loads(scheme) for scheme in schemes}
    keys = _keys_apart([*options.values()])
    n_called = Counter(_short(key) for key in keys)
    usual = {}
    names = {}
    for key in keys:
        names[key] = _short(key)
        if n_called[names[key]] > 1:  # as `alpha` of an encoding and of its inner one
            names[key] = key.removeprefix("encoding.")
        counts = Counter(as_json(values.get(key)) for values in options.values())
        commonest, count = counts.most_common(1)[0]
        if key.startswith(_START):
            usual[key] = "null"  # it began from no run
        elif 2 * count > len(options):
            usual[key] = commonest
        else:
            usual[key] = next((off for off in _OFF if off in counts), "")

    words: dict[str, dict[str, str]] = {scheme: {} for scheme in schemes}
    for scheme, values in options.items():
        for key in keys:
            value = values.get(key)
            if as_json(value) != usual[key]:
                words[scheme][key] = f"{names[key]}={setting_text(value)}"
        began_with = values.get(_FROM_LAYERS, [])
        if began_with and len(values.get(_LAYERS, [])) == len(began_with):
            words[scheme].pop(_FROM_LAYERS, None)
            changed = _changed_text(values[_LAYERS], began_with)
            words[scheme][_LAYERS] = f"{setting_text(began_with)}{changed}"
    return words


def _changed_text(layers: Sequence[Any], before: Sequence[Any]) -> str:
    """Return what differs from the layers that a run began with: `: yarn factor=4 in 1
    of 4`.
    """
    changes = []
    for layer, old in zip(layers, before, strict=True):
        old_words = setting_text([old]).split()
        words = setting_text([layer]).split()
        changes.append(" ".join(word for word in words if word not in old_words))
    counts = Counter(filter(None, changes))
    texts = [f"{text} in {n} of {len(layers)}" for text, n in counts.items()]
    return f": {', '.join(texts)}" if texts else ""


def _short(key: str) -> str:
    """Return a key's name in labels."""
    name = key  # whole, as start.tokens: training has tokens, too
    if not key.startswith(_START):
        name = key.rpartition(".")[2]
    return name.removesuffix("_sha256")


def _keys_apart(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values set schemes of one encoding apart.

    A run that begins from another has its own rate, which is left out unless nothing
    else sets schemes apart.
    """
    keys = []
    begun = [each for each in options if _START in each]  # from another run
    differing_starts = _differing(begun)
    for key in _differing(options):
        # beside schemes that began from no run, `start` alone says so
        if not key.startswith("start.") or key in differing_starts:
            keys.append(key)

    without_rate = {as_json({**each, _RATE: None}) for each in options}
    rate_is_needed = len(without_rate) < len(options)
    if _START in keys and not rate_is_needed:
        keys = [key for key in keys if key != _RATE]
    return keys


@functools.cache
def _choices() -> dict[str, str]:
    """Return the names of configuration choices such as `layered/gemma3` by their
    options.
    """
    names = {}
    for name, path in shipped.choices("encoding", pattern=shipped.NESTED).items():
        settings = flat_settings({"encoding": shipped.load(path)})
        names[as_json(_scheme(settings))] = name
    return names


def differing_settings(frame: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Return, by setting, the values of its compared keys that are not the same in all
    settings of the frame.
    """
    with_text_first = frame[frame["settings"].notna()].sort_values(
        "text_sha256", na_position="last", kind="stable"
    )
    runs = with_text_first.drop_duplicates("setting")
    facts = {}
    for run in runs.to_dict("records"):
        of_text = {name: run[name] for name in _TEXT_FACTS}
        facts[str(run["setting"])] = _compared(json.loads(run["settings"])) | of_text

    keys = _differing([*facts.values()])
    differing: dict[str, dict[str, str]] = {setting: {} for setting in facts}
    for setting, values in facts.items():
        for key in keys:
            if values.get(key) is not None:
                differing[setting][key] = setting_text(values[key])
    return differing


def setting_text(value: Any) -> str:
    """Return a setting as text: digests by their first digits, layers as `3 rope
    window=64 + none`.
    """
    if isinstance(value, list) and value and isinstance(value[0], dict):
        texts = []
        for layer in value:
            words = [str(layer["name"])]
            for key in sorted(layer.keys() - {"name"}):
                if layer[key] not in ({}, []):
                    words.append(f"{key}={setting_text(layer[key])}")
            texts.append(" ".join(words))
        groups = []
        for text, alike in itertools.groupby(texts):
            count = len(list(alike))
            groups.append(f"{count} {text}" if count > 1 else text)
        return " + ".join(groups)
    if not isinstance(value, str):
        value = as_json(value)
    return _DIGEST.sub(r"\1", value)


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sorted keys whose values are not the same in all settings."""
    differing = []
    for key in sorted(set().union(*settings)):
        values = {as_json(setting.get(key)) for setting in settings}
        if len(values) > 1:
            differing.append(key)
    return differing
