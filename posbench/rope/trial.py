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
import importlib
import operator
from collections.abc import Callable, Collection
from typing import Any

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


class Trial(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One reading of two tokens by a new model.

    Args:
        second: the second token's position.
        turns: whether a rotation turns, or stays as at position 0; None: each turns.
        hidden: the masks under which a token sees itself alone.
    """

    def __init__(
        self,
        config: Any,
        second: int = FAR,
        turns: Callable[[Rotation], bool] | None = None,
        hidden: Collection[Window] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.turns = turns
        self.hidden = hidden
        # each as a function of the second position
        self.rotations: dict[Rotation, Callable[[int], Any]] = {}
        # of each, as in `rope_parameters` of its module's configuration
        self.parameters: dict[Rotation, Any] = {}
        self.windows: set[Window] = set()
        self._layer: nn.Module | None = None
        self._seen: dict[nn.Module | None, float] = {}

        model = self._build(config)
        self._run(model, torch.tensor([[FIRST, second]]))
        # what the weights and softmaxes of each layer were given, in one number
        self.layers = [
            self._seen[layer] for layer in model.modules() if layer in self._seen
        ]
        if not self.layers:
            raise Undefined(f"the layers of '{config.model_type}' cannot be told apart")

    def reached(self, other: "Trial") -> set[int]:
        """Return the layers that differ from another trial's."""
        pairs = enumerate(zip(self.layers, other.layers, strict=True))
        return {number for number, (mine, theirs) in pairs if mine != theirs}

    def _build(self, config: Any) -> Any:
        from transformers.modeling_layers import GradientCheckpointingLayer

        config = copy.deepcopy(config)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        # A short file may leave out a number of heads, which does not matter here. Some
        # kinds refuse to give one that may differ by layer, so `vars` is asked.
        n_heads = vars(config).get("num_attention_heads")
        n_kv_heads = vars(config).get("num_key_value_heads")
        both_are_numbers = isinstance(n_heads, int) and isinstance(n_kv_heads, int)
        if both_are_numbers and n_heads % n_kv_heads:
            config.num_key_value_heads = n_heads
        with torch.device("meta"):
            model = model_class(config)(config).eval()
        model.to("meta")  # DiffLlama draws some of its weights elsewhere
        has_rotary = False
        for parent in [*model.modules()]:
            # a layer may have another within it, of Mamba beside its attention
            is_list = isinstance(parent, nn.ModuleList)
            for name, module in [*parent.named_children()]:
                if is_list and isinstance(module, GradientCheckpointingLayer):
                    module.register_forward_pre_hook(self._enter)
                if is_rotary(module):
                    rotary = type(module)(config=module.config)
                    rotary.forward = functools.partial(self._rotate, rotary)
                    setattr(parent, name, rotary)
                    has_rotary = True
        if not has_rotary:
            raise no_rope(config)
        return model

    def _run(self, model: Any, positions: Tensor) -> None:
        from transformers.masking_utils import AttentionMaskInterface

        masks: Any = AttentionMaskInterface
        original = masks()["eager"]
        masks.register("eager", functools.partial(self._mask, original))
        try:
            with self, torch.no_grad():
                model(
                    torch.tensor([[0, 1]]),
                    position_ids=positions,
                    attention_mask=torch.ones_like(positions),
                    use_cache=False,
                )
        finally:
            masks.register("eager", original)

    def _enter(self, layer: nn.Module, inputs: Any) -> None:
        self._layer = layer
        self._seen.setdefault(layer, 0.0)

    def _rotate(
        self, rotary: Any, x: Tensor, position_ids: Tensor, layer_type: Kind = None
    ) -> Any:
        kinds = [layer_type] if layer_type else []

        def rotation(positions: Tensor) -> Any:
            # a new one: it may keep what it has read
            return type(rotary)(config=rotary.config)(x, positions, *kinds)

        def until(second: int) -> Any:
            positions = torch.full_like(position_ids, second)
            positions[..., 0] = FIRST
            return rotation(positions)

        turned = rotation(position_ids)
        if not position_ids.numel():
            return turned
        key = (layer_type, tuple(factors(turned).tolist()))
        self.rotations.setdefault(key, until)
        parameters = rotary.config.rope_parameters
        if layer_type:
            parameters = parameters[layer_type]
        self.parameters.setdefault(key, parameters)
        if self.turns is None or self.turns(key):
            return turned
        return rotation(torch.zeros_like(position_ids))

    def _mask(self, original: Callable[..., Any], **options: Any) -> Any:
        window = window_of(options["mask_function"])
        self.windows.add(window)
        if window in self.hidden:
            options["mask_function"] = _itself
        return original(**options)

    def _hear(self, activation: Tensor) -> None:
        if activation.is_floating_point():
            number = float(activation.double().sin().nansum())
            self._seen[self._layer] = self._seen.get(self._layer, 0.0) + number

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if operation is torch.ops.aten._to_copy.default:
            options.pop("device", None)  # nothing moves between devices
        tensors = []
        for leaf in pytree.tree_leaves((args, options)):
            if torch.is_tensor(leaf):
                tensors.append(leaf)
        activations = [tensor for tensor in tensors if not tensor.is_meta]
        is_mixed = 0 < len(activations) < len(tensors)
        if is_mixed or operation is torch.ops.aten._softmax.default:
            for activation in activations:
                self._hear(activation)
        if not is_mixed:
            return pytree.tree_map(_without_large, operation(*args, **options))

        if "device" in options:
            options["device"] = torch.device("meta")
        args, options = pytree.tree_map(_to_meta, (args, options))
        return pytree.tree_map(_stand_in, operation(*args, **options))


@dataclasses.dataclass(frozen=True)
class Layers:
    """What the layers of one kind do with positions."""

    rotations: tuple[Rotation, ...]
    attends: bool
    window: Window
    is_scaled: bool  # queries are scaled by their position, too


def kinds_of(config: Any, base: Trial) -> dict[Layers, list[int]]:
    """Return the kinds of layers of a model, each with its layers, by further trials
    that leave out a rotation or a mask.
    """
    turned = {}
    for rotation in base.rotations:
        still = Trial(config, turns=functools.partial(operator.ne, rotation))
        turned[rotation] = base.reached(still)
    shown = {}
    for window in base.windows:
        alone = Trial(config, hidden=[window])
        shown[window] = base.reached(alone)
    # where nothing turns, a position still scales
    near = Trial(config, NEAR, turns=_never)
    scaled = near.reached(Trial(config, FAR, turns=_never))
    # Llama 4 counts tokens itself, whatever their positions
    counts = getattr(config, "attn_temperature_tuning", False)

    kinds: dict[Layers, list[int]] = {}
    for layer in range(len(base.layers)):
        rotations = tuple(each for each in turned if layer in turned[each])
        windows = [each for each in shown if layer in shown[each]]
        window = windows[0] if windows else None
        attends = bool(rotations or windows)
        kind = Layers(
            rotations=rotations,
            attends=attends,
            window=window,
            is_scaled=layer in scaled or (counts and attends and not rotations),
        )
        kinds.setdefault(kind, []).append(layer)
    return kinds


def _never(rotation: Rotation) -> bool:
    return False


def _without_large(result: Any) -> Any:
    if torch.is_tensor(result) and result.numel() > _MOST_NUMBERS:
        return result.to("meta")
    return result


def _to_meta(argument: Any) -> Any:
    return argument.to("meta") if torch.is_tensor(argument) else argument


def _stand_in(result: Any) -> Any:
    """Return numbers that depend on a tensor's shape alone."""
    if not torch.is_tensor(result) or result.numel() > _MOST_NUMBERS:
        return result
    if not result.is_floating_point():
        return torch.zeros(result.shape, dtype=result.dtype)
    rng = torch.Generator().manual_seed(0)
    return torch.randn(result.shape, generator=rng).to(result.dtype)


def _itself(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query == key


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
