"""Where an encoding acts on the forward pass, which is how encodings are sorted into families."""

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
    """Where an encoding with these hooks acts: input, queries and keys, scores, weights or values, nowhere."""
    places = dict.fromkeys(place for hook, place in _PLACES.items() if hook in hooks)
    return ", ".join(places) or NOWHERE


def family(name: str) -> str:
    """One of `FAMILIES`: the first place where an encoding acts.

    Encodings that stand around others are a family of their own, and so are those that cannot be had here.
    """
    from posbench.encodings._wrapper import Wrapper

    try:
        cls = encodings.load(name)
    except (ImportError, PosbenchError, RuntimeError):  # not installed here, or not made for this torch
        return OTHERS
    return OTHERS if issubclass(cls, Wrapper) else acts(cls.overridden).partition(", ")[0]
