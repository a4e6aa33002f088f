"""transformers: DeepSeek V3's attention layer (beside), DeepSeek V4's rotation of q, k, v and outputs (trailing)."""

import torch

from oracles import third_party
from oracles._transformers import TOLERANCE

CASES = [
    {},
    {"turning": 6, "layout": "half", "base": 500.0},
    {"placement": "trailing"},
    {"placement": "trailing", "turning": 2, "turn_values": True},
]


def _turning(shape, options):
    return options["turning"] or shape.head_dim // 2


def parameter_count(shape, options):
    if options["placement"] == "trailing":
        return 0
    return shape.n_layers * (shape.n_heads + 1) * _turning(shape, options) * shape.d_model


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1) & causal
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
    if options["placement"] == "trailing":
        return {"output": _v4(shape, options, q, k, v, positions, mask)}
    query, key = parameters[f"query.{layer}.weight"], parameters[f"key.{layer}.weight"]
    return {"output": _v3(query, key, shape, options, q, k, v, x, positions, mask)}


def _v3(query, key, shape, options, q, k, v, x, positions, mask):
    """Its projections pick q, k, v out of one wide input, x beside them; its norm of the latents is left out."""
    module = third_party("transformers.models.deepseek_v3.modeling_deepseek_v3")
    heads, width, turning = shape.n_heads, shape.head_dim, _turning(shape, options)
    content = heads * width
    config = third_party("transformers").DeepseekV3Config(
        hidden_size=3 * content + shape.d_model,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=2 * content,
        qk_nope_head_dim=width,
        qk_rope_head_dim=turning,
        v_head_dim=width,
        rope_interleave=options["layout"] == "interleaved",
        rope_parameters={"rope_type": "default", "rope_theta": options["base"]},
        attn_implementation="eager",
    )
    attention = module.DeepseekV3Attention(config, 0)
    attention.kv_a_layernorm = attention.o_proj = torch.nn.Identity()
    pick = torch.eye(3 * content, 3 * content + shape.d_model)
    pick_q, pick_kv = pick[:content].unflatten(0, (heads, width)), pick[content:]
    from_x = torch.nn.functional.pad(query, (3 * content, 0)).unflatten(0, (heads, turning))
    k_then_v = torch.eye(2 * content).view(2, heads, width, -1).transpose(0, 1).flatten(0, 2)
    weights = {
        "q_proj.weight": torch.cat((pick_q, from_x), dim=1).flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat((pick_kv, torch.nn.functional.pad(key, (3 * content, 0)))),
        "kv_b_proj.weight": k_then_v,
    }
    wide = torch.cat([a.transpose(1, 2).flatten(2) for a in (q, k, v)] + [x], dim=-1)
    embedded = module.DeepseekV3RotaryEmbedding(config)(x, positions)
    output, _ = torch.func.functional_call(attention, weights, (wide, embedded, mask))
    return output.unflatten(-1, (heads, width)).transpose(1, 2)


def _v4(shape, options, q, k, v, positions, mask):
    module = third_party("transformers.models.deepseek_v4.modeling_deepseek_v4")
    turning = _turning(shape, options)
    inv_freq = options["base"] ** (-torch.arange(0, turning, 2, dtype=torch.float64) / turning)
    angles = positions[..., None] * inv_freq
    cos, sin = angles.cos().float(), angles.sin().float()
    q, k = (module.apply_rotary_pos_emb(a, cos, sin) for a in (q, k))
    logits = q @ k.mT * shape.head_dim**-0.5 + mask
    if not options["turn_values"]:
        return logits.softmax(-1) @ v
    out = logits.softmax(-1) @ module.apply_rotary_pos_emb(v, cos, sin)
    return module.apply_rotary_pos_emb(out.transpose(1, 2), cos, -sin, unsqueeze_dim=2).transpose(1, 2)
