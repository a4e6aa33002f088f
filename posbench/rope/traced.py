"""A model of transformers built from its configuration alone, and tried: what reaches
which of its layers.

It has no weights: they are on the meta device, which keeps shapes alone. Rotary modules
and activations are on the CPU. What a weight makes of an activation is replaced by
numbers that depend on its shape alone, so that no layer hears of the one before. A
layer is reached by what changes the numbers that its weights, or a softmax, are given.
"""

import copy
import dataclasses
import functools
import hashlib
import importlib
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from posbench.errors import Undefined
from posbench.rope.imports import transformers

FIRST = 1  # the position of the first token
NEAR = 2  # that of the second, or else
FAR = 2**20
# The numbers of a tensor that has values. What is larger is a weight, or is padding of
# a recurrent layer.
_MOST_NUMBERS = 2**20

Kind = str | None  # what a rotary module is asked for; None if it has one rotation
# what a module is asked for, and how it turns at position 1
Rotation = tuple[Kind, tuple[complex, ...]]
Window = tuple[int, bool] | None  # its tokens, and whether it is a chunk


class TracedModel(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A new model, which `read` lets read two tokens.

    Args:
        turns: whether a rotation turns, or stays as at position 0; None: each turns.
        hidden: the masks under which a token sees itself alone.
        outputs: what layers return that are not tried, by their number.
    """

    def __init__(
        self,
        config: Any,
        turns: Callable[[Rotation], bool] | None = None,
        hidden: Collection[Window] = (),
        outputs: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.config = config
        self.turns = turns
        self.hidden = hidden
        self.skipped = outputs or {}
        # each as a function of the second position
        self.rotations: dict[Rotation, Callable[[int], Any]] = {}
        # of each, as in `rope_parameters` of its module's configuration
        self.parameters: dict[Rotation, Any] = {}
        # what each rotary module was asked for, with its inputs
        self.asked: dict[tuple[int, Kind], tuple[Tensor, Tensor]] = {}
        self.windows: dict[Window, None] = {}  # a set in their order
        # what each layer is given where one of the masks hides, from `kinds_of`
        self.alone: dict[Window, dict[int, bytes]] = {}
        # what each layer returned
        self.outputs: dict[int, Any] = {}
        self.rotaries: list[Any] = []
        self._layer = -1  # before the first
        # what the weights and softmaxes of each layer were given, and the logit of the
        # second token's query for the first one's key
        self._seen: dict[int, Any] = {}
        self._logits: dict[int, float] = {}
        self.model = self._build(config)

    def read(self, second: int = FAR) -> Self:
        """Let the model read two tokens, the second at a position."""
        from transformers.masking_utils import AttentionMaskInterface

        positions = torch.tensor([[FIRST, second]])
        masks: Any = AttentionMaskInterface
        original = masks()["eager"]
        masks.register("eager", functools.partial(self._mask, original))
        try:
            with self, torch.no_grad():
                self.model(
                    torch.tensor([[0, 1]]),
                    position_ids=positions,
                    attention_mask=torch.ones_like(positions),
                    use_cache=False,
                )
        finally:
            masks.register("eager", original)
        if not self._seen:
            kind = self.config.model_type
            raise Undefined(f"the layers of '{kind}' cannot be told apart")
        return self

    @property
    def numbers(self) -> list[int]:
        """The layers that were reached at all, by their place in the model."""
        return sorted(self._seen)

    @property
    def given(self) -> dict[int, bytes]:
        """What each layer was given, as a digest."""
        return {number: self._seen[number].digest() for number in self.numbers}

    @property
    def layers(self) -> list[bytes]:
        """The same, in the order of the layers."""
        return [*self.given.values()]

    @property
    def logits(self) -> list[float]:
        """The logit of the second query for the first key, summed, of each layer."""
        return [self._logits.get(number, 0.0) for number in self.numbers]

    def reached(self, other: "TracedModel") -> set[int]:
        """Return the layers that differ from another model's."""
        pairs = enumerate(zip(self.layers, other.layers, strict=True))
        return {number for number, (mine, theirs) in pairs if mine != theirs}

    def turned(
        self, asked: Mapping[Any, Any], lengths: Sequence[int], config: Any = None
    ) -> list[Tensor]:
        """Return what the rotary modules return for inputs of some lengths, asked as
        another model's were, of their own configurations or of a given one.
        """
        found: list[Tensor] = []
        for (number, kind), (x, positions) in asked.items():
            make = functools.partial(_rotary_of, self.rotaries[number], config)
            for length in lengths:
                result = _new_rotation(make, x, positions, kind, length - 1)
                found += [result] if torch.is_tensor(result) else result
        return found

    def _build(self, config: Any) -> Any:
        from transformers.modeling_layers import GradientCheckpointingLayer

        config = copy.deepcopy(config)
        config._attn_implementation = "eager"
        config._experts_implementation = "batched_mm"
        # A short file may leave out a number of heads, which does not matter here. Some
        # kinds refuse to give one that may differ by layer, so `vars` is asked.
        n_heads = vars(config).get("num_attention_heads")
        n_kv_heads = vars(config).get("num_key_value_heads")
        both_are_numbers = isinstance(n_heads, int) and isinstance(n_kv_heads, int)
        if both_are_numbers and n_kv_heads and n_heads % n_kv_heads:
            config.num_key_value_heads = n_heads
        with torch.device("meta"):
            model = model_class(config)(config).eval()
        model.to("meta")  # DiffLlama draws some of its weights elsewhere
        n_layers = 0
        for parent in [*model.modules()]:
            # a layer may have another within it, of Mamba beside its attention
            is_list = isinstance(parent, nn.ModuleList)
            for name, module in [*parent.named_children()]:
                if is_list and isinstance(module, GradientCheckpointingLayer):
                    self._follow(module, n_layers)
                    n_layers += 1
                if is_rotary(module):
                    rotary = type(module)(config=module.config)
                    number = len(self.rotaries)
                    rotary.forward = functools.partial(self._rotate, rotary, number)
                    setattr(parent, name, rotary)
                    self.rotaries.append(rotary)
        if not self.rotaries:
            raise no_rope(config)
        return model

    def _follow(self, layer: Any, number: int) -> None:
        """Tell when a layer begins, and keep what it returns."""

        def enter(layer: nn.Module, inputs: Any) -> None:
            self._layer = number
            self._seen.setdefault(number, hashlib.sha256())

        def leave(layer: nn.Module, inputs: Any, output: Any) -> None:
            self.outputs[number] = pytree.tree_map(_copied, output)

        if number in self.skipped:
            output = self.skipped[number]
            layer.forward = lambda *args, **kwargs: pytree.tree_map(_copied, output)
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)

    def _rotate(
        self,
        rotary: Any,
        number: int,
        x: Tensor,
        position_ids: Tensor,
        layer_type: Kind = None,
    ) -> Any:
        kinds = [layer_type] if layer_type else []
        make = functools.partial(_rotary_of, rotary)
        turned = make()(x, position_ids, *kinds)
        if not position_ids.numel():
            return turned
        key = (layer_type, tuple(factors(turned).tolist()))
        until = functools.partial(_new_rotation, make, x, position_ids, layer_type)
        self.rotations.setdefault(key, until)
        self.asked.setdefault((number, layer_type), (x, position_ids))
        parameters = rotary.config.rope_parameters
        if layer_type:
            parameters = parameters[layer_type]
        self.parameters.setdefault(key, parameters)
        if self.turns is None or self.turns(key):
            return turned
        still = torch.zeros_like(position_ids)
        return make()(x, still, *kinds)

    def _mask(self, original: Callable[..., Any], **options: Any) -> Any:
        window = window_of(options["mask_function"])
        self.windows[window] = None
        if window in self.hidden:
            # each token sees itself alone
            options["mask_function"] = lambda batch, head, query, key: query == key
            options["allow_is_bidirectional_skip"] = False
        return original(**options)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if operation is torch.ops.aten._to_copy.default:
            options.pop("device", None)  # nothing moves between devices
        tensors = [
            leaf
            for leaf in pytree.tree_leaves((args, options))
            if isinstance(leaf, Tensor)
        ]
        activations = [tensor for tensor in tensors if not tensor.is_meta]
        is_mixed = 0 < len(activations) < len(tensors)
        is_softmax = operation is torch.ops.aten._softmax.default
        seen = self._seen.get(self._layer)
        if seen and (is_mixed or is_softmax):
            for activation in activations:
                if activation.is_floating_point():
                    seen.update(activation.double().numpy().tobytes())
                if is_softmax and activation.dim() == 4:
                    logit = float(activation[..., -1, 0].double().sum())
                    former = self._logits.get(self._layer, 0.0)
                    self._logits[self._layer] = former + logit
        if not is_mixed:
            return pytree.tree_map(_without_large, operation(*args, **options))

        if "device" in options:
            options["device"] = torch.device("meta")
        args, options = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to("meta"), (args, options)
        )
        return pytree.tree_map(_stand_in, operation(*args, **options))


