"""transformers GPT-NeoX for the half layout; GPT-J's rotation, on GPT-NeoX's frequencies, for the interleaved one."""

import torch

from oracles import third_party
from oracles._transformers import TOLERANCE, rotated

CASES = [{}, {"layout": "half", "fraction": 0.5}, {"fraction": 0.75, "base": 500.0}, {"fraction": 1.0}]


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    neox = third_party("transformers.models.gpt_neox.modeling_gpt_neox")
    config = third_party("transformers").GPTNeoXConfig(
        hidden_size=shape.d_model,
        num_attention_heads=shape.n_heads,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": options["base"],
            "partial_rotary_factor": options["fraction"],
        },
    )
    embedding = neox.GPTNeoXRotaryEmbedding(config)
    if options["layout"] == "half":
        q, k = neox.apply_rotary_pos_emb(q, k, *embedding(q, positions))
        return {"q": q, "k": k}
    width = 2 * len(embedding.inv_freq)
    turned = rotated(q[..., :width], k[..., :width], positions, "interleaved", embedding.inv_freq)
    return {name: torch.cat((turned[name], a[..., width:]), -1) for name, a in (("q", q), ("k", k))}
