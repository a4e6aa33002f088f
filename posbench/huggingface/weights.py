"""Names and shapes of the weights in the stock architectures of transformers."""

import dataclasses

import torch
from torch import Tensor

from posbench.model.gpt import GPT, Attention

Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Names:
    """Weight names of one architecture; names within a layer follow `layer`, where {} is its number."""

    tokens: str
    norm: str
    layer: str
    attention_norm: str
    qkv: tuple[str, ...]  # three names, or one for all three, packed head by head
    out: str
    mlp_norm: str
    mlp: tuple[str, ...]  # gate, up, down, or up, down
    head: str = "lm_head"
    biased: tuple[str, ...] = ()  # weights with a bias, which posbench lacks: it is 0


NAMES = {
    "llama": Names(
        tokens="model.embed_tokens",
        norm="model.norm",
        layer="model.layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
    "gpt_neox": Names(
        tokens="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        layer="gpt_neox.layers.{}.",
        attention_norm="input_layernorm",
        qkv=("attention.query_key_value",),
        out="attention.dense",
        mlp_norm="post_attention_layernorm",
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        head="embed_out",
        biased=(
            "gpt_neox.final_layer_norm",
            "input_layernorm",
            "post_attention_layernorm",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        ),
    ),
}


def tensors_of(model: GPT, names: Names, order: Tensor | None) -> Tensors:
    """A model's weights under an architecture's names.

    Args:
        order: the new order (head_dim,) of query and key channels; None = unchanged.
    """
    made = _named(names, "", {names.norm: model.norm.get_parameter("weight")})
    made[f"{names.tokens}.weight"] = model.tokens.weight
    if model.head is not None:
        made[f"{names.head}.weight"] = model.head.weight
    for number, block in enumerate(model.layers):
        matrices = dict(block.mlp.named_parameters())
        parts = [matrices[f"{part}.weight"] for part in ("gate", "up", "down") if f"{part}.weight" in matrices]
        made |= _named(
            names,
            names.layer.format(number),
            {
                names.attention_norm: block.attention_norm.get_parameter("weight"),
                **dict(zip(names.qkv, _queries_keys_values(block.attention, order, names), strict=True)),
                names.out: block.attention.out.weight,
                names.mlp_norm: block.mlp_norm.get_parameter("weight"),
                **dict(zip(names.mlp, parts, strict=True)),
            },
        )
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in made.items()}


def _named(names: Names, prefix: str, weights: Tensors) -> Tensors:
    made = {}
    for name, weight in weights.items():
        made[f"{prefix}{name}.weight"] = weight
        if name in names.biased:
            made[f"{prefix}{name}.bias"] = torch.zeros(len(weight))
    return made


def _queries_keys_values(attention: Attention, order: Tensor | None, names: Names) -> list[Tensor]:
    """The projections, one matrix per name."""
    weight = attention.qkv.weight
    parts = weight.view(3, attention.n_heads, -1, weight.shape[1])  # (3, H, Dh, D)
    if order is not None:
        parts = torch.stack((parts[0][:, order], parts[1][:, order], parts[2]))
    if len(names.qkv) == 3:
        return [part.flatten(0, 1) for part in parts]
    return [parts.transpose(0, 1).flatten(0, 2)]
