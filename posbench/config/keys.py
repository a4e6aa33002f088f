"""What an unknown key may mean, as the end of an error message: the nearest one, or what posbench has instead."""

from collections.abc import Iterable

from posbench.config.shipped import GROUPS, choices, nested
from posbench.errors import named, nearest

SIMILAR = 0.75  # below it, a suggestion misleads more often than it helps
# Keys of other trainers, and what posbench has instead.
_ELSEWHERE = {
    "a budget is in tokens: training.tokens; a step has training.batch_size x training.train_length of them": "steps "
    "max_steps total_steps num_steps n_steps train_steps iterations iters max_iters epochs n_epochs num_epochs budget",
    "it is training.train_length": "context context_length ctx n_ctx block_size seq_len seq_length sequence_length "
    "max_length max_len max_position_embeddings n_positions",
    "it is training.learning_rate": "lr",
    "it is training.batch_size": "batch bs",
    "it is model.n_layers": "layers n_layer num_layers depth",
    "it is model.n_heads": "heads n_head num_heads",
    "it is model.d_model": "dim width n_embd hidden_size embed_dim",
    "the optimizer is AdamW, set by training.learning_rate, betas, weight_decay and clip": "optimizer optim adam adamw",
    "it is tracking: tracking=none, tracking.mode=offline, tracking.project": "wandb logger logging tensorboard",
    "the models have no dropout: they see each text about once": "dropout",
    "it is encoding": "pe pos positional_encoding position_encoding position_embedding pos_emb",
    "it is study, the folder that runs share": "run_name experiment_name",
    "it is runtime.outputs, the folder of the studies": "output_dir out_dir",
    "it is for posbench sweep": "sweep tune tune_grid",
    "several seeds are a list: seed=0,1,2,3,4 or 'seed=range(0,5)'": "seeds n_seeds num_seeds",
}


def suggestion(key: str, keys: Iterable[str], words: Iterable[str] = ()) -> str:
    """What an unknown key may mean.

    Args:
        keys: all that there are, `section.key`.
        words: what else may be written, `device` for `runtime.device`.
    """
    keys = list(keys)
    for name in (key.rpartition(".")[2], key.partition(".")[0]):
        if said := next((said for said, names in _ELSEWHERE.items() if name in names.split()), ""):
            return f" ({said})"
    spelt = {known.rpartition(".")[2]: known for known in reversed(keys)} | {word: word for word in (*words, *keys)}
    close = nearest(key, spelt, SIMILAR) or nearest(key.rpartition(".")[2], spelt, SIMILAR)
    return f": did you mean '{spelt[close]}'?" if close else " ('posbench train --cfg' shows all keys)"


def word(text: str) -> str:
    """A suggestion for a word in the place of key=value."""
    for group in (*GROUPS, "sweep"):
        if name := named(text, [*choices(group), *nested(group)]):
            return f": did you mean '{group}={name}'?"
    return ": expected key=value, such as encoding=alibi or seed=1"
