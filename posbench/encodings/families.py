"""The place of the forward pass where an encoding acts. It defines the family, and what another model needs for it."""

from typing import TYPE_CHECKING

from posbench import encodings
from posbench.errors import PosbenchError

if TYPE_CHECKING:
    from posbench.encodings.base import Encoding

# The place of each hook, in the order of the forward pass.
_PLACES = {
    "positions": "positions",
    "token_dim": "input",
    "embed": "input",
    "rotate": "queries and keys",
    "logit_scale": "scores",
    "distance_bias": "scores",
    "bias": "scores",
    "scores": "scores",
    "attend": "weights or values",
    "map_values": "values",
    "map_outputs": "values",
}
NOWHERE, OTHERS = "nowhere", "other encodings"
FAMILIES = (NOWHERE, *dict.fromkeys(_PLACES.values()), OTHERS)


def acts(hooks: frozenset[str]) -> str:
    """The places where these hooks act: input, queries and keys, scores, weights or values, or nowhere."""
    places = dict.fromkeys(place for hook, place in _PLACES.items() if hook in hooks)
    return ", ".join(places) or NOWHERE


def kernels(encoding: "Encoding") -> str:
    """The attention kernels that can compute it.

    `any`: q, k and v change before the kernel, so FlashAttention will do. `with a bias`: those that add a mask of
    numbers, such as `scaled_dot_product_attention`. `own`: it changes the softmax or what follows, so posbench's only.
    """
    from posbench.encodings.base import PAIRWISE

    if not encoding.hooks & PAIRWISE:
        return "any"
    return "own" if encoding.hooks & {"scores", "attend"} else "with a bias"


def cache(encoding: "Encoding") -> str:
    """Whether `posbench.attention` can go on from kept keys and values.

    `yes`; `with x`: if the layer's input is kept, too; `no`: earlier tokens would have to be computed again.
    """
    if encoding.length_dependent or "q" in encoding.history:
        return "no"
    return "with x" if "x" in encoding.history else "yes"


def family(name: str) -> str:
    """One of `FAMILIES`: the first place where an encoding acts.

    Wrappers are a separate family, and so are encodings that cannot be loaded here.
    """
    from posbench.encodings._wrapper import Wrapper

    try:
        cls = encodings.load(name)
    except (ImportError, PosbenchError, RuntimeError):  # not installed here, or not made for this torch
        return OTHERS
    return OTHERS if issubclass(cls, Wrapper) else acts(cls.overridden).partition(", ")[0]
