"""transformers: Llama's rotation for the half layout, GPT-J's for the interleaved one."""

import math

import torch

from oracles import third_party

CASES = [
    {},
    {"layout": "half"},
    {"base": 500.0},
    {"frequencies": "resonance"},
    {"frequencies": lambda shape: [1.0 / (1 + pair) for pair in range(shape.head_dim // 2)]},
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # Llama's angles are fp32: off by 1000 · 2^-24 = 6e-5 at position 1000


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    if options["layout"] == "half":
        return half(q, k, positions, shape, options["base"])
    law = options.get("frequencies", "geometric")
    if law == "geometric":
        return interleaved(q, k, positions, options["base"], shape.train_length)
    if law == "resonance":  # the paper's equation: wavelengths rounded to whole numbers
        pairs = range(shape.head_dim // 2)
        law = [2 * math.pi / round(2 * math.pi * options["base"] ** (2 * p / shape.head_dim)) for p in pairs]
    return turned(q, k, positions[..., None].double() * torch.tensor(law, dtype=torch.float64))


def half(q, k, positions, shape, base):
    llama = third_party("transformers.models.llama.modeling_llama")
    config = third_party("transformers").LlamaConfig(
        hidden_size=shape.d_model,
        num_attention_heads=shape.n_heads,
        max_position_embeddings=shape.train_length,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions)
    q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
    return {"q": q, "k": k}


def interleaved(q, k, positions, base, length):
    gptj = third_party("transformers.models.gptj.modeling_gptj")
    width = q.shape[-1]
    # GPT-J's table function has base 10000 built in; its rotation takes any table.
    angles = positions[..., None].double() * base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if base == 10000:
        return turned(q, k, angles, gptj.create_sinusoidal_positions(length, width)[positions].chunk(2, dim=-1))
    return turned(q, k, angles)


def turned(q, k, angles, table=None):
    gptj = third_party("transformers.models.gptj.modeling_gptj")
    sin, cos = table or (angles.sin().float(), angles.cos().float())
    q, k = (gptj.apply_rotary_pos_emb(a.transpose(1, 2), sin, cos).transpose(1, 2) for a in (q, k))
    return {"q": q, "k": k}
