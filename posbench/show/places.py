"""The place of the forward pass where an encoding acts; it defines the family."""

from posbench import encodings
from posbench.errors import PosbenchError

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
