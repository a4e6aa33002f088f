"""The contract of a positional encoding: the hooks it may override, and their arguments.

Overriding a hook is the declaration that the encoding acts there. One encoding object serves the whole model;
parameters that differ by layer are indexed by `layer`. If an encoding differs from layer to layer or wraps another one,
its `at` returns the encoding of a layer. Every hook in a layer is then that encoding's.

Axes: B batch, T time (Tq query rows, Tk keys), H heads, D model width, Dh head width. Positions are (1, T) or (B, T).
They may be fractional and need not be consecutive. The distance of a pair is query position minus key position.
"""

import copy
import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from posbench.errors import OptionError, Undefined, UserError, did_you_mean
from posbench.kernels.bias import Bias, Table
from posbench.options import plain

PAIRWISE = frozenset({"distance_bias", "bias", "scores", "attend"})  # hooks on pairs of queries and keys


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model properties that an encoding may depend on."""

    d_model: int
    n_heads: int
    n_layers: int
    train_length: int  # tokens
    vocabulary: tuple[str, ...] = ()  # token texts by id, for the few encodings that need them
    token_rms: float = 0.05  # root mean square of the token embeddings at initialisation
    head_dim: int = 0  # channels of a head; 0 becomes d_model / n_heads
    n_kv_heads: int = 0  # heads of keys and values, each shared by a group of query heads; 0 becomes n_heads

    def __post_init__(self) -> None:
        for name in ("d_model", "n_heads", "n_layers", "train_length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: expected at least 1")
        if not self.head_dim and self.d_model % self.n_heads:
            below = self.d_model - self.d_model % self.n_heads
            raise UserError(
                f"d_model {self.d_model} does not divide into {self.n_heads} heads: "
                f"nearest are {below} and {below + self.n_heads}"
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.d_model // self.n_heads)
        object.__setattr__(self, "n_kv_heads", self.n_kv_heads or self.n_heads)
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"n_kv_heads is {self.n_kv_heads}: expected a divisor of n_heads, {self.n_heads}")


@dataclasses.dataclass(frozen=True)
class Rows:
    """The argument of pairwise hooks: a block of query rows and all the keys they may see."""

    q: Tensor  # (B, H, Tq, Dq), after rotate
    k: Tensor  # (B, H, Tk, Dq), after rotate
    v: Tensor  # (B, H, Tk, Dh)
    positions: Tensor  # (1|B, Tq), of the queries
    distance: Tensor  # (1|B, Tq, Tk), clamped at 0 where a causal mask hides the key
    visible: Tensor  # (Tq, Tk) bool
    queries: slice  # which rows of the whole sequence these are: state[:, :, rows.queries]
    keys: slice | Tensor  # likewise for keys; indices of sinks and window only, unless `scores` or `attend` is there
    layer: int
    state: tuple[Tensor, ...]  # what `prepare` returned, for the whole sequence


def part_of(x: Tensor, where: slice | Tensor) -> Tensor:
    """x (B, H, T, ...) at some tokens; x itself if these are all, which saves a copy of the gradient."""
    return x if isinstance(where, slice) and where == slice(0, x.shape[2]) else x[:, :, where]


class Encoding(nn.Module):
    """Base of all encodings; it encodes no positions itself.

    The constructor takes the `Shape` and keyword options; their defaults are repeated in the encoding's YAML. Angles,
    positions and biases are computed in fp32 (angle tables in fp64), also under autocast. Tables are recomputed or kept
    in non-persistent buffers, so a checkpoint holds learned parameters only.
    """

    name: str  # in the registry and in configurations
    max_length: int | None = None  # longest input the encoding is defined for; None = any
    window: int | None = None  # keys a query may see, itself included; None = the model's limit
    length_dependent: bool = False  # whether outputs at the start of an input depend on its length
    history: frozenset[str] = frozenset()  # what it reads of earlier tokens beside keys and values: "q", "x", or both
    whole_positions: bool = False  # whether it refuses fractional positions
    additive_scores: bool = False  # whether `scores` adds something that does not depend on the logits
    hidden_finite: bool = True  # whether logits of keys after the query stay finite at any distance
    positionless: bool = False  # whether it overrides no hook on purpose
    rates: Mapping[str, float] = MappingProxyType({})  # of own parameters, in multiples of the learning rate

    HOOKS: ClassVar[tuple[str, ...]] = (
        "logit_scale", "positions", "token_dim", "embed", "prepare", "rotate", "map_values", "map_outputs",
        "distance_bias", "bias", "scores", "attend", "additions",
    )  # fmt: skip

    overridden: ClassVar[frozenset[str]] = frozenset()  # hooks; found once per class, since every layer needs them

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.overridden = frozenset(name for name in cls.HOOKS if getattr(cls, name) is not getattr(Encoding, name))
        cls.name = cls.__module__.rpartition(".")[2]  # the file's name; for installed encodings, the registry sets it

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    @property
    def hooks(self) -> frozenset[str]:
        """Names of the hooks this encoding overrides; for a wrapper, also those of its inner encodings."""
        return self.overridden

    def at(self, layer: int) -> "tuple[Encoding, int]":
        """The encoding that a layer of the model uses, and the number of the layer within that encoding.

        Hooks, `window`, `logit_scale` and parameters of the layer are those of the returned encoding. Its own `at`
        returns itself.
        """
        return self, layer

    def sharing(self) -> Self:
        """A copy that shares all parameters and buffers; attributes set on the copy do not change the original."""
        made = copy.copy(self)
        for name in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(made, name, dict(getattr(self, name)))
        return made

    @property
    def logit_scale(self) -> float:
        """The factor of q·k."""
        return float(self.shape.head_dim**-0.5)

    def expect(self, holds: bool, option: str, value: object, expected: str) -> None:
        """Refuse an option's value in one line, for constructors.

        Raises:
            OptionError: `holds` is false; the line names the option, its value, what was expected and the default.
        """
        if not holds:
            default = inspect.signature(type(self)).parameters[option].default
            raise OptionError(
                f"encoding.{option}",
                f"is {plain(value)} for '{self.name}': expected {expected} (default {plain(default)})",
            )

    def given(self, x: Tensor | None, uses: str) -> Tensor:
        """The layer's input, for encodings that look at it; UserError, with how it is used, if a caller left it out."""
        if x is None:
            raise UserError(f"'{self.name}' {uses} the layer's input: pass x")
        return x

    def remarks(self) -> list[str]:
        """Warnings about these options, one line each; a run logs them at its start. An override adds to these."""
        silent = not (self.hooks or self.positionless) and type(self).at is Encoding.at
        said = [f"'{self.name}' overrides no hook, so it gives no position: is one misspelt?"] if silent else []
        return said + _almost_hooks(type(self))

    # -- once per update -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        """Called before each update with training progress in [0, 1), and with 1 at the end.

        For encodings that change during training. Their state depends on `done` alone, so that a resumed run equals an
        uninterrupted one. A new encoding, as in evaluation, has the state of 1.
        """

    # -- once per forward ------------------------------------------------------------------------------------------

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """Positions of token ids (B, T): (1|B, T). Random encodings draw from `generator`; None = a fixed seed."""
        return torch.arange(ids.shape[-1], device=ids.device)[None]

    def token_dim(self) -> int:
        """Width of the token table; less than d_model where the code is concatenated."""
        return self.shape.d_model

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        """Turn token embeddings (B, T, token_dim) into the model's input (B, T, D)."""
        return x

    # -- once per layer, on the whole sequence ---------------------------------------------------------------------

    def prepare(self, q: Tensor, k: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> tuple[Tensor, ...]:
        """State for the pairwise hooks, from raw q, k (B, H, T, Dh) and the layer's normalised input x (B, T, D)."""
        return ()

    def rotate(self, q: Tensor, k: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Transform q and k (B, H, T, Dh); the last axis may widen."""
        return q, k

    def map_values(self, v: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> Tensor:
        """Transform the values (B, H, T, Dh); rows, windows and kernels see what this returns."""
        return v

    def map_outputs(self, out: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> Tensor:
        """Transform the outputs of attention (B, H, Tq, Dh), each query row by itself.

        `x` (B, Tq, D) and `positions` (1|B, Tq) belong to the same rows, which may be only the last ones.
        """
        return out

    # -- pairwise, on a block of query rows ------------------------------------------------------------------------

    def distance_bias(self, distance: Tensor, layer: int) -> Tensor | None:
        """Bias for any shape S of distances: (H, *S), fp32, added to the scaled logits."""
        return None

    def bias(self, rows: Rows) -> Tensor | None:
        """Bias broadcastable to (B, H, Tq, Tk), fp32, added to the scaled logits."""
        return None

    def scores(self, logits: Tensor, rows: Rows) -> Tensor:
        """Rewrite the logits (B, H, Tq, Tk) after scale and biases, before the mask."""
        return logits

    def attend(self, logits: Tensor, rows: Rows) -> Tensor:
        """Turn masked logits (-inf where hidden) into outputs (B, H, Tq, Dh)."""
        return logits.softmax(-1) @ rows.v.to(logits.dtype)

    # -- the same, as data -----------------------------------------------------------------------------------------

    def additions(self, q: Tensor, k: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> Bias | None:
        """The sum of the pairwise hooks at positions 0 .. T-1, as data for a kernel; None = no such form.

        Takes the arguments of `prepare`. Must equal the other hooks in values and in gradients: the contract tests
        compare them.
        """
        return None


def _almost_hooks(cls: type[Encoding]) -> list[str]:
    """A line for each public method that is spelt almost like a hook."""
    own = {name: value for kind in cls.__mro__ for name, value in vars(kind).items() if not hasattr(Encoding, name)}
    methods = [name for name, value in own.items() if isinstance(value, types.FunctionType | property)]
    near = {name: did_you_mean(name, cls.HOOKS, cutoff=0.8) for name in methods if not name.startswith("_")}
    return [f"'{cls.name}' has a method '{name}', which is no hook{hook}" for name, hook in near.items() if hook]


def declared(encoding: Encoding, q: Tensor, k: Tensor, x: Tensor | None, positions: Tensor, layer: int) -> Bias | None:
    """The `additions` of a layer's encoding at consecutive positions, or None; arguments as for `prepare`."""
    with torch.autocast(q.device.type, enabled=False):
        if "attend" in encoding.hooks:
            return None
        if "additions" in encoding.hooks:
            added = encoding.additions(q, k, x, positions, layer)
            if isinstance(added, Table):
                fitting(encoding, "additions", added.values, (q.shape[1], q.shape[2]), "(H, T)")
            return added
        if encoding.hooks & PAIRWISE != {"distance_bias"}:
            return None
        distances = torch.arange(q.shape[2], device=q.device)  # no others occur
        given = encoding.distance_bias(distances, layer)
        return Table(fitting(encoding, "distance_bias", given, (encoding.shape.n_heads, q.shape[2]), "(H, *S)").float())


def rotated_by(
    encoding: Encoding, q: Tensor, k: Tensor, x: Tensor | None, positions: Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    """The queries and keys that `rotate` returns; UserError as of `fitting`."""
    given = encoding.rotate(q, k, x, positions, layer)
    if torch.compiler.is_compiling():
        return given
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise UserError(f"'{encoding.name}': rotate gave {_in_words(given)}, expected two tensors, q and k")
    first = given[0]
    width = first.shape[3] if isinstance(first, Tensor) and first.dim() == 4 else q.shape[3]
    for which, one in zip("qk", given, strict=True):
        fitting(encoding, f"rotate's {which}", one, (*q.shape[:3], width), "(B, H, T, Dq)")
    return given


def fitting(encoding: Encoding, hook: str, given: Tensor | None, expected: tuple[int, ...], axes: str) -> Tensor:
    """What a hook gave, if it is of the expected shape: a kernel would read past the end of less.

    Raises:
        UserError: it is of another shape; the line names the encoding, the hook, what it gave and what was expected.
    """
    if not isinstance(given, Tensor) or (given.shape != expected and not torch.compiler.is_compiling()):
        raise UserError(f"'{encoding.name}': {hook} gave {_in_words(given)}, expected {axes}, here {expected}")
    return given


def _in_words(given: object) -> str:
    if isinstance(given, tuple | list):
        return f"{len(given)} values"
    return str(tuple(given.shape)) if isinstance(given, Tensor) else repr(given)


# -- positions of one forward pass -------------------------------------------------------------------------------------

_Made = TypeVar("_Made")


def shared(positions: Tensor, consecutive: bool) -> Tensor:
    """Positions (1|B, T) of one forward pass; `once` caches on them the tables that all layers share.

    Args:
        consecutive: they are 0 .. T-1, so that the host need not read them from a device.
    """
    own = positions.view_as(positions)  # a view, so that the caller's tensor holds no cache
    vars(own).update(made={}, consecutive=consecutive)
    return own


def once(positions: Tensor, maker: object, make: Callable[[], _Made]) -> _Made:
    """The result of `make` for positions; if they are `shared`, it is cached as long as they live."""
    if torch.compiler.is_compiling():  # the compiler removes repeated work by itself
        return make()
    made: dict[object, _Made] | None = vars(positions).get("made")
    if made is None:
        return make()
    if maker not in made:
        made[maker] = make()
    return made[maker]


def count_from_0(positions: Tensor) -> bool:
    """Whether positions are marked as 0 .. T-1; does not read their values."""
    return not torch.compiler.is_compiling() and bool(vars(positions).get("consecutive"))


def on_host(positions: Tensor) -> Tensor:
    """Positions on the CPU; reads them from their device only if they are not marked as 0 .. T-1."""
    return torch.arange(positions.shape[-1])[None] if count_from_0(positions) else positions.cpu()


def check_length(encoding: Encoding, length: int) -> None:
    """Raise Undefined if the encoding is not defined at this input length."""
    if encoding.max_length is not None and length > encoding.max_length:
        raise Undefined(f"length {length} is beyond the end of '{encoding.name}' (defined up to {encoding.max_length})")
