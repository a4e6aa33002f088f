"""The stock architectures of transformers that compute the same as a posbench model.

    block               encoding                                            architecture
    rmsnorm + swiglu    rotary                                              Llama
                        none, rotary in some layers, windows                SmolLM3
    layernorm + gelu    rotary, none                                        GPT-NeoX; with a window, Starcoder2
                        learned, and codes that are added or concatenated   GPT-2
                        alibi                                               MPT

All other models are refused with one line.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from posbench.config.schema import Config
from posbench.config.size import hidden_width
from posbench.encodings._additive import Additive
from posbench.encodings.alibi import ALiBi, default_slopes
from posbench.encodings.base import Encoding
from posbench.encodings.dynamic_ntk import DynamicNTK
from posbench.encodings.layered import Layered
from posbench.encodings.learned import Learned
from posbench.encodings.longrope import LongRoPE
from posbench.encodings.none import NoPE
from posbench.errors import UserError
from posbench.huggingface import rotary, spelling
from posbench.huggingface.folder import FAMILIES
from posbench.huggingface.weights import NAMES, Tensors, tensors_of
from posbench.kernels.rms_norm import EPS
from posbench.model.attention.reference import narrower
from posbench.model.gpt import GPT

_FOLLOW_LENGTH = (DynamicNTK, LongRoPE)  # encodings whose frequencies change with the input's length


@dataclasses.dataclass(frozen=True)
class Stock:
    """A posbench model as a stock architecture."""

    kind: str  # transformers' model_type
    settings: dict[str, Any]  # its configuration, with transformers' names
    tensors: Tensors  # with transformers' names
    tied: bool  # the head shares the weights of the token table
    longest: int | None = None  # longest input in tokens; None = any
    grows_by: str | None = None  # setting that must be raised to load it for inputs longer than in training
    remark: str = ""  # advice for users of the model
    code: bool = False  # not transformers' but posbench's class

    @property
    def cached(self) -> bool:
        """Whether `generate()` may cache keys; false if frequencies change with the input's length."""
        return bool(self.settings.get("use_cache", True))

    @property
    def rope_type(self) -> str | None:
        """The type in its `rope_parameters`; None if the architecture has none."""
        parameters: dict[str, Any] = self.settings.get("rope_parameters", {})
        return parameters.get("rope_type")

    @property
    def architecture(self) -> str:
        return "PosbenchForCausalLM" if self.code else FAMILIES[self.kind].model


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The rotary encoding, or none, and the window of each layer."""

    ropes: list[Encoding | None]  # None = without positions
    windows: list[int | None]

    @property
    def rope(self) -> Encoding | None:
        """The encoding shared by all layers that have one."""
        return next((rope for rope in self.ropes if rope is not None), None)

    def orders(self, partly: bool = False) -> list[Tensor | None]:
        return [None if rope is None else rotary.order_of(rope, partly) for rope in self.ropes]


def stock(model: GPT, config: Config) -> Stock:
    """The stock architecture that computes the same as a trained model; UserError if there is none, and why."""
    try:
        return _stock(model, config)
    except UserError as error:
        raise UserError(f"{error}; code=true exports it with posbench's class, which its users must install") from None


def _stock(model: GPT, config: Config) -> Stock:
    kind = (config.model.norm, config.model.mlp)
    if kind not in _BLOCKS:
        raise UserError(
            f"no stock architecture has model.norm={kind[0]} with model.mlp={kind[1]}: expected rmsnorm with swiglu "
            "(model=llama) or layernorm with gelu (model=gpt)"
        )
    if model.sinks:
        raise UserError(f"model.attention.sinks is {model.sinks}: expected 0, no stock architecture has sinks")
    return _BLOCKS[kind](model, config)


def architectures(encoding: Encoding) -> list[str]:
    """The stock architectures that hold an encoding with its default options, in whichever block; none = code=true."""
    if isinstance(encoding, Learned | Additive):
        return [] if encoding.length_dependent else ["GPT-2"]
    if isinstance(encoding, ALiBi):
        return ["MPT"]
    if type(encoding) is NoPE:
        return ["SmolLM3", "GPT-NeoX"]
    kinds = encoding.inner_encodings if isinstance(encoding, Layered) else [encoding]
    if not all(type(kind) is NoPE or rotary.expressible(kind) for kind in kinds):
        return []
    return ["SmolLM3"] if isinstance(encoding, Layered) else ["Llama", "GPT-NeoX"]


def _llama_like(model: GPT, config: Config) -> Stock:
    layers = _layers(model)
    if layers is None:
        raise _refused(model.encoding, "with model=llama, 'rope' and its family, 'none' and layers of them")
    widths = {window for window in layers.windows if window is not None}
    if len(widths) > 1:
        raise UserError(f"layers have windows of {sorted(widths)} keys: expected one width for all, as in SmolLM3")
    settings = _rotary_settings(layers, config) | {
        "num_key_value_heads": config.model.n_heads,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
    }
    kind = "llama"
    if widths or None in layers.ropes:
        kind = "smollm3"
        settings |= {
            "no_rope_layers": [int(rope is not None) for rope in layers.ropes],
            "layer_types": ["full_attention" if width is None else "sliding_attention" for width in layers.windows],
            "use_sliding_window": bool(widths),
            "sliding_window": min(widths, default=None),
        }
        if layers.rope is None:  # no layer turns, so any type will do; every version knows this one
            settings["rope_parameters"] = spelling.default(10000.0)
    return Stock(
        kind, settings, tensors_of(model, NAMES[kind], layers.orders()), model.head is None, remark=_remark(layers)
    )


def _gpt_like(model: GPT, config: Config) -> Stock:
    if isinstance(model.encoding, Learned | Additive):
        return _gpt2(model, config, model.encoding)
    if type(model.encoding) is ALiBi:
        return _mpt(model, config, model.encoding)
    layers = _layers(model)
    if layers is None:
        known = "'rope' and its family, 'none', 'alibi', 'learned' and codes added to the input, such as 'sinusoidal'"
        raise _refused(model.encoding, known)
    if (layers.rope is not None and None in layers.ropes) or len(set(layers.windows)) > 1:
        raise UserError("layers differ in their positions or windows: only SmolLM3, with model=llama, has that")
    if config.model.d_model // config.model.n_heads % 2:
        raise UserError("heads have an odd number of channels: expected an even one, for GPT-NeoX and Starcoder2")
    window = layers.windows[0]
    partly = window is None  # only GPT-NeoX can turn a part of the channels
    settings = _rotary_settings(layers, config, partly) | {"hidden_act": "gelu"}
    if window is None:
        kind = "gpt_neox"
        settings |= {
            "layer_norm_eps": _layer_norm_eps(model),
            "attention_bias": False,
            "use_parallel_residual": False,
        }
    else:
        kind = "starcoder2"
        settings |= {
            "norm_epsilon": _layer_norm_eps(model),
            "num_key_value_heads": config.model.n_heads,
            "use_bias": False,
            "sliding_window": window,
        }
    return Stock(
        kind,
        settings,
        tensors_of(model, NAMES[kind], layers.orders(partly)),
        model.head is None,
        remark=_remark(layers),
    )


def _gpt2(model: GPT, config: Config, encoding: Learned | Additive) -> Stock:
    """GPT-2, with the encoding's addition to the input as its position table."""
    if encoding.length_dependent:
        raise UserError(f"the code of '{encoding.name}' depends on the input's length: expected encoding.norm=length")
    _refuse_window(model, "GPT-2, the stock architecture with a table,")
    # As long as the evaluated lengths, so that the curve can be measured again.
    longest = round(max(1, config.evaluation.ratios[-1]) * config.training.train_length)
    longest = min(longest, encoding.max_length or longest)
    settings = {
        "n_embd": config.model.d_model,
        "n_layer": config.model.n_layers,
        "n_head": config.model.n_heads,
        "n_inner": hidden_width(config.model),
        "n_positions": longest,
        "original_max_position_embeddings": config.training.train_length,  # what posbench takes as trained
        "activation_function": "gelu",
        "layer_norm_epsilon": _layer_norm_eps(model),
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    nothing = torch.zeros(1, longest, encoding.token_dim())
    table = encoding.embed(nothing, torch.arange(longest)[None])[0].detach().contiguous()
    tensors = tensors_of(model, NAMES["gpt2"], [None] * config.model.n_layers)
    tensors["transformer.wpe.weight"] = table
    ends = "" if isinstance(encoding, Learned) else f"The code of {encoding.name} is a finite table here."
    return Stock("gpt2", settings, tensors, model.head is None, longest=longest, remark=ends)


def _mpt(model: GPT, config: Config, encoding: ALiBi) -> Stock:
    if not torch.equal(encoding.slopes, torch.tensor(default_slopes(config.model.n_heads))):
        raise UserError("alibi has custom slopes: expected encoding.slopes=null, the authors' slopes, as in MPT")
    if hidden_width(config.model) != 4 * config.model.d_model:
        raise UserError(
            f"model.d_ff is {hidden_width(config.model)}: MPT, the stock architecture with alibi, needs 4 x d_model, "
            f"{4 * config.model.d_model}"
        )
    _refuse_window(model, "MPT, the stock architecture with alibi,")
    settings = {
        "d_model": config.model.d_model,
        "n_layers": config.model.n_layers,
        "n_heads": config.model.n_heads,
        "max_seq_len": config.training.train_length,
        "layer_norm_epsilon": _layer_norm_eps(model),
        "learned_pos_emb": False,
        "use_cache": True,
    }
    tensors = tensors_of(model, NAMES["mpt"], [None] * config.model.n_layers)
    return Stock("mpt", settings, tensors, model.head is None, grows_by="max_seq_len")


_BLOCKS = {("rmsnorm", "swiglu"): _llama_like, ("layernorm", "gelu"): _gpt_like}


def _layers(model: GPT) -> _Layers | None:
    """The layers if all are rotary or without positions, else None; UserError if their rotary encodings differ."""
    encoding = model.encoding
    kinds = encoding.inner_encodings if isinstance(encoding, Layered) else [encoding]
    if not all(type(kind) is NoPE or rotary.expressible(kind) for kind in kinds):
        return None
    ropes = [kind for kind in kinds if type(kind) is not NoPE]
    if len({repr((rotary.parameters_of(rope, False), rotary.order_of(rope, False).tolist())) for rope in ropes}) > 1:
        raise UserError("layers have different rotary encodings: expected one for all, as in the stock architectures")
    used = [encoding.at(layer)[0] for layer in range(len(model.layers))]
    windows = [narrower(model.window, one.window) for one in used]
    return _Layers([None if type(one) is NoPE else one for one in used], windows)


def _rotary_settings(layers: _Layers, config: Config, partly: bool = False) -> dict[str, Any]:
    """Settings that all architectures with rotary positions share."""
    rope, length = layers.rope, config.training.train_length
    if isinstance(rope, DynamicNTK):  # transformers starts it from this setting
        length = rope.original_length
    return {
        "hidden_size": config.model.d_model,
        "num_hidden_layers": config.model.n_layers,
        "num_attention_heads": config.model.n_heads,
        "intermediate_size": hidden_width(config.model),
        "max_position_embeddings": length,
        "rope_parameters": rotary.NO_POSITIONS if rope is None else rotary.parameters_of(rope, partly),
        **({"use_cache": False} if isinstance(rope, _FOLLOW_LENGTH) else {}),
    }


def _remark(layers: _Layers) -> str:
    if not isinstance(layers.rope, _FOLLOW_LENGTH):
        return ""
    cache = (
        "Its frequencies follow the input's length, and cached keys have those of a shorter one: `use_cache` is "
        "false here, so that `generate()` reads the whole text again for every token. With a cache it computes another "
        f"model beyond {layers.rope.original_length} tokens."
    )
    if isinstance(layers.rope, LongRoPE):
        return cache
    return (
        f"{cache} transformers also keeps the frequencies of the longest input until one comes that is shorter than "
        f"{layers.rope.original_length} tokens: load the model anew for a shorter one."
    )


def _refuse_window(model: GPT, architecture: str) -> None:
    if model.window is not None:
        raise UserError(
            f"model.attention.window is {model.window}: {architecture} has none, only rope and none can keep it"
        )


def _refused(encoding: Encoding, known: str) -> UserError:
    return UserError(f"no stock architecture of transformers has '{encoding.name}': expected {known}")


def _layer_norm_eps(model: GPT) -> float:
    assert isinstance(model.norm, nn.LayerNorm)
    return model.norm.eps
