"""What published models do with positions, in facts typed by hand, beside what is read
from their configurations.
"""

from typing import Any

import pytest

from posbench.errors import Undefined
from posbench.rope.reading import configuration, layers_of

pytest.importorskip("transformers")

WINDOWED = ["sliding_attention"] * 3 + ["full_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_V3 = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
YARN_V4 = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
LONG_PHI = {
    "type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [1.0] * 32 + [2.0] * 32,
    "short_mscale": 1.2431,
    "long_mscale": 1.2432,
    "original_max_position_embeddings": 4096,
}
# By model: its configuration as far as positions go; of each kind of layer with RoPE how
# many there are, the window (and whether it is a chunk), the base, the channels that
# turn, and the factor on queries and keys; a line for each kind without RoPE.
SETTINGS: dict[str, dict[str, Any]] = {}
ROPES: dict[str, list[Any]] = {}
OTHERS: dict[str, list[str]] = {}

SETTINGS["Llama 3.1 8B"] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "rope_theta": 5e5,
    "rope_scaling": LLAMA3,
}
ROPES["Llama 3.1 8B"] = [("all 32 layers", None, 5e5, 128, 1.0)]

SETTINGS["Mistral 7B v0.1"] = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
ROPES["Mistral 7B v0.1"] = [("all 32 layers", (4096, False), 1e4, 128, 1.0)]

SETTINGS["Llama 4 Scout"] = {
    "model_type": "llama4_text",
    "num_hidden_layers": 48,
    "rope_theta": 5e5,
}
ROPES["Llama 4 Scout"] = [("36 of 48 layers", (8192, True), 5e5, 128, 1.0)]
OTHERS["Llama 4 Scout"] = [
    "full_attention, 12 of 48 layers: no RoPE, queries scaled by their position"
]

SETTINGS["SmolLM3 3B"] = {
    "model_type": "smollm3",
    "num_hidden_layers": 36,
    "rope_theta": 5e6,
}
ROPES["SmolLM3 3B"] = [("27 of 36 layers", None, 5e6, 128, 1.0)]
OTHERS["SmolLM3 3B"] = ["9 of 36 layers: no RoPE"]

SETTINGS["Command R7B"] = {
    "model_type": "cohere2",
    "num_hidden_layers": 32,
    "rope_theta": 5e4,
}
ROPES["Command R7B"] = [("24 of 32 layers", (4096, False), 5e4, 128, 1.0)]
OTHERS["Command R7B"] = ["full_attention, 8 of 32 layers: no RoPE"]

SETTINGS["gpt-oss-20b"] = {"model_type": "gpt_oss", "num_hidden_layers": 24}
ROPES["gpt-oss-20b"] = [
    ("12 of 24 layers", None, 1.5e5, 64, 1.3466),
    ("12 of 24 layers", (128, False), 1.5e5, 64, 1.3466),
]

SETTINGS["DeepSeek V3"] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 8,
    "rope_scaling": YARN_V3,
}
ROPES["DeepSeek V3"] = [("all 8 layers", None, 1e4, 64, 1.0)]

SETTINGS["DeepSeek V4 Flash"] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "compress_rope_theta": 160000,
    "rope_scaling": YARN_V4,
}
ROPES["DeepSeek V4 Flash"] = [
    ("41 of 43 layers", (128, False), 1.6e5, 64, 1.0),
    ("2 of 43 layers", (128, False), 1e4, 64, 1.0),
]

SETTINGS["Phi-3.5-MoE"] = {
    "model_type": "phimoe",
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "rope_theta": 1e4,
    "rope_scaling": LONG_PHI,
}
ROPES["Phi-3.5-MoE"] = [("all 32 layers", None, 1e4, 128, 1.2431)]

SETTINGS["Granite SWA"] = {
    "model_type": "granite_swa",
    "num_hidden_layers": 4,
    "layer_types": WINDOWED,
    "layer_rope_theta": [1e4, 1e4, 1e4, 0.0],
}
ROPES["Granite SWA"] = [("3 of 4 layers", (128, False), 1e4, 128, 1.0)]
OTHERS["Granite SWA"] = ["full_attention, 1 of 4 layers: no RoPE"]

SETTINGS["Zamba 2"] = {"model_type": "zamba2", "use_mem_rope": True}
ROPES["Zamba 2"] = [("9 of 63 layers", None, 1e4, 160, 1.0)]
OTHERS["Zamba 2"] = ["54 of 63 layers: no attention"]

SETTINGS["JetMoE"] = {"model_type": "jetmoe", "kv_channels": 64, "num_hidden_layers": 4}
ROPES["JetMoE"] = [("all 4 layers", None, 1e4, 64, 1.0)]

SETTINGS["Mistral 4"] = {"model_type": "mistral4", "num_hidden_layers": 4}
ROPES["Mistral 4"] = [("all 4 layers", None, 1e4, 64, 1.0)]

SETTINGS["Qwen3-Next"] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "rope_theta": 1e7,
}
ROPES["Qwen3-Next"] = [("2 of 8 layers", None, 1e7, 64, 1.0)]
OTHERS["Qwen3-Next"] = ["linear_attention, 6 of 8 layers: no attention"]


@pytest.mark.slow
@pytest.mark.parametrize("model", SETTINGS)
def test_a_published_models_layers_are_counted_as_they_are(model):
    ropes, others = layers_of(configuration(SETTINGS[model]))

    read = []
    for rope in ropes:
        _, factor = rope.at(rope.train_length)
        factor = round(factor, 4)
        read.append((rope.share, rope.window, rope.base, rope.width, factor))
    assert read == ROPES[model]
    for line, expected in zip(others, OTHERS.get(model, []), strict=True):
        assert expected in line


SCALED = ["mistral4", "ministral3"]


@pytest.mark.parametrize("kind", SCALED)
def test_queries_that_are_scaled_by_their_position_are_named(kind):
    settings = {"model_type": kind, "num_hidden_layers": 2}
    (rope,), _ = layers_of(configuration(settings))
    assert rope.is_scaled


WITHOUT = ["gpt_bigcode", "ctrl", "openai-gpt", "inkling_text", "bamba"]


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_model_without_rope_is_not_believed_to_have_it(kind):
    with pytest.raises(Undefined, match=f"'{kind}' has no RoPE"):
        layers_of(configuration({"model_type": kind}))


def test_the_base_of_a_layer_is_the_one_that_turns_it():
    thetas = {"layer_rope_theta": [5e4, 5e4, 5e4, 1e6]}
    config = configuration({**SETTINGS["Granite SWA"], **thetas})
    (full, sliding), _ = layers_of(config)
    assert full.base == 1e6
    assert sliding.base == 5e4
