"""What a configuration tells an encoding of the model that it serves."""

from typing import TYPE_CHECKING

from posbench.config.schema import Config

if TYPE_CHECKING:
    from posbench.encodings.base import Shape


def shape_of(config: Config, vocabulary: tuple[str, ...] = ()) -> "Shape":
    """The shape of a configuration's model.

    Args:
        vocabulary: token texts by id; empty before there is a tokenizer.
    """
    from posbench.encodings.base import Shape  # torch comes with it

    model = config.model
    return Shape(
        d_model=model.d_model,
        n_heads=model.n_heads,
        n_layers=model.n_layers,
        train_length=config.training.train_length,
        token_rms=model.token_rms,
        vocabulary=vocabulary,
    )
