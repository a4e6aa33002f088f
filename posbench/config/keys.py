"""Suggestions for a key, a choice or a word that does not exist, as the end of an error message."""

import os
import re
from collections.abc import Collection, Iterable

from posbench.config.settings import key_of
from posbench.config.shipped import GROUPS, choices, nested
from posbench.errors import UserError, did_you_mean, named
from posbench.errors import nearest as nearest_spelling

SIMILAR = 0.75  # below it, a suggestion misleads more often than it helps
# Keys of other trainers, and what posbench has instead.
_ELSEWHERE = {
    "a budget is in tokens: training.tokens; a step has training.batch_size x training.train_length of them": "steps "
    "max_steps total_steps num_steps n_steps train_steps iterations iters max_iters epochs n_epochs num_epochs budget",
    "it is training.train_length": "context context_length ctx n_ctx block_size seq_len seq_length sequence_length "
    "max_length max_len max_position_embeddings n_positions",
    "the optimizer is AdamW, set by training.learning_rate, betas, weight_decay and clip": "optimizer optim adam adamw",
    "it is tracking: tracking=none, tracking=csv, tracking.mode=offline, tracking.project": "wandb logger logging "
    "tensorboard",
    "the models have no dropout: they see each text about once": "dropout",
    "it is encoding": "pe pos positional_encoding position_encoding position_embedding pos_emb",
    "it is study, the folder that runs share": "run_name experiment_name",
    "it is runtime.outputs, the folder of the studies": "output_dir out_dir",
    "it is for posbench sweep": "sweep tune tune_grid",
    "several seeds are a list: seed=0,1,2,3,4 or 'seed=range(0,5)'": "seeds n_seeds num_seeds",
}


def suggestion(key: str, keys: Iterable[str], words: Iterable[str] = ()) -> str:
    """What an unknown key may mean (see `meant`), or else which keys there are, as the end of a message."""
    keys = list(keys)
    found, explanation = meant(key, keys, words)
    if found or explanation:
        return f": did you mean '{found}'?" if found else explanation
    section = _section(key) if any(_section(known) == _section(key) for known in keys) else ""
    own = [_name(known) for known in keys if _section(known) == section]
    return f" ({section or 'the configuration'} has {', '.join(own)})"


def meant(key: str, keys: Iterable[str], words: Iterable[str] = ()) -> tuple[str, str]:
    """The key that an unknown one stands for, or an explanation of what posbench has instead; one of them is empty.

    Args:
        keys: all that there are, `section.key`. A key of the same section comes first, of another one next.
        words: what else may be written, `device` for `runtime.device`.
    """
    keys = list(keys)
    section, _, name = key.rpartition(".")
    beside = [known for known in keys if _section(known) == section]
    spelling = str if section and not beside else _name  # of keys in an unknown section, all is compared
    for is_meant in (_has_name, _has_initials, _has_word):
        found = [known for known in [*beside, *keys] if is_meant(name, _name(known))]
        if len(found) > 1 and spelling is str:  # such as `name`, which many sections have
            found = list(filter(None, [nearest_spelling(key, found, SIMILAR)]))
        if found:
            return found[0], ""
        if explanation := _explanation(name):  # `steps`, before the keys that have the word
            return "", explanation
    if explanation := _explanation(key.partition(".")[0]):
        return "", explanation
    for known_keys in (beside, keys, words):
        spelt = {spelling(known): known for known in reversed(list(known_keys))}
        if close := nearest_spelling(spelling(key), spelt, SIMILAR):
            return spelt[close], ""
    return "", ""


def _explanation(name: str) -> str:
    """What posbench has instead of another trainer's key; empty if the key is not known."""
    return next((f" ({said})" for said, names in _ELSEWHERE.items() if name in names.split()), "")


def choice(group: str, value: str, options: Collection[str]) -> str:
    """A suggestion for a value that a group does not have."""
    if group == "encoding" and value in _ALL:
        return ": every encoding is posbench sweep sweep=catalogue"
    if group == "data" and not value.startswith("task/") and (asked := _text(value)):
        return asked
    if key := key_of(group, value):
        return f": did you mean '{key}={value}'?"
    if inside := next((name for name in nested(group) if name.rpartition("/")[2] == value), None):
        return f": did you mean '{group}={inside}'?"
    others = [other for other in sorted((*GROUPS, "sweep")) if other != group]
    elsewhere = "" if named(value, options) else _of_a_group(value, others)
    return elsewhere or did_you_mean(value, options, cutoff=0.6)


def word(text: str) -> str:
    """A suggestion for a word in the place of key=value."""
    if text == "help":
        return ": did you mean --help?"
    several = " (several at once: encoding=rope,alibi)" if named(text, choices("encoding")) else ""
    if meant := _of_a_group(text, (*GROUPS, "sweep")):
        return meant + several
    of_a_file = "" if os.path.isdir(text) else _text(text)
    return of_a_file or ": expected key=value, such as encoding=alibi or seed=1"


def refuse_range(key: str, typed: str) -> None:
    """Refuse `seed=0-4` and `seed=0..4`: several seeds are a list, which the message names."""
    found = _RANGE.fullmatch(typed) if key == "seed" else None
    if found:
        first, last = sorted(map(int, found.groups()))
        seeds = range(first, last + 1)
        listed = ",".join(map(str, seeds)) if len(seeds) <= 10 else f"range({first},{last + 1})"
        raise UserError(f"cannot read '{key}={typed}': did you mean '{key}={listed}'? (posbench sweep runs each)")


_ALL = ("all", "every", "*")
_RANGE = re.compile(r"(\d{1,9})(?:-|\.{2,3}|:|to)(\d{1,9})")
_TEXT_FILE = re.compile(r"(?:/|\.{1,2}/|~).*|.*\.(?:txt|md|jsonl?|csv|tsv|parquet|gz|zst)")
_ON_THE_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def _of_a_group(value: str, groups: Iterable[str]) -> str:
    """The first group that has a choice of this name."""
    found = ((group, named(value, [*choices(group), *nested(group)])) for group in groups)
    return next((f": did you mean '{group}={name}'?" for group, name in found if name), "")


def _text(value: str) -> str:
    """What `data=my.txt` or `data=user/name` means; empty if it looks like neither."""
    if _TEXT_FILE.fullmatch(value) or os.path.exists(value):
        return f": a file or folder of your own is data.path={value}"
    return f": a data set of the hub is data.dataset={value}" if _ON_THE_HUB.fullmatch(value) else ""


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _has_name(name: str, known: str) -> bool:
    return known == name


def _has_initials(name: str, known: str) -> bool:
    """`lr` for learning_rate."""
    return "_" in known and "".join(word[:1] for word in known.split("_")) == name


def _has_word(name: str, known: str) -> bool:
    """`batch` for batch_size, `layer` for n_layers."""
    return name.rstrip("s") in [word.rstrip("s") for word in known.split("_") if len(word) > 2]
