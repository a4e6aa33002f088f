"""posbench: which positional encoding should my transformer use, and how far beyond its
training length will it hold?

    import posbench

    # as `posbench train encoding=alibi`; errors are exceptions
    run = posbench.train(encoding="alibi")
    # all combinations, with their report
    posbench.sweep(encoding=["rope", "alibi"], seed=[0, 1])
    run.curve()  # a pandas DataFrame
    run.plot()
    run = posbench.load("outputs/demo/alibi-s0-48c19011")  # a run of before
    posbench.runs("outputs/**")  # a DataFrame, a row per run
    posbench.plot("outputs/demo")  # curves of runs, side by side

    # in a model of your own
    sizes = {"d_model": 512, "n_heads": 8, "n_layers": 4, "train_length": 128}
    enc = posbench.build_encoding("alibi", **sizes)
    posbench.attention(enc, q, k, v)
    posbench.attention_logits(enc, q, k)
    # a subclass of posbench.Encoding; `encoding=mine` then works in this process
    posbench.register(Mine)

Nothing heavy is imported before it is needed, so that the command line answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from posbench import encodings
from posbench.encodings import register

if TYPE_CHECKING:
    from posbench.api import (
        LoadedRun,
        evaluate,
        load,
        plot,
        report,
        runs,
        sweep,
        train,
    )
    from posbench.encodings.base import Encoding
    from posbench.model.standalone import attention, attention_logits, attention_output

__version__ = "0.1.0"

# the modules of the names that are not in `api`
_HOMES = {
    "Encoding": "encodings.base",
    "attention": "model.standalone",
    "attention_logits": "model.standalone",
    "attention_output": "model.standalone",
}
__all__ = [
    "Encoding",
    "LoadedRun",
    "attention",
    "attention_logits",
    "attention_output",
    "build_encoding",
    "encodings",
    "evaluate",
    "load",
    "plot",
    "register",
    "report",
    "runs",
    "sweep",
    "train",
]


def build_encoding(
    name: str,
    *,
    d_model: int,
    n_heads: int,
    n_layers: int,
    train_length: int,
    vocabulary: tuple[str, ...] = (),
    head_dim: int = 0,
    n_kv_heads: int = 0,
    **options: Any,
) -> "Encoding":
    """Build an encoding for a model shape. Raises posbench.errors.UserError for an
    unknown name or a wrong option.

    Args:
        vocabulary: token texts by id, for encodings that read them.
        head_dim: channels of a head; 0 = d_model / n_heads.
        n_kv_heads: heads of keys and values, each shared by a group of queries' heads;
            0 = n_heads.
        options: the encoding's own options.
    """
    from posbench.encodings.base import Shape

    shape = Shape(
        d_model,
        n_heads,
        n_layers,
        train_length,
        vocabulary,
        head_dim=head_dim,
        n_kv_heads=n_kv_heads,
    )
    return encodings.build(name, shape, options)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'posbench' has no attribute '{name}'")
    module = _HOMES.get(name, "api")
    return getattr(importlib.import_module(f"posbench.{module}"), name)


def __dir__() -> list[str]:
    """Return all public names, for completion: also those that have not been imported
    yet.
    """
    return __all__