@dataclasses.dataclass(frozen=True)
class Layers:
    """What the layers of one kind do with positions."""

    rotations: tuple[Rotation, ...]
    attends: bool
    window: Window
    scale: float  # on queries at position FAR, by their position; 1 without


def kinds_of(config: Any, base: TracedModel) -> dict[Layers, list[int]]:
    """Return the kinds of layers of a model, each with its layers, by further trials
    that leave out a rotation or a mask.
    """
    turned = {}
    for rotation in base.rotations:
        still = TracedModel(
            config, turns=functools.partial(operator.ne, rotation)
        ).read()
        turned[rotation] = base.reached(still)
    shown = {}
    for window in base.windows:
        alone = TracedModel(config, hidden=[window]).read()
        shown[window] = base.reached(alone)
        base.alone[window] = alone.given
    # where nothing turns, a position still scales
    near = TracedModel(config, turns=_never).read(NEAR)
    if len(base.rotations) > 1:
        still = TracedModel(config, turns=_never).read()
    scaled = near.reached(still)
    counted = scale_by_count(config)

    kinds: dict[Layers, list[int]] = {}
    for layer in range(len(base.layers)):
        rotations = tuple(each for each in turned if layer in turned[each])
        windows = [each for each in shown if layer in shown[each]]
        attends = bool(rotations or windows)
        scale = 1.0
        if layer in scaled and near.logits[layer]:
            scale = round(still.logits[layer] / near.logits[layer], 4)
        if attends and not rotations and counted != 1:
            scale = counted
        kind = Layers(rotations, attends, windows[0] if windows else None, scale)
        kinds.setdefault(kind, []).append(layer)
    return kinds


