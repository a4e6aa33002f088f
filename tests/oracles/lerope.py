"""transformers Mistral Large 4: its learned rotary embedding, and its rotation (interleaved) or Llama's (half)."""

import inspect

from oracles import third_party
from oracles._transformers import TOLERANCE, rotated

CASES = [{}, {"layout": "half", "base": 500.0}]


def parameter_count(shape, options):
    return shape.head_dim // 2


def reference(parameters, shape, options, q, k, v, x, positions, layer, causal):
    mistral = third_party("transformers.models.mistral_large4.modeling_mistral_large4")
    config = third_party("transformers.models.mistral_large4").MistralLarge4TextConfig(
        head_dim=shape.head_dim,
        qk_rope_head_dim=shape.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": options["base"]},
    )
    embedding = mistral.MistralLarge4TextRotaryEmbedding(config)
    embedding.alpha = parameters["alpha"]
    if positions.max() > 100:  # there the fp32 angles, several times the position, are too coarse
        learned = embedding.inv_freq.double() * parameters["alpha"].double().exp()
        return rotated(q, k, positions, options["layout"], learned)
    cos, sin = inspect.unwrap(type(embedding).forward)(embedding, q, positions)  # outside of no_grad
    if options["layout"] == "half":
        q, k = third_party("transformers.models.llama.modeling_llama").apply_rotary_pos_emb(q, k, cos, sin)
        return {"q": q, "k": k}
    turned = mistral.apply_rotary_pos_emb_interleave(q, k, cos, sin)  # pairs are parted in what it gives back
    q, k = (a.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for a in turned)
    return {"q": q, "k": k}
