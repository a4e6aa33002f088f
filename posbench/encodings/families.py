"""The places of the forward pass where an encoding acts, which define its family; what another model needs for it."""

from typing import TYPE_CHECKING

from posbench import encodings
from posbench.errors import PosbenchError

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding

# The hooks of each place, in the order of the forward pass.
_PLACES = {
    "positions": {"positions"},
    "input": {"token_dim", "embed"},
    "queries and keys": {"rotate"},
    "scores": {"logit_scale", "distance_bias", "bias", "scores"},
    "weights or values": {"attend"},
    "values": {"map_values", "map_outputs"},
}
NOWHERE, OTHERS = "nowhere", "other encodings"
FAMILIES = (NOWHERE, *_PLACES, OTHERS)


def acts(hooks: frozenset[str]) -> str:
    """Return the places where these hooks act."""
    return ", ".join(place for place, of_place in _PLACES.items() if hooks & of_place) or NOWHERE


def kernels(encoding: "Encoding") -> str:
    """Return which attention kernels can compute it.

    `any`: q, k and v change before the kernel, so FlashAttention will do. `with a bias`: those that add a mask of
    numbers, such as `scaled_dot_product_attention`. `own`: it changes the softmax or what follows, so posbench's only.
    """
    if encoding.hooks & {"scores", "attend"}:
        return "own"
    return "with a bias" if encoding.hooks & {"distance_bias", "bias"} else "any"


def cache(encoding: "Encoding") -> str:
    """Return whether `posbench.attention` can go on from kept keys and values.

    `yes`; `with x`: if the layer's input is kept, too; `no`: earlier tokens would have to be computed again.
    """
    if encoding.length_dependent or "q" in encoding.history:
        return "no"
    return "with x" if "x" in encoding.history else "yes"


def family(name: str) -> str:
    """Return the first place where an encoding acts; wrappers, and what cannot be loaded here, are other encodings."""
    from posbench.encodings.wrapper import Wrapper

    try:
        cls = encodings.load(name)
    except (ImportError, PosbenchError, RuntimeError):  # not installed here, or not made for this torch
        return OTHERS
    return OTHERS if issubclass(cls, Wrapper) else acts(cls.overridden).partition(", ")[0]
