"""Tiny random models of every tested kind and of some others, as transformers itself
saves them, with a tokenizer.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import pre_tokenizers

VOCABULARY = 131
LENGTH = 48
WIDE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}
GROUPED = {
    **WIDE,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
}
HEADS = {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 4}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
NARROW = {"head_dim": 8, "sliding_window": 20, "query_pre_attn_scalar": 8}
WINDOWS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
GPT_NEOX = {
    **WIDE,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "rope_parameters": HALF,
}
QWEN2 = {
    **GROUPED,
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
}
SMOLLM3 = {
    **GROUPED,
    **ENDS,
    "num_hidden_layers": 3,
    "no_rope_layers": [1, 0, 1],
}
GEMMA3_TEXT = {**GROUPED, **NARROW, **WINDOWS}
OPT = {
    **WIDE,
    **ENDS,
    "num_hidden_layers": 2,
    "ffn_dim": 64,
    "word_embed_proj_dim": 16,
}
MPT = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": LENGTH,
}

# model_type -> (configuration class, its arguments): windows, layers without RoPE, two
# bases, parts of heads, ties
MODELS = {
    "llama": ("LlamaConfig", GROUPED),
    "gpt_neox": ("GPTNeoXConfig", GPT_NEOX),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 20}),
    "olmo": ("OlmoConfig", {**GROUPED, **ENDS, "clip_qkv": 2.0}),
    "olmo2": ("Olmo2Config", {**GROUPED, **ENDS}),
    "starcoder2": ("Starcoder2Config", {**GROUPED, **ENDS}),
    "qwen2": ("Qwen2Config", QWEN2),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "smollm3": ("SmolLM3Config", SMOLLM3),
    "gemma2": ("Gemma2Config", {**GROUPED, **NARROW}),
    "gemma3_text": ("Gemma3TextConfig", GEMMA3_TEXT),
    "gpt2": ("GPT2Config", {**HEADS, **ENDS, "n_embd": 32, "n_positions": LENGTH}),
    "opt": ("OPTConfig", OPT),
    "bloom": ("BloomConfig", {**HEADS, "hidden_size": 32, "seq_length": LENGTH}),
    "mpt": ("MptConfig", MPT),
}

GRANITE = {
    **GROUPED,
    **ENDS,
    "logits_scaling": 0.25,
    "attention_multiplier": 0.2,
}
MAMBA = {
    **ENDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
}
GEMMA3 = {
    "text_config": GEMMA3_TEXT,
    "mm_tokens_per_image": 4,
    "vision_config": VISION,
}

QWEN3_MOE = {
    **GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 8,
}
COHERE = {
    **GROUPED,
    **ENDS,
    "rope_parameters": {"rope_theta": 1e4},
    "logit_scale": 1.0,
}

# Kinds outside the list: a mixture of experts, scaled logits, a module with rules of its own, pairs of
# neighbours that turn, a recurrent state, a text part of a model of several.
UNTESTED = {
    "qwen3_moe": ("Qwen3MoeConfig", QWEN3_MOE),
    "granite": ("GraniteConfig", GRANITE),
    "phi3": ("Phi3Config", {**GROUPED, **ENDS}),
    "cohere": ("CohereConfig", COHERE),
    "mamba": ("MambaConfig", MAMBA),
    "gemma3": ("Gemma3Config", GEMMA3),
}


def configuration(kind: str, **more: Any) -> Any:
    import transformers

    name, options = (MODELS | UNTESTED)[kind]
    configuration_class = getattr(transformers, name)
    return configuration_class(**options | more)


def save(kind: str, folder: Path, begins: int | None = None, **more: Any) -> Any:
    """Write a model of random weights and a tokenizer, and return the model; `begins`:
    a token before every text.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    config = configuration(kind, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn_like(parameter)
            parameter.add_(0.15 * drawn)
    model.save_pretrained(folder)
    write_tokenizer(folder, begins)
    return model


def write_tokenizer(folder: Path, begins: int | None = None) -> None:
    """Write a tokenizer of the words w0 to w130, which reads any other word as w3."""
    ids = {f"w{i}": i for i in range(VOCABULARY)}
    words = tokenizers.models.WordLevel(ids, unk_token="w3")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins is not None:
        word = f"w{begins}"
        put_before = tokenizers.processors.TemplateProcessing
        made.post_processor = put_before(
            single=f"{word} $A", special_tokens=[(word, begins)]
        )
    made.save(str(folder / "tokenizer.json"))


def changed(folder: Path, **keys: Any) -> None:
    """Set keys of a model's configuration."""
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | keys))


def write_text(path: Path, words: int = 9000) -> None:
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(words, generator=generator) ** 3  # some words are common
    ids = (VOCABULARY * share).long()
    written = [f"w{i}" for i in ids.tolist()]
    path.write_text(" ".join(written), encoding="utf-8")
