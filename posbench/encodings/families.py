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
    """Return which kernels compute it: `any`, those `with a bias`, or posbench's `own`, as it has another softmax."""
    if encoding.hooks & {"scores", "attend"}:
        return "own"
    return "with a bias" if encoding.hooks & {"distance_bias", "bias"} else "any"


def cache(encoding: "Encoding") -> str:
    """Return whether kept keys and values suffice to go on: `yes`; `with x`, the layer's input; or `no`."""
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
