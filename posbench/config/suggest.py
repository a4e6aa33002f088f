"""From a wrong word, key, choice or value to one line with the nearest right one."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from posbench.config.shipped import GROUPS, every
from posbench.errors import UserError, named, nearest

SIMILAR = 0.75  # below it, a suggestion of a key misleads more often than it helps
# What posbench has instead, and what other trainers call it.
ALIASES = {
    "a budget is in tokens: training.tokens; a step has training.batch_size x training.train_length of them": "steps "
    "max_steps total_steps num_steps n_steps train_steps iterations iters max_iters epochs n_epochs num_epochs budget",
    "it is training.train_length": "context context_length ctx n_ctx block_size seq_len seq_length sequence_length "
    "max_length max_len max_seq_len max_seq_length max_position_embeddings n_positions",
    "it is training.learning_rate": "lr",
    "it is training.batch_size": "batch bs",
    "it is model.n_layers": "layers n_layer num_layers depth",
    "it is model.n_heads": "heads n_head num_heads",
    "it is model.d_model": "dim width n_embd hidden_size embed_dim",
    "it is encoding.base": "theta rope_theta",
    "the optimizer is AdamW, set by training.learning_rate, betas, weight_decay and clip": "optimizer optim adam adamw",
    "it is tracking: tracking=none, tracking.mode=offline, tracking.project": "wandb logger logging tensorboard",
    "the models have no dropout: they see each text about once": "dropout",
    "it is encoding": "pe pos positional_encoding position_encoding position_embedding pos_emb",
    "it is study, the folder that runs share": "run_name experiment_name",
    "it is runtime.outputs, the folder of the studies": "output_dir out_dir",
    "it is for posbench sweep": "sweep tune tune_grid",
    "several seeds are a list: posbench sweep seed=0,1,2,3,4 or 'seed=range(0,5)'": "seeds n_seeds num_seeds",
}
# The same of a choice.
_CHOICES = {"rotary": "rope", "nope": "none", "null": "none", "off": "none", "false": "none", "absolute": "learned"}
_CHOICES |= {"all": "glob(*)", "online": "tracking.mode=online", "offline": "tracking.mode=offline"}


def unknown_key(key: str, keys: Collection[str], words: Collection[str] = ()) -> UserError:
    """The error about a key that does not exist.

    Args:
        keys: all that there are, `section.key`.
        words: what else may be written, `device` for `runtime.device`.
    """
    section, _, name = key.rpartition(".")
    if meant := [said for said, others in ALIASES.items() if {name, key.partition(".")[0]} & set(others.split())]:
        return UserError(f"unknown key '{key}' ({meant[0]})")
    bare = {known.rpartition(".")[2]: known for known in reversed(list(keys))} | {word: word for word in words}
    beside = {name: known for name, known in bare.items() if known.rpartition(".")[0] == section}
    for candidates, word in ((beside, name), ({known: known for known in keys}, key), (bare, name)):
        if close := nearest(word, candidates, SIMILAR):
            return UserError(f"unknown key '{key}': did you mean '{candidates[close]}'?")
    return UserError(f"unknown key '{key}' ('posbench train --cfg' shows all keys)")


def unknown_choice(group: str, name: str, choices: Collection[str]) -> UserError:
    """The error about a file of a group that does not exist."""
    listed = "'posbench list' shows all" if group == "encoding" else f"choices: {', '.join(choices)}"
    close = _CHOICES.get(name.lower(), "")
    close = close if close in choices or not close.isidentifier() else ""
    close = close or nearest(name, choices, 0.6) or ""
    near = f": did you mean '{close}'?" if close else ""
    if group == "data" and not close:
        near = ": a file or folder of your own is data.path=..., a data set of the hub data.dataset=OWNER/NAME"
    return UserError(f"unknown {group} '{name}'{near} ({listed})")


def for_word(text: str) -> str:
    """What a word in the place of key=value may mean, as the end of an error message."""
    for group in (*GROUPS, "sweep"):
        if name := named(text, every(group)):
            return f": did you mean '{group}={name}'?"
    return ": expected key=value, such as encoding=alibi or seed=1"


def invalid(error: Mapping[str, Any], keys: Collection[str], section: str = "") -> UserError:
    """The error about a value: one of pydantic's, as the line that a user reads.

    Args:
        keys: those of the dataclass that was read.
        section: what stands before them.
    """
    parts = [part for part in error["loc"] if isinstance(part, str)]  # indices into lists say little
    key, kind, given = ".".join([section, *parts] if section else parts), error["type"], error["input"]
    if kind == "unexpected_keyword_argument":
        return unknown_key(key, [f"{section}.{known}" if section else known for known in keys])
    if kind in ("missing", "missing_argument") and isinstance(error["loc"][-1], str):
        return UserError(f"missing key '{key}'")
    expected = _EXPECTED.get(kind) or error["msg"].removeprefix("Input should be ")
    expected = expected.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    if kind == "literal_error":
        choices = [choice.strip("'").lower() for choice in re.findall(r"'[^']*'|True|False", expected)]
        close = nearest(str(given), choices)
        expected = " or ".join(choices) + (f", did you mean '{close}'?" if close else "")
    if isinstance(given, str) and (match := re.fullmatch(r"([\d.]+)([kKmMbBgG])", given)):
        expected += f", such as {match[1]}e{ {'k': 3, 'm': 6}.get(match[2].lower(), 9) }"
    return UserError(f"{key} is {as_typed(given)}: expected {expected}")


_BETAS = "two numbers, such as [0.9,0.95]"  # only these have a length of their own
# Where pydantic's own sentence says less.
_EXPECTED = dict.fromkeys(("int", "int_from_float"), "a whole number") | dict.fromkeys(("missing", "too_long"), _BETAS)
_EXPECTED |= {"float": "a number", "string_type": "text", "dataclass_type": "keys and values"}
_EXPECTED["predicate_failed"] = "letters, digits, '.', '_' and '-', at most 128, a letter or digit first"


def as_typed(value: Any) -> str:
    """A value as it is typed: null and true, not None and True."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
