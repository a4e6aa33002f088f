"""The contract of a positional encoding: the hooks it may override, and their
arguments.

An encoding acts where it overrides a hook, and nothing else declares it. One encoding
object serves the whole model; parameters that differ by layer are indexed by
`layer.index`. Hooks run outside of autocast and get fp32 tensors, or fp64 ones if the
model is in fp64; only the v of `attend` has the dtype of the model's matrix products.

Axes: B batch, T time (Tq query rows, Tk keys), H heads, D model width, Dh head width.
Positions are (1, T) or (B, T). They may be fractional and need not be consecutive. The
distance of a pair is query position minus key position.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from posbench.errors import OptionError, Undefined, UserError
from posbench.options import as_typed

# hooks on pairs of queries and keys
PAIRWISE = frozenset({"distance_bias", "bias", "scores", "attend"})
# from q and k to both of them, rotated
Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model properties that an encoding may depend on."""

    d_model: int
    n_heads: int
    n_layers: int
    train_length: int  # tokens
    # token texts by id, for the few encodings that need them
    vocabulary: tuple[str, ...] = ()
    # root mean square of the token embeddings at initialisation
    token_rms: float = 0.05
    head_dim: int = 0  # channels of a head; 0 becomes d_model / n_heads
    # heads of keys and values, each shared by a group of query heads; 0 becomes n_heads
    n_kv_heads: int = 0

    def __post_init__(self) -> None:
        head_dim = self.head_dim or self.d_model // self.n_heads
        n_kv_heads = self.n_kv_heads or self.n_heads
        object.__setattr__(self, "head_dim", head_dim)
        object.__setattr__(self, "n_kv_heads", n_kv_heads)


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a hook reads beside q, k and v: one layer of a forward pass and, in pairwise
    hooks, a block of it.
    """

    index: int  # which layer of the model
    positions: Tensor  # (1|B, T)
    x: Tensor | None = None  # the layer's normalised input (B, T, D)
    tables: Any = None  # what `make_tables` returned, for all layers
    state: Any = None  # what `prepare` returned, for the whole sequence
    rotated: bool = False  # attention has turned q and k by `rotation` already
    # the query rows at hand, Tq of T
    rows: slice = dataclasses.field(default_factory=lambda: slice(None))
    # their keys, Tk of T: a slice or an index
    keys: Any = dataclasses.field(default_factory=lambda: slice(None))
    # keys that are not hidden, (Tq, Tk) bool, in `scores` and `attend`
    visible: Tensor = None  # type: ignore[assignment]
    consecutive: bool = False  # positions are known to be 0 .. T-1
    causal: bool = True  # keys after a query are hidden
    # keys a query may see, itself included; None = all before it
    window: int | None = None
    sinks: int = 0  # keys at the beginning that every query sees beside its window

    @property
    def distance(self) -> Tensor:
        """Query position minus key position of the pairs at hand, (1|B, Tq, Tk); at
        least 0 if attention is causal.
        """
        of_queries = self.positions[:, self.rows, None]
        of_keys = self.positions[:, None, self.keys]
        distance = of_queries - of_keys
        if self.causal:
            distance = distance.clamp(min=0)
        return distance

    def replace(self, **changes: Any) -> "Layer":
        return dataclasses.replace(self, **changes)


def exact(x: Tensor) -> Tensor:
    """Return x in fp32; a tensor in fp64 stays so."""
    if x.dtype in (torch.float32, torch.float64):
        return x
    return x.float()


def part_of(x: Tensor, tokens: slice | Tensor) -> Tensor:
    """Return x (B, H, T, ...) at some tokens. For all tokens return x itself, which
    saves a copy of the gradient.
    """
    if isinstance(tokens, slice) and tokens == slice(0, x.shape[2]):
        return x
    return x[:, :, tokens]


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Return x (B, T, H·C) by heads: (B, H, T, C)."""
    return x.view(*x.shape[:2], n_heads, -1).transpose(1, 2)


def narrower(first: int | None, second: int | None) -> int | None:
    """Return the smaller of two limits; None means no limit."""
    if first is None:
        return second
    if second is None:
        return first
    return min(first, second)


