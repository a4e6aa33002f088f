"""Presets of `layered`: which layer of a released model does what, by its configuration and its attention's code."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from oracles import third_party

from posbench import encodings
from posbench.config.shipped import configs_dir

FOLDER = configs_dir() / "encoding" / "layered"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
LAYERS = 12
SMALL = {"num_hidden_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a layer does with positions."""

    base: float | None  # of RoPE; None = no positions
    windowed: bool
    turning: float = 1.0  # share of the channels
    slowest_stand: bool = False  # those that do not turn are the slowest pairs, with the frequencies of the whole head
    temperature: str | None = None
    sinks: bool = False


def config_of(name: str, **options: Any) -> Any:
    return getattr(third_party("transformers"), name)(**SMALL, **options)


def layers_of(model: str, config: Any, attention: str) -> list[Any]:
    """The attention of each layer of a model of transformers."""
    code = third_party(f"transformers.models.{model}.modeling_{model}")
    with torch.device("meta"):
        return [getattr(code, attention)(config, layer) for layer in range(LAYERS)]


def smollm3() -> list[Layer]:
    config = config_of("SmolLM3Config")
    base, made = config.rope_parameters["rope_theta"], layers_of("smollm3", config, "SmolLM3Attention")
    return [Layer(base if layer.use_rope else None, layer.sliding_window is not None) for layer in made]


def cohere2() -> list[Layer]:  # its attention turns q and k where it has a window
    config = config_of("Cohere2Config")
    base, made = config.rope_parameters["rope_theta"], layers_of("cohere2", config, "Cohere2Attention")
    return [Layer(base if layer.sliding_window else None, layer.sliding_window is not None) for layer in made]


def llama4() -> list[Layer]:
    config = config_of("Llama4TextConfig", head_dim=8)
    base, made = config.rope_parameters["rope_theta"], layers_of("llama4", config, "Llama4TextAttention")
    assert all(layer.attn_temperature_tuning and layer.attn_scale == 0.1 for layer in made)
    windows = [kind == "chunked_attention" for kind in config.layer_types]
    return [
        Layer(base, windowed) if layer.use_rope else Layer(None, windowed, temperature="llama4")
        for layer, windowed in zip(made, windows, strict=True)
    ]


def mistral_large4() -> list[Layer]:
    config = third_party("transformers").MistralLarge4TextConfig(num_hidden_layers=LAYERS)
    turning, base = config.qk_rope_head_dim / config.qk_head_dim, config.rope_parameters["rope_theta"]
    plain = Layer(None, False, temperature="mistral_large4")
    return [Layer(base, False, turning, temperature="mistral_large4") if on else plain for on in config.no_rope_layers]


def by_type(config: Any) -> list[Layer]:
    """Of models whose configuration has the rotation and the window of each type of layer."""
    layers = []
    for kind in config.layer_types:
        rope, windowed = config.rope_parameters[kind], kind == "sliding_attention"
        slowest = rope["rope_type"] == "proportional"
        layers.append(Layer(rope["rope_theta"], windowed, rope.get("partial_rotary_factor", 1.0), slowest))
    return layers


def olmo3_gnope() -> list[Layer]:  # OLMo-core's `no_global_rope` takes RoPE from the layers without a window
    return [layer if layer.windowed else Layer(None, False) for layer in by_type(config_of("Olmo3Config"))]


def gpt_oss() -> list[Layer]:
    config = config_of("GptOssConfig", head_dim=8)
    base, made = config.rope_parameters["rope_theta"], layers_of("gpt_oss", config, "GptOssAttention")
    return [Layer(base, one.sliding_window is not None, sinks=hasattr(one, "sinks")) for one in made]


def mimo_v2() -> list[Layer]:
    """Without the first layer, which sees all beside the pattern; 0.375 of our heads' channels are near theirs."""
    config = third_party("transformers").MiMoV2FlashConfig(num_hidden_layers=LAYERS)
    ropes = config.rope_parameters
    assert config.layer_types[0] == "full_attention" and ropes["full_attention"]["partial_rotary_factor"] == 0.334
    made = layers_of("mimo_v2_flash", config, "MiMoV2FlashAttention")
    layers = [
        Layer(ropes[kind]["rope_theta"], kind == "sliding_attention", 0.375, sinks=one.sinks is not None)
        for kind, one in zip(config.layer_types, made, strict=True)
    ]
    return [layers[1], *layers[1:]]


def swan() -> list[Layer]:
    """No package has it: one global layer before every three local ones, by the paper, with our base."""
    return [Layer(10000.0, True) if layer % 4 else Layer(None, False, temperature="logn") for layer in range(LAYERS)]


RELEASED: dict[str, Callable[[], list[Layer]]] = {
    **{each.__name__: each for each in (smollm3, cohere2, llama4, mistral_large4, olmo3_gnope, gpt_oss, mimo_v2, swan)},
    "olmo3": lambda: by_type(config_of("Olmo3Config")),
    "gemma3": lambda: by_type(config_of("Gemma3TextConfig")),
    "gemma4": lambda: by_type(config_of("Gemma4TextConfig")),
}


def said(entry: dict[str, Any]) -> Layer:
    """What an entry of a preset says, with the defaults of its encoding."""
    name, windowed = entry["name"], entry.get("window") is not None
    options = encodings.options_of(name) | entry
    temperature, sinks = options.get("rule"), name == "learned_sinks"
    while "inner" in options:
        name = options["inner"]
        options = encodings.options_of(name) | options["inner_options"]
    if name == "none":
        return Layer(None, windowed, temperature=temperature)
    return Layer(options["base"], windowed, options.get("fraction", 1.0), name == "p_rope", temperature, sinks)


@pytest.mark.parametrize("preset", PRESETS)
def test_layers_do_what_those_of_the_released_model_do(preset: str) -> None:
    content = yaml.safe_load((FOLDER / f"{preset}.yaml").read_text(encoding="utf-8"))
    entries = content["layers"]
    assert content["name"] == "layered" and content.keys() == {"name", "layers"}
    assert [said(entries[layer % len(entries)]) for layer in range(LAYERS)] == RELEASED[preset]()
