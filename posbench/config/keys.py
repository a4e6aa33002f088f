"""The keys of a composed configuration, and which of them was meant."""

import difflib
from collections.abc import Callable, Iterable

from omegaconf import DictConfig

_SIMILAR = 0.75  # below it, a suggestion misleads more often than it helps
# What other trainers call a key, or have and posbench has not.
_ELSEWHERE = {
    "a budget is in tokens: training.tokens": "steps max_steps iterations iters max_iters epochs n_epochs budget",
    "it is training.train_length": "context context_length ctx n_ctx block_size seq_len seq_length sequence_length "
    "max_length max_len max_position_embeddings n_positions",
    "the optimizer is AdamW, set by training.learning_rate, betas, weight_decay and clip": "optimizer optim adam adamw",
    "it is tracking: tracking=none, tracking.mode=offline, tracking.project": "wandb logger logging",
    "the models have no dropout: they see each text about once": "dropout",
    "it is encoding": "pe pos positional_encoding position_encoding position_embedding pos_emb",
    "it is study, the folder that runs share": "run_name experiment_name",
    "it is runtime.outputs, the folder of the studies": "output_dir out_dir",
    "it is for posbench sweep": "sweep tune tune_grid rates",
}


def keys_of(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Every key of a configuration, `section` and `section.key`, without Hydra's own."""
    found: list[str] = []
    for key in (str(key) for key in cfg if prefix or key != "hydra"):
        found.append(f"{prefix}{key}")
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            found += keys_of(node, f"{prefix}{key}.")
    return found


def nearest(key: str, keys: Iterable[str], words: Iterable[str] = ()) -> str:
    """What an unknown key may mean, or what there is, as the end of a message.

    Args:
        keys: all that there are, `section.key`. A key of the same section comes first, of another one next.
        words: what else may be written, `device` for `runtime.device`.
    """
    keys = list(keys)
    section, _, name = key.rpartition(".")
    beside = [known for known in keys if known.rpartition(".")[0] == section]
    unknown_section = bool(section and not beside)
    for is_meant in (_has_name(name), _has_initials(name), _has_word(name)):
        meant = [known for known in [*beside, *keys] if is_meant(_name(known))]
        if unknown_section and len(meant) > 1:  # such as `name`, which many sections have
            meant = difflib.get_close_matches(key, meant, n=1, cutoff=_SIMILAR)
        if meant:
            return f": did you mean '{meant[0]}'?"
    for explained, names in _ELSEWHERE.items():
        if name in names.split() or key.partition(".")[0] in names.split():
            return f" ({explained})"
    for choices in (beside, keys, words):
        spellings = {known if unknown_section else _name(known): known for known in reversed(list(choices))}
        if close := difflib.get_close_matches(key if unknown_section else name, spellings, n=1, cutoff=_SIMILAR):
            return f": did you mean '{spellings[close[0]]}'?"
    owner = section if beside else ""
    own = [_name(known) for known in keys if known.rpartition(".")[0] == owner]
    return f" ({owner or 'the configuration'} has {', '.join(own)})"


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _has_name(name: str) -> Callable[[str], bool]:
    return lambda known: known == name


def _has_initials(name: str) -> Callable[[str], bool]:
    """`lr` for learning_rate."""
    return lambda known: "_" in known and "".join(word[:1] for word in known.split("_")) == name


def _has_word(name: str) -> Callable[[str], bool]:
    """`batch` for batch_size, `layer` for n_layers."""
    return lambda known: name.rstrip("s") in [word.rstrip("s") for word in known.split("_") if len(word) > 2]