class Encoding(nn.Module):
    """Base of all encodings. It takes a `Shape` and keyword options, whose annotations
    hold their bounds.

    Tables are recomputed or kept in non-persistent buffers, so a checkpoint holds
    learned parameters only.
    """

    # set by the registry, as in configurations; until then the class's name in lower
    # case
    name: str = ""
    # longest input the encoding is defined for; None = any
    max_length: int | None = None
    # keys a query may see, itself included; None = the model's limit
    window: int | None = None
    # whether outputs at the start of an input depend on its length
    length_dependent: bool = False
    # what it reads of earlier tokens beside keys and values: "q", "x", or both
    history: frozenset[str] = frozenset()
    whole_positions: bool = False  # whether it refuses fractional positions
    # for its parameters, in multiples of the learning rate
    rates: Mapping[str, float] = MappingProxyType({})

    HOOKS: ClassVar[tuple[str, ...]] = (
        "logit_scale",
        "positions",
        "make_tables",
        "token_dim",
        "embed",
        "prepare",
        "rotate",
        "map_values",
        "map_outputs",
        "distance_bias",
        "bias",
        "key_bias",
        "scores",
        "attend",
    )

    # hooks; found once per class, since every layer asks
    overridden: frozenset[str] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        overridden = [
            name
            for name in cls.HOOKS
            if getattr(cls, name) is not getattr(Encoding, name)
        ]
        cls.overridden = frozenset(overridden)
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks that this encoding overrides; for a wrapper, also those of its
        inner encodings.
        """
        return self.overridden

    def leave_out(self, *hooks: str) -> None:
        """Act as if these hooks were not overridden: an option switches them off."""
        self.overridden = self.overridden - set(hooks)

    def at(self, layer: Layer) -> "tuple[Encoding, Layer]":
        """Return the encoding whose hooks and window a layer of the model uses, and the
        layer as that one sees it.
        """
        return self, layer

    def sharing(self) -> Self:
        """Return a copy that shares all parameters and buffers, and has attributes of
        its own.
        """
        copied = copy.copy(self)
        for name in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(copied, name, dict(getattr(self, name)))
        return copied

    @property
    def logit_scale(self) -> float:
        """The factor by which q·k is multiplied."""
        return float(self.shape.head_dim**-0.5)

    def expect(self, holds: bool, option: str, value: object, expected: str) -> None:
        expect(holds, option, f"{as_typed(value)} for '{self.name}'", expected)

    def given(self, x: Tensor | None, uses: str) -> Tensor:
        """Return the layer's input; if it was left out, UserError, which says with
        `uses` what it is for.
        """
        if x is None:
            raise UserError(f"'{self.name}' {uses} the layer's input: pass x")
        return x

    def set_progress(self, done: float) -> None:
        """Change with training. Called before each update with its progress in [0, 1),
        and with 1 at the end.

        The new state must depend on `done` alone, so that a resumed run equals an
        uninterrupted one.
        """

    # Once per forward:

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return positions (1|B, T) of token ids (B, T). Random ones draw from
        `generator`; None = a fixed seed.
        """
        return torch.arange(ids.shape[-1], device=ids.device)[None]

    def make_tables(self, positions: Tensor) -> Any:
        """Return what all layers read as `layer.tables`, such as angles, from positions
        (1|B, T).
        """

    def token_dim(self) -> int:
        """Return the width of the token table; less than d_model if a position code is
        concatenated.
        """
        return self.shape.d_model

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        """Turn token embeddings (B, T, token_dim) into the model's input (B, T, D)."""
        return x

    # Once per layer, on the whole sequence:

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Any:
        """Return what pairwise hooks read as `layer.state`, from raw q, k (B, H, T, Dh)
        and `layer.x`.
        """

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        """Transform q and k (B, H, T, Dh); the last axis may widen."""
        return q, k

    def rotation(self, layer: Layer) -> Rotation | None:
        """Return all that an encoding does to q and k, if a compiler can join it to
        what precedes attention.
        """
        return None

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        """Transform the values (B, H, T, Dh); pairwise hooks, windows and kernels see
        what this returns.
        """
        return v

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        """Transform the outputs of attention (B, H, Tq, Dh) at `layer.rows`, each row
        by itself.
        """
        return out

    # Pairwise, on a block of query rows: q, k and v are those of the block, after
    # `rotate` and `map_values`.

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor | None:
        """Return a bias (H, *S) for distances of any shape S; it is added to the scaled
        logits.
        """
        return None

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor | None:
        """Return a bias broadcastable to (B, H, Tq, Tk); it is added to the scaled
        logits.
        """
        return None

    def key_bias(self, layer: Layer) -> Tensor | None:
        """Return one number per key, (1|B, H, T), that equals the bias up to a constant
        per query row, or None.
        """
        return None

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        """Rewrite the logits (B, H, Tq, Tk) after scale and biases, before the mask."""
        return logits

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        """Turn masked logits (-inf where hidden) into outputs (B, H, Tq, Dh)."""
        return logits.softmax(-1).to(v.dtype) @ v


def expect(holds: bool, option: str, value: object, expected: str) -> None:
    """Raise OptionError for an option unless `holds` is true."""
    if not holds:
        raise OptionError(f"encoding.{option}", f"is {value}: expected {expected}")


def check_length(encoding: Encoding, length: int) -> None:
    """Raise Undefined if the encoding is not defined at this input length."""
    if encoding.max_length is not None and length > encoding.max_length:
        raise Undefined(
            f"length {length} is beyond the end of '{encoding.name}' (defined up to"
            f" {encoding.max_length})"
        )


# returned by an extension: the extended encoding, and facts for result rows
Extended = tuple[Encoding, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """How far an extension stretches a trained encoding: the lengths of training and of
    evaluation, in tokens.
    """

    train_length: int
    length: int

    def factor(self, fixed: float | None) -> tuple[float, dict[str, Any]]:
        """Return the factor s, `fixed` or by default max(1, length / train_length), and
        facts for result rows.
        """
        if fixed is not None:
            return fixed, {"factor": fixed, "dynamic": False}
        s = max(1.0, self.length / self.train_length)
        return s, {"factor": s, "dynamic": True}
