"""posbench: which positional encoding should my transformer use, and how far beyond its training length will it hold?

    import posbench
    posbench.encodings()
    enc = posbench.build_encoding("alibi", d_model=512, n_heads=8, n_layers=4, train_length=128)
    posbench.attention_logits(enc, q, k)

Nothing heavy is imported before it is needed, so that the command line answers at once.
"""

from typing import TYPE_CHECKING, Any

from posbench import encodings

if TYPE_CHECKING:
    from posbench.attention.reference import attention_logits as attention_logits
    from posbench.attention.reference import attention_output as attention_output
    from posbench.encodings.base import Encoding as Encoding

__version__ = "0.1.0"
__all__ = ["Encoding", "attention_logits", "attention_output", "build_encoding", "encodings"]


def build_encoding(
    name: str,
    *,
    d_model: int,
    n_heads: int,
    n_layers: int,
    train_length: int,
    vocabulary: tuple[str, ...] = (),
    **options: Any,
) -> "Encoding":
    """Build an encoding for a model shape; further keywords are the encoding's own options.

    Raises:
        posbench.errors.UserError: unknown encoding or option, or a value it does not accept.
    """
    from posbench.encodings.base import Shape

    return encodings.build(name, Shape(d_model, n_heads, n_layers, train_length, vocabulary), options)


def __getattr__(name: str) -> Any:
    if name in ("attention_logits", "attention_output"):
        from posbench.attention import reference

        return getattr(reference, name)
    if name == "Encoding":
        from posbench.encodings.base import Encoding

        return Encoding
    raise AttributeError(f"module 'posbench' has no attribute '{name}'")
