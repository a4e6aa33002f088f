"""Presets of `layered`: which layer of a released model turns what and has a window, by
its configuration.
"""

from typing import Any

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
}
# by the code of Cohere 2, by OLMo-core's `no_global_rope`
NO_ROPE_WITHOUT_A_WINDOW = ("cohere2", "olmo3_gnope")
# base of RoPE, share of channels that turn, the fastest?, window?
Layer = tuple[float | None, float, bool, bool]


def released(preset: str) -> list[Layer]:
    config = getattr(third_party("transformers"), CONFIGS[preset])(
        num_hidden_layers=LAYERS
    )
    layers: list[Layer] = []
    for number, kind in enumerate(config.layer_types):
        windowed = kind in ("sliding_attention", "chunked_attention")
        rope = config.rope_parameters.get(kind, config.rope_parameters)
        turning = rope.get("partial_rotary_factor", 1.0)
        if preset == "mistral_large4":
            turning = config.qk_rope_head_dim / config.qk_head_dim
        has_rope = (
            windowed
            if preset in NO_ROPE_WITHOUT_A_WINDOW
            else getattr(config, "no_rope_layers", {number: 1})[number]
        )
        proportional = rope["rope_type"] == "proportional"
        layers.append(
            (rope["rope_theta"], turning, proportional, windowed)
            if has_rope
            else (None, 1.0, False, windowed)
        )
    return layers


def configured(entry: dict[str, Any]) -> Layer:
    name, options = entry["name"], encodings.options_of(entry["name"]) | entry
    while "inner" in options:
        name = options["inner"]
        options = encodings.options_of(name) | options["inner_options"]
    return (
        options.get("base"),
        options.get("fraction", 1.0),
        name == "p_rope",
        entry.get("window") is not None,
    )


@pytest.mark.parametrize("preset", CONFIGS)
def test_layers_do_what_those_of_the_released_model_do(preset):
    # no package has swan
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*CONFIGS, "swan"}
    entries = yaml.safe_load((FOLDER / f"{preset}.yaml").read_text(encoding="utf-8"))[
        "layers"
    ]
    theirs = released(preset)
    # MiMo's first layer stands beside its pattern, and 0.334 of its channels turn
    for layer in range(1, LAYERS):
        base, turning, *rest = configured(entries[layer % len(entries)])
        assert (base, *rest) == (theirs[layer][0], *theirs[layer][2:])
        assert turning == pytest.approx(
            theirs[layer][1], abs=0.05 * (preset == "mimo_v2")
        )
