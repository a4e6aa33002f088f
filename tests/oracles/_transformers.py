"""transformers' frequencies and rotations, for the oracles of the rotary family."""

import torch

from oracles import third_party

TOLERANCE = {"atol": 1e-4, "rtol": 1e-5}  # their frequencies are fp32: angles are off by 1000 · 2^-24 at position 1000


def frequencies(kind, shape, base, train_length=None, length=None, **parameters):
    """inv_freq (Dh/2,) and attention factor of a rope_type."""
    train_length = train_length or shape.train_length
    config = third_party("transformers").LlamaConfig(
        hidden_size=shape.d_model,
        num_attention_heads=shape.n_heads,
        max_position_embeddings=train_length,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": base,
            "original_max_position_embeddings": train_length,
            **parameters,
        },
    )
    return third_party("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)


def rotated(q, k, positions, layout, inv_freq, attention_factor=1.0):
    """q and k turned by Llama's code (half) or GPT-J's (interleaved)."""
    angles = positions[..., None].double() * inv_freq.double()
    sin, cos = (angles.sin() * attention_factor).float(), (angles.cos() * attention_factor).float()
    if layout == "half":
        llama = third_party("transformers.models.llama.modeling_llama")
        q, k = llama.apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
        return {"q": q, "k": k}
    gptj = third_party("transformers.models.gptj.modeling_gptj")
    q, k = (gptj.apply_rotary_pos_emb(a.transpose(1, 2), sin, cos).transpose(1, 2) for a in (q, k))
    return {"q": q, "k": k}
