"""The stock architectures of transformers that compute the same as a posbench model.

    block               encoding                 architecture
    rmsnorm + swiglu    rotary, none             Llama
    layernorm + gelu    rotary, none             GPT-NeoX

All other models are refused with one line.
"""

import dataclasses
from typing import Any

from torch import nn

from posbench.config.schema import Config
from posbench.encodings.base import Encoding
from posbench.encodings.dynamic_ntk import DynamicNTK
from posbench.encodings.longrope import LongRoPE
from posbench.encodings.none import NoPE
from posbench.errors import UserError
from posbench.huggingface import rotary
from posbench.huggingface.package import causal_models
from posbench.huggingface.weights import NAMES, Tensors, tensors_of
from posbench.model.gpt import GPT, RMS_EPS

_FOLLOW_LENGTH = (DynamicNTK, LongRoPE)  # encodings whose frequencies change with the input's length


@dataclasses.dataclass(frozen=True)
class Stock:
    """A posbench model as a stock architecture."""

    kind: str  # transformers' model_type
    settings: dict[str, Any]  # its configuration, with transformers' names
    tensors: Tensors  # with transformers' names
    tied: bool  # the head shares the weights of the token table
    longest: int | None = None  # longest input in tokens; None = any
    remark: str = ""  # advice for users of the model
    code: bool = False  # not transformers' but posbench's class

    @property
    def cached(self) -> bool:
        """Whether `generate()` may cache keys; false if frequencies change with the input's length."""
        return bool(self.settings.get("use_cache", True))

    @property
    def architecture(self) -> str:
        return "PosbenchForCausalLM" if self.code else causal_models()[self.kind]


def stock(model: GPT, config: Config) -> Stock:
    """The stock architecture that computes the same as a trained model; UserError if there is none, and why."""
    try:
        return _stock(model, config)
    except UserError as error:
        raise UserError(f"{error}; code=true exports it with posbench's class, which its users must install") from None


def _stock(model: GPT, config: Config) -> Stock:
    block = (config.model.norm, config.model.mlp)
    if block not in _BLOCKS:
        raise UserError(
            f"no stock architecture has model.norm={block[0]} with model.mlp={block[1]}: expected rmsnorm with swiglu "
            "(model=llama) or layernorm with gelu (model=gpt)"
        )
    if not architectures(model.encoding):
        raise UserError(f"no stock architecture has '{model.encoding.name}': expected 'rope' and its family, or 'none'")
    if model.window is not None:
        raise UserError(f"model.attention.window is {model.window}: expected null, no stock architecture has windows")
    kind = _BLOCKS[block]
    if kind == "gpt_neox" and config.model.d_model // config.model.n_heads % 2:
        raise UserError("heads have an odd number of channels: expected an even one, for GPT-NeoX")
    rope = None if type(model.encoding) is NoPE else model.encoding
    partly = kind == "gpt_neox"  # only GPT-NeoX can turn a part of the channels
    order = None if rope is None else rotary.order_of(rope, partly)
    settings = _rotary_settings(rope, config, partly) | _block_settings(kind, model, config)
    tensors = tensors_of(model, NAMES[kind], order)
    return Stock(kind, settings, tensors, model.head is None, remark=_remark(rope))


_BLOCKS = {("rmsnorm", "swiglu"): "llama", ("layernorm", "gelu"): "gpt_neox"}


def architectures(encoding: Encoding) -> list[str]:
    """The stock architectures that hold an encoding; none = code=true."""
    return ["Llama", "GPT-NeoX"] if type(encoding) is NoPE or rotary.expressible(encoding) else []


def _block_settings(kind: str, model: GPT, config: Config) -> dict[str, Any]:
    if kind == "llama":
        return {"num_key_value_heads": config.model.n_heads, "hidden_act": "silu", "rms_norm_eps": RMS_EPS}
    assert isinstance(model.norm, nn.LayerNorm)
    return {
        "hidden_act": "gelu",
        "layer_norm_eps": model.norm.eps,
        "attention_bias": False,
        "use_parallel_residual": False,
    }


def _rotary_settings(rope: Encoding | None, config: Config, partly: bool) -> dict[str, Any]:
    """Settings that both architectures share."""
    length = config.training.train_length
    if isinstance(rope, DynamicNTK):  # transformers starts it from this setting
        length = rope.original_length
    return {
        "hidden_size": config.model.d_model,
        "num_hidden_layers": config.model.n_layers,
        "num_attention_heads": config.model.n_heads,
        "intermediate_size": config.model.hidden_width,
        "max_position_embeddings": length,
        "rope_parameters": rotary.NO_POSITIONS if rope is None else rotary.parameters_of(rope, partly),
        **({"use_cache": False} if isinstance(rope, _FOLLOW_LENGTH) else {}),
    }


def _remark(rope: Encoding | None) -> str:
    if not isinstance(rope, _FOLLOW_LENGTH):
        return ""
    cache = (
        "Its frequencies follow the input's length, and cached keys have those of a shorter one: `use_cache` is "
        "false here, so that `generate()` reads the whole text again for every token. With a cache it computes another "
        f"model beyond {rope.original_length} tokens."
    )
    if isinstance(rope, LongRoPE):
        return cache
    return (
        f"{cache} transformers also keeps the frequencies of the longest input until one comes that is shorter than "
        f"{rope.original_length} tokens: load the model anew for a shorter one."
    )
