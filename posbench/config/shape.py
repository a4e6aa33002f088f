"""What a configuration tells an encoding of the model that it serves, and that encoding before there is a model."""

import functools
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, cast

from posbench import encodings
from posbench.config.schema import Config

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding, Shape


def shape_of(config: Config, vocabulary: tuple[str, ...] = ()) -> "Shape":
    """The shape of a configuration's model; `vocabulary` has token texts by id, none before there is a tokenizer."""
    from posbench.encodings.base import Shape  # torch comes with it

    model = config.model
    return Shape(
        d_model=model.d_model,
        n_heads=model.n_heads,
        n_layers=model.n_layers,
        train_length=config.original_length,
        token_rms=model.token_rms,
        vocabulary=vocabulary,
    )


def planned(config: Config) -> "Encoding":
    """The encoding of a configuration with all its options checked; on `meta` if its constructor reads no numbers.

    On torch's device `meta` there are shapes only, so it takes no memory. It is built once.

    Raises:
        UserError: an option is wrong.
    """
    cls = encodings.load(config.encoding.name)  # in a notebook, another one after a cell has run again
    try:
        return _on_meta(cast(Hashable, cls), config.encoding.name, shape_of(config), _Options(config.encoding.options))
    except (RuntimeError, TypeError, OverflowError):
        return encodings.build(config.encoding.name, shape_of(config), config.encoding.options)


class _Options(dict[str, Any]):
    """Options as a key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


@functools.lru_cache(maxsize=8)
def _on_meta(cls: Hashable, name: str, shape: "Shape", options: _Options) -> "Encoding":
    import torch

    with torch.device("meta"):
        return encodings.build(name, shape, options)
