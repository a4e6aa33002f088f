"""The facts that decide between encodings before any run: kernels, cache, exports, and
models that have them.
"""

from posbench import encodings
from posbench.encodings.base import Encoding, Shape

# the shape of experiment=demo
DEMO = Shape(d_model=128, n_heads=4, n_layers=4, train_length=64)
# By encoding, the model types of transformers that have it. Any rotary model has RoPE's
# scalings, by its `rope_type`.
MODELS = {
    "rope": "llama, mistral, qwen3, olmo2, gemma2",
    "partial_rope": "gpt_neox, phi, stablelm, nemotron, glm4",
    "p_rope": "gemma4",
    "decoupled_rope": "deepseek_v2, deepseek_v3",
    "learned_sinks": "gpt_oss",
    "pi": "rope_type linear",
    "dynamic_ntk": "rope_type dynamic",
    "llama3": "rope_type llama3",
    "yarn": "rope_type yarn: gpt_oss, ministral3",
    "longrope": "rope_type longrope: phi3",
    "temperature": "llama4, ministral3",
    "layered": "gemma3, cohere2, olmo3, smollm3, llama4",
    "alibi": "bloom, mpt, falcon",
    "t5": "t5, mt5, umt5, switch_transformers",
    "transformer_xl": "xlnet",
    "deberta": "deberta, deberta-v2",
    "learned": "gpt2, opt, gpt_neo, bert",
    "sinusoidal": "marian, m2m_100, xglm",
}


def decision_card(encoding: Encoding) -> dict[str, str]:
    """Return what is known of an encoding before any run."""
    architectures = encodings.architectures(encoding)
    return {
        "kernels": encodings.kernels(encoding),
        "cache": encodings.cache(encoding),
        "architectures": ", ".join(architectures) or "posbench's class",
        "models": MODELS.get(encoding.name, ""),
    }
