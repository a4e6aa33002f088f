"""From a wrong word, key, choice or value to one line with the nearest right one."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from posbench.errors import UserError, nearest

SIMILAR = 0.75  # below it, a suggestion of a key misleads more often than it helps
# What posbench has instead, and what other trainers call it.
ALIASES = {
    "training.tokens: a step has training.batch_size x training.train_length of them": "steps max_steps total_steps "
    "num_steps n_steps train_steps iterations iters max_iters epochs n_epochs num_epochs budget",
    "training.train_length": "context context_length ctx n_ctx block_size seq_len seq_length sequence_length "
    "max_length max_len max_seq_len max_seq_length max_position_embeddings n_positions",
    "training.learning_rate": "lr",
    "training.batch_size": "batch bs",
    "model.n_layers": "layers n_layer num_layers depth",
    "model.n_heads": "heads n_head num_heads",
    "model.d_model": "dim width n_embd hidden_size embed_dim",
    "encoding.base": "theta rope_theta",
    "AdamW, set by training.learning_rate, betas, weight_decay and clip": "optimizer optim adam adamw",
    "tracking: tracking=none, tracking.mode=offline, tracking.project": "wandb logger logging tensorboard",
    "not in these models, which see each text about once": "dropout",
    "encoding": "pe pos positional_encoding position_encoding position_embedding pos_emb",
    "study, the folder that runs share": "run_name experiment_name",
    "runtime.outputs, the folder of the studies": "output_dir out_dir",
    "for posbench sweep": "sweep tune tune_grid",
    "chosen with its options: encoding=alibi, data=text": "encoding.name data.source data.task data.task.name",
    "a list: posbench sweep seed=0,1,2,3,4 or 'seed=range(0,5)'": "seeds n_seeds num_seeds",
}
_CHOICES = {"rotary": "rope", "nope": "none", "null": "none", "off": "none", "false": "none", "absolute": "learned",
            "all": "glob(*)", "online": "tracking.mode=online", "offline": "tracking.mode=offline"}  # fmt: skip
_BETAS = "two numbers, such as [0.9,0.95]"  # only these have a length of their own
# Where pydantic's own sentence says less.
_EXPECTED = dict.fromkeys(("int", "int_from_float"), "a whole number") | dict.fromkeys(("missing", "too_long"), _BETAS)
_EXPECTED |= {"float": "a number", "string_type": "text", "dataclass_type": "keys and values", "tuple_type": "a list"}
_EXPECTED["predicate_failed"] = "letters, digits, '.', '_' and '-', at most 128, a letter or digit first"


def unknown_key(key: str, keys: Collection[str], words: Collection[str] = ()) -> UserError:
    """Return the error about a key that is none of `keys` nor of `words`, which stand for some without a section."""
    section, _, name = key.rpartition(".")
    if meant := [here for here, others in ALIASES.items() if {key, name, key.partition(".")[0]} & set(others.split())]:
        return UserError(f"unknown key '{key}' (it is {meant[0]})")
    names = {known.rpartition(".")[2]: known for known in reversed(list(keys))} | {word: word for word in words}
    beside = {word: known for word, known in names.items() if known.rpartition(".")[0] == section}
    close = nearest(name, beside, SIMILAR) or nearest(name, names, SIMILAR)
    near = f": did you mean '{names[close]}'?" if close else " ('posbench train --cfg' shows all keys)"
    return UserError(f"unknown key '{key}'{near}")


def unknown_choice(group: str, name: str, choices: Collection[str]) -> UserError:
    """Return the error about a file of a group that does not exist."""
    listed = "'posbench list' shows all" if group == "encoding" else f"choices: {', '.join(choices)}"
    if group == "data":
        listed = f"a text of your own is data.path=..., one of the hub data.dataset=OWNER/NAME; {listed}"
    close = _CHOICES.get(name.lower()) or nearest(name, choices, 0.6)
    return UserError(f"unknown {group} '{name}'{f': did you mean {close!r}?' if close else ''} ({listed})")


def invalid(error: Mapping[str, Any], keys: Collection[str], section: str = "") -> UserError:
    """Return pydantic's error about a value of a section that has these keys, as the line that a user reads."""
    prefix = f"{section}." if section else ""
    parts = [part for part in error["loc"] if isinstance(part, str)]  # indices into lists say little
    key, kind, given = prefix + ".".join(parts), error["type"], error["input"]
    if kind == "unexpected_keyword_argument":
        return unknown_key(key, [f"{prefix}{known}" for known in keys])
    if kind in ("missing", "missing_argument") and isinstance(error["loc"][-1], str):
        return UserError(f"missing key '{key}'")
    expected = _EXPECTED.get(kind) or error["msg"].removeprefix("Input should be ")
    expected = expected.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    if kind == "literal_error" and (close := nearest(str(given), re.findall(r"'(\w+)'", expected))):
        expected += f", did you mean '{close}'?"
    if isinstance(given, str) and (match := re.fullmatch(r"([\d.]+)([kKmMbBgG])", given)):
        expected += f", such as {match[1]}e{ {'k': 3, 'm': 6}.get(match[2].lower(), 9) }"
    return UserError(f"{key} is {as_typed(given)}: expected {expected}")


def as_typed(value: Any) -> str:
    """Return a value as it is typed: null and true, not None and True."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(list(value) if isinstance(value, tuple) else value)