def scale_by_count(config: Any) -> float:
    """Return the factor on queries at position FAR in Llama 4's layers without RoPE,
    which count tokens themselves, whatever their positions.
    """
    if not getattr(config, "attn_temperature_tuning", False):
        return 1.0
    if not hasattr(config, "floor_scale"):
        return 1.0
    steps = math.floor((FAR + 1) / config.floor_scale)
    scale: float = 1 + config.attn_scale * math.log1p(steps)
    return round(scale, 4)


def _rotary_of(rotary: Any, config: Any = None) -> Any:
    """Return a new rotary module, which keeps nothing that another has read."""
    return type(rotary)(config=config or rotary.config)


def _new_rotation(
    make: Callable[[], Any], x: Tensor, position_ids: Tensor, kind: Kind, second: int
) -> Any:
    """Return what a rotary module makes of two tokens, the second at a position."""
    positions = torch.full_like(position_ids, second)
    positions[..., 0] = FIRST
    kinds = [kind] if kind else []
    return make()(x, positions, *kinds)


def _never(rotation: Rotation) -> bool:
    return False


def _copied(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def _without_large(result: Any) -> Any:
    if isinstance(result, Tensor) and result.numel() > _MOST_NUMBERS:
        return result.to("meta")
    return result


def _stand_in(result: Any) -> Any:
    """Return numbers that depend on a tensor's shape alone."""
    if not isinstance(result, Tensor) or result.numel() > _MOST_NUMBERS:
        return result
    if not result.is_floating_point():
        return torch.zeros(result.shape, dtype=result.dtype)
    return _numbers(result.shape).to(result.dtype, copy=True)


@functools.lru_cache(256)
def _numbers(shape: torch.Size) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=rng)


def model_class(config: Any) -> Any:
    """Return the library's class of models without a head that has a configuration."""
    known = transformers().AutoModel._model_mapping
    if type(config) in known:
        return known[type(config)]
    # a part of a model
    module = type(config).__module__.replace("configuration_", "modeling_")
    for name, model in vars(importlib.import_module(module)).items():
        if name.endswith("TextModel") and model.config_class is type(config):
            return model
    raise Undefined(f"transformers has no model of '{config.model_type}' by itself")


def no_rope(config: Any) -> Undefined:
    return Undefined(
        f"'{config.model_type}' has no RoPE in a module of transformers; RoPE within"
        " attention, as in GPT-J, is not read"
    )


def is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def window_of(visible: Callable[..., Tensor]) -> Window:
    """Return how many tokens a mask function shows; None if all before."""
    zero = torch.tensor(0)
    tokens = int(visible(zero, zero, torch.arange(FAR), zero).sum())
    if tokens == FAR:
        return None
    # in a window, the first query that no longer sees token 0 sees token 1
    return tokens, not bool(visible(zero, zero, zero + tokens, zero + 1))


def factors(turned: Any) -> Tensor:
    """Return the complex factors (P,) by which a rotary module turns the pairs of the
    first token, from what it returns.
    """
    if torch.is_tensor(turned):  # Llama 4
        first = turned.flatten(0, -2)[0].to(torch.complex128)
    else:
        cos, sin = turned
        first = torch.complex(cos.double(), sin.double()).flatten(0, -2)[0]
    # each is there twice: in halves, or interleaved; in GPT-OSS and Llama 4 once
    n_pairs = len(first) // 2
    if torch.equal(first[:n_pairs], first[n_pairs:]):
        return first[:n_pairs]
    if torch.equal(first[::2], first[1::2]):
        return first[::2]
    return first
