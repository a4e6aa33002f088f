"""Presets of `layered`: which layer of a released model turns what and has a window, by
its configuration.
"""

from typing import Any, NamedTuple

import pytest
import yaml
from oracles import third_party

from posbench import encodings
from posbench.config.shipped import configs_dir

FOLDER = configs_dir() / "encoding" / "layered"
LAYERS = 12
CONFIGS = {
    "smollm3": "SmolLM3Config",
    "cohere2": "Cohere2Config",
    "llama4": "Llama4TextConfig",
    "mistral_large4": "MistralLarge4TextConfig",
    "olmo3": "Olmo3Config",
    "olmo3_gnope": "Olmo3Config",
    "gemma3": "Gemma3TextConfig",
    "gemma4": "Gemma4TextConfig",
    "gpt_oss": "GptOssConfig",
    "mimo_v2": "MiMoV2FlashConfig",
    "qwen3_next": "Qwen3NextConfig",
    "inkling": "InklingTextConfig",
}
# by the code of Cohere 2, by OLMo-core's `no_global_rope`
NO_ROPE_WITHOUT_A_WINDOW = ("cohere2", "olmo3_gnope")
WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
WITHOUT_ROPE = ("linear_attention", "hybrid_sliding", "hybrid")


class Layer(NamedTuple):
    base: float | None  # of RoPE; none without it
    turning: float  # share of channels
    fastest: bool  # whether those are the fastest ones
    windowed: bool


def released(preset: str, number: int) -> Layer:
    """Return what a layer of the released model does."""
    config_class = getattr(third_party("transformers"), CONFIGS[preset])
    config = config_class(num_hidden_layers=LAYERS)
    kind = config.layer_types[number]
    windowed = kind in WINDOWED
    if preset in NO_ROPE_WITHOUT_A_WINDOW:
        has_rope = windowed
    elif hasattr(config, "no_rope_layers"):
        has_rope = config.no_rope_layers[number]
    else:
        has_rope = kind not in WITHOUT_ROPE
    if not has_rope:
        return Layer(None, 1.0, False, windowed)

    rope = config.rope_parameters.get(kind, config.rope_parameters)
    turning = rope.get("partial_rotary_factor", 1.0)
    if preset == "mistral_large4":
        turning = config.qk_rope_head_dim / config.qk_head_dim
    fastest = rope["rope_type"] == "proportional"
    return Layer(rope["rope_theta"], turning, fastest, windowed)


def configured(entry: dict[str, Any]) -> Layer:
    """Return what an entry of a preset says, looked for inside its wrappers."""
    name = entry["name"]
    options = encodings.options_of(name) | entry
    while "inner" in options:
        name = options["inner"]
        options = encodings.options_of(name) | options["inner_options"]
    windowed = entry.get("window") is not None
    turning = options.get("fraction", 1.0)
    fastest = name == "p_rope"
    return Layer(options.get("base"), turning, fastest, windowed)


def test_every_preset_is_compared():
    presets = {path.stem for path in FOLDER.glob("*.yaml")}
    # no package has SWAN; the defaults of Step3p7TextConfig have no pattern of layers
    assert presets == {*CONFIGS, "swan", "step3_5"}


@pytest.mark.parametrize("preset", CONFIGS)
# MiMo's first layer stands beside its pattern
@pytest.mark.parametrize("number", range(1, LAYERS))
def test_a_layer_does_what_that_of_the_released_model_does(preset, number):
    file = FOLDER / f"{preset}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    entries = content["layers"]
    ours = configured(entries[number % len(entries)])
    theirs = released(preset, number)
    # 0.334 of MiMo's channels turn
    near = 0.05 if preset == "mimo_v2" else 0
    assert ours.base == theirs.base
    assert ours.turning == pytest.approx(theirs.turning, abs=near)
    assert ours.fastest == theirs.fastest
    assert ours.windowed == theirs.windowed
