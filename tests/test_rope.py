"""`posbench rope`: frequencies beside those of transformers' rotary modules, refusals,
and the command.
"""

import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TINY, posbench, write_text
from torch.testing import assert_close

from posbench.encodings.rope import frequencies
from posbench.errors import Undefined, UserError
from posbench.rope.command import (
    Read,
    compare_ropes,
    describe,
    of_settings,
    ropes_of,
    stretch_words,
)
from posbench.rope.engines import notes_on
from posbench.rope.extension import extension
from posbench.rope.overrides import joined_words, overridden
from posbench.rope.reading import (
    Rope,
    bound_by_base,
    by_paper_if_other,
    configuration,
    findings,
    first_difference,
    in_short,
    reading,
    ropes,
)
from posbench.rope.traced import model_class
from posbench.show import rope_picture

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
ORIGINAL = {"original_max_position_embeddings": 128}
LONG = {
    "short_factor": [1.0] * 7 + [1.5],
    "long_factor": [1, 1, 1.5, 2, 2.5, 3, 4, 4.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **ORIGINAL,
}
LONGROPE = {"rope_type": "longrope", **LONG, **ORIGINAL}
SECTIONS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "truncate": False, "attention_factor": 1.5},
    LLAMA3,
    LONGROPE,
    {**LONGROPE, "factor": 6.0, "attention_factor": 1.1},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


def read(settings: dict[str, Any]) -> list[Rope]:
    """Return what `posbench rope` reads from a config.json."""
    return ropes(configuration(settings))


def not_read(settings: dict[str, Any]) -> list[str]:
    """Return what `posbench rope` says of keys that are not read."""
    return findings(settings, reading(configuration(settings)))[1]


def compared(first: list[Rope], second: list[Rope]) -> list[str]:
    """Return the lines on where two differ, without their heading."""
    a, b = Read("a", first, [], []), Read("b", second, [], [])
    _, _, *lines = compare_ropes(a, b)
    return lines


def scaled(section: dict[str, Any]) -> dict[str, Any]:
    """Return a small Llama's config.json with this `rope_scaling`."""
    return {**LLAMA, "rope_scaling": section}


def one(settings: dict[str, Any]) -> Rope:
    """Return the RoPE of a config.json whose layers all have the same."""
    (rope,) = read(settings)
    return rope


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_frequencies_at_every_length_are_those_of_the_librarys_functions(section):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    function = ROPE_INIT_FUNCTIONS[section["rope_type"]]
    config = transformers.LlamaConfig(**LLAMA, rope_scaling=dict(section))
    cpu = torch.device("cpu")
    rope = one(scaled(section))
    # a longer input first: what it leaves behind must not count
    for length in (2000, 512, 129, 64):
        f, factor = function(config, cpu, seq_len=length)
        ours, our_factor = rope.at(length)
        in_fp32 = ours.float()
        assert_close(in_fp32, f, rtol=1e-6, atol=1e-9)
        assert our_factor == pytest.approx(factor)


LONGEST = [
    ({"rope_type": "dynamic", "factor": 2.0}, 512, 1024),
    (YARN, 128, 512),
    (LLAMA3, 128, 1024),
    (LONGROPE, 128, 512),
    ({**LONGROPE, "factor": 6.0}, 128, 768),
]


@pytest.mark.parametrize(("section", "train_length", "longest"), LONGEST, ids=str)
def test_the_longest_input_is_that_of_the_configuration_or_of_the_factor(
    section, train_length, longest
):
    rope = one(scaled(section))
    assert rope.train_length == train_length
    assert rope.longest == longest


SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "intermediate_size": 64,
    "vocab_size": 64,
    "pad_token_id": 0,
}
KINDS = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 20,
}
MLA = {
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
STEEP = {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
WHOLE = {**HALF, "partial_rotary_factor": 1.0}
QUARTER = {**HALF, "rope_type": "proportional", "partial_rotary_factor": 0.25}
# By model_type: the library's rotary module, and a configuration as authors spell it.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "mistral": ("Mistral", {"rope_theta": 1e6, "sliding_window": 20}),
    "qwen2": ("Qwen2", {"rope_theta": 1e6, "rope_scaling": YARN}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25, "rotary_emb_base": 5000}),
    "phi": ("Phi", {"rope_theta": 1e4}),
    "phi3": ("Phi3", {"rope_theta": 1e4, "rope_scaling": LONGROPE, **ORIGINAL}),
    "glm": ("Glm", {"rope_theta": 1e4}),
    "glm4": ("Glm4", {"rope_parameters": HALF}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "gemma2": ("Gemma2", KINDS),
    "gemma3_text": (
        "Gemma3",
        {
            **KINDS,
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3n_text": (
        "Gemma3n",
        {
            **KINDS,
            "num_kv_shared_layers": 0,
            "rope_theta": 1e6,
            "rope_local_base_freq": 5e3,
        },
    ),
    "gemma4_text": (
        "Gemma4Text",
        {
            **KINDS,
            "global_head_dim": 32,
            "rope_parameters": {"sliding_attention": WHOLE, "full_attention": QUARTER},
        },
    ),
    "olmo3": ("Olmo3", {**KINDS, "rope_theta": 5e5, "rope_scaling": YARN}),
    "gpt_oss": (
        "GptOss",
        {
            **KINDS,
            "rope_theta": 1.5e5,
            "rope_scaling": {**YARN, "truncate": False},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **MLA,
            "rope_theta": 1e4,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "llama4_text": (
        "Llama4Text",
        {"rope_theta": 5e5, "no_rope_layers": [], "rope_scaling": STEEP},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention"] * 3,
            "rope_parameters": HALF,
        },
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {
            "rope_theta": 1e4,
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
    ),
}


def published(kind: str) -> dict[str, Any]:
    """Return a published configuration, of a small model."""
    return {**SIZES, "model_type": kind, **PUBLISHED[kind][1]}


def rotations(
    settings: dict[str, Any], class_name: str, layers: str | None, length: int
) -> torch.Tensor:
    """Return the complex factors by which the library's module turns the pairs at
    position 1 of an input.
    """
    copied = json.loads(json.dumps(settings))
    config = transformers.AutoConfig.for_model(**copied)
    module = type(config).__module__
    name = module.replace("configuration", "modeling")
    modeling = importlib.import_module(name)
    rotary_class = getattr(modeling, f"{class_name}RotaryEmbedding")
    rotary = rotary_class(config=config)
    positions = torch.tensor([[1, length - 1]])
    if layers:
        turned = rotary(torch.zeros(1), positions, layers)
    else:
        turned = rotary(torch.zeros(1), positions)
    if torch.is_tensor(turned):  # Llama 4
        return turned[0, 0]
    cos, sin = turned
    halves = cos.shape[-1] // 2
    if len(cos[0, 0].unique()) > halves:  # GPT-OSS has each once
        halves = cos.shape[-1]
    return torch.complex(cos, sin)[0, 0, :halves]


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_configuration_means_what_the_models_own_rotary_module_computes(kind):
    class_name, _ = PUBLISHED[kind]
    settings = published(kind)
    for rope in read(settings):
        for length in (64, 3000):
            theirs = rotations(settings, class_name, rope.key, length)
            f, factor = rope.at(length)
            ones = torch.ones_like(f)
            ours = factor * torch.polar(ones, f)
            ours = ours.to(theirs.dtype)
            assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


BASES = [("gemma3_text", 1e6, 1e4), ("olmo3", 5e5, 5e5)]


@pytest.mark.parametrize(("kind", "base", "base_of_sliding"), BASES)
def test_kinds_of_layers_have_their_own_bases_and_windows(kind, base, base_of_sliding):
    full, sliding = read(published(kind))
    assert full.layers == "full_attention"
    assert full.base == base
    assert full.window is None
    assert sliding.layers == "sliding_attention"
    assert sliding.base == base_of_sliding
    assert sliding.window == (20, False)


WIDTHS = [
    ("glm", 8),
    ("phi", 8),
    ("gpt_neox", 4),
    ("stablelm", 8),
]


@pytest.mark.parametrize(("kind", "width"), WIDTHS)
def test_the_share_of_a_head_that_turns_is_the_classs_or_that_of_the_file(kind, width):
    rope = one(published(kind))
    assert rope.width == width


def test_channels_that_stand_still_are_not_said_to_turn():
    full, _ = read(published("gemma4_text"))
    lines = describe("gemma", [full], [])
    assert "8 channels of a head turn" in "\n".join(lines)


def test_a_window_to_both_sides_is_a_window():
    settings = {**SIZES, "model_type": "modernbert", "local_attention": 20}
    full, sliding = read({**settings, "global_attn_every_n_layers": 2})
    assert full.window is None
    # the token itself, and 10 on either side
    assert sliding.window == (11, False)


def test_the_base_is_not_guessed_from_an_odd_number_of_channels():
    """Half of a head of 42 channels is 21, of which the module makes 11 pairs."""
    rope = one({"model_type": "glm4_moe", "num_hidden_layers": 2})
    assert rope.base == 1e4


def test_mamba_beside_attention_is_no_layer_of_its_own():
    types = ["mamba", "hybrid", "mamba"]
    settings = {"model_type": "zamba2", "use_mem_rope": True, "num_hidden_layers": 3}
    config = configuration({**settings, "layers_block_type": types})
    read = reading(config)
    (rope,), others = read.ropes, read.others
    assert rope.share == "1 of 3 layers (1)"
    assert "2 of 3 layers (0, 2): no attention" in others[0]


CAUSAL = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
# What their classes leave to a file.
COMPLETED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"topk_group": 1, "n_group": 1, "num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "recurrent_gemma": {"max_position_embeddings": 8192},
    "zamba2": {"use_mem_rope": True},
}
NO_ROPE = [
    "bart",
    "bert",
    "bert-generation",
    "big_bird",
    "bigbird_pegasus",
    "biogpt",
    "blenderbot",
    "blenderbot-small",
    "bloom",
    "camembert",
    "codegen",
    "cpmant",
    "ctrl",
    "data2vec-text",
    "electra",
    "ernie",
    "falcon_mamba",
    "git",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "granitemoehybrid",
    "inkling2_text",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "mamba",
    "mamba2",
    "marian",
    "mbart",
    "megatron-bert",
    "mpt",
    "mvp",
    "nemotron_h",
    "openai-gpt",
    "opt",
    "pegasus",
    "plbart",
    "prophetnet",
    "reformer",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "rwkv",
    "whisper",
    "xglm",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlnet",
    "xlstm",
    "xmod",
    "zamba",
]
# Their classes give no model, even of a whole file, or none whose layers are known.
UNTRIED = [
    "cohere_compass_text",
    "dbrx",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "gpt_neox_japanese",
    "musicgen",
    "musicgen_melody",
    "qwen4_exp",
    "qwen4_exp_text",
    "trocr",
]
WITH_ROPE = sorted({*CAUSAL} - {*NO_ROPE} - {*UNTRIED})
# By kind: its layers with attention and no RoPE, from the defaults of its class.
NOPE = {
    # in every fourth, attention is full
    "afmoe": 32 // 4,
    "cohere2": 40 // 4,
    "cohere2_moe": 40 // 4,
    "exaone4": 32 // 4,
    "exaone_moe": 32 // 4,
    # no_rope_layer_interval is 4
    "llama4": 48 // 4,
    "llama4_text": 48 // 4,
    "smollm3": 36 // 4,
    # every fifth
    "kolibri1": 50 // 5,
    # every sixth, and the last
    "beam": 52 // 6 + 1,
    # the first, every fourth from the second on, and the last
    "flint": len({0, *range(1, 49, 4), 48}),
}
# Layers of those whose `num_hidden_layers` is another number, or in no one place.
LAYERS = {
    # of the parts: encoder, decoder, global transformer, patcher
    "blt": 1 + 9 + 25 + 14,
    # two stacks, each run several times
    "hrm_text": 2 * 16,
    # each has two attentions
    "longcat_flash": 28,
    # 8 of its `cross_attention_layers` attend to the image alone
    "mllama": 40 - 8,
}


def number_in(share: str) -> int:
    """Return the layers in words such as `full_attention, 8 of 32 layers: no RoPE`."""
    return int(re.findall(r"(\d+)(?: of \d+)? layers", share)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_ROPE)
def test_every_causal_kind_with_rope_is_read_as_its_module_and_its_layers(kind):
    config = configuration({"model_type": kind, **COMPLETED.get(kind, {})})

    read = reading(config)
    every_rope, others = read.ropes, read.others

    counts = dict.fromkeys((rope.layers, rope.share) for rope in every_rope)
    n_rotated = sum(number_in(share) for _, share in counts)
    n_others = sum(map(number_in, others))
    n_layers = LAYERS.get(kind) or config.num_hidden_layers
    assert n_rotated + n_others == n_layers
    nope = [number_in(line) for line in others if "no RoPE" in line]
    assert sum(nope) == NOPE.get(kind, 0)
    modeling = sys.modules[model_class(config).__module__]
    names = [name for name in vars(modeling) if name.endswith("RotaryEmbedding")]
    own = [name for name in names if "Vision" not in name]
    rotary_class = getattr(modeling, min(own, key=len))
    for rope in every_rope:
        if rope.layers and kind != "smollm3":  # its layers are all full_attention
            kinds = rope.layers.removesuffix(" (and a compressed past)").split(" and ")
            of_type = map(config.layer_types.count, kinds)
            assert sum(of_type) == number_in(rope.share)
        if rope.type == "default":
            of_base = frequencies(rope.width, rope.base)
            assert_close(rope.at(512)[0], of_base, rtol=1e-5, atol=1e-9)
        if kind != "blt":  # its parts have configurations of their own
            module = rotary_class(config=config)
            f = getattr(module, f"{rope.key}_inv_freq" if rope.key else "inv_freq")
            assert_close(rope.at(512)[0].float(), f, rtol=1e-5, atol=1e-9)
        if rope.layers == "sliding_attention":
            assert rope.window is not None
            assert abs(rope.window[0] - config.sliding_window) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", NO_ROPE)
def test_every_causal_kind_without_rope_is_refused_by_name(kind):
    config = configuration({"model_type": kind})
    with pytest.raises(Undefined, match=f"'{config.model_type}' has no RoPE"):
        ropes(config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNTRIED)
def test_every_causal_kind_that_cannot_be_tried_is_refused_in_one_line(kind):
    with pytest.raises(UserError) as refusal:
        ropes(configuration({"model_type": kind}))
    assert "\n" not in str(refusal.value)


NUMBERS = [
    "partial_rotary_factor",
    "rope_local_base_freq",
    "global_rope_theta",
    "compress_rope_theta",
    "rotary_emb_base",
    "rotary_pct",
    "rotary_dim",
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lama"}, "unknown model_type 'lama': did you mean 'llama'"),
    ({"model_type": "biogpt"}, "'biogpt' has no RoPE"),
    ({"model_type": "granitemoehybrid"}, "'granitemoehybrid' has no RoPE"),
    ({"model_type": "falcon", "alibi": True}, "'falcon' has no RoPE"),
    ({**LLAMA, "model_type": "smollm3", "no_rope_layers": [0, 0]}, "no layer hears"),
    (scaled({**YARN, "rope_type": "yarm"}), "did you mean 'yarn'"),
    ({**LLAMA, "rope_theta": "1e4"}, "rope_theta is '1e4': expected a number"),
    *[({**LLAMA, key: "1"}, f"{key} is '1': expected a ") for key in NUMBERS],
    (scaled({**YARN, "factor": "4"}), "factor is '4': expected a number"),
    (scaled({"rope_type": "yarn", "facter": 4}), "facter is not read: did"),
    ({**LLAMA, "hidden_size": "64"}, "expected int, got str"),
    (scaled({"rope_type": None, "factor": 4.0}), "unknown rope_type 'None'"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_a_wrong_configuration_is_refused_in_one_line(settings, message):
    with pytest.raises(UserError, match=message) as refusal:
        read(settings)
    assert "\n" not in str(refusal.value)


NOT_READ = [
    ({"rope_scaling": {**YARN, "yarn_beta_fast": 8}}, "did you mean 'beta_fast'"),
    ({"rope_pct": 0.5}, "not read by transformers' 'llama': rope_pct"),
    ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor"),
    ({"partial_rotary_factor": 0.5, "head_dim": 32, "swa": 1}, "swa"),
    ({"alpha": 2.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, ""),
    ({"rope_scaling": {**LONGROPE, "beta_fast": 8}}, "rope_scaling.beta_fast"),
    ({"sliding_window": 64}, "sliding_window"),
    ({"rope_parameters": {**YARN}, "rope_scaling": {**YARN}}, "rope_parameters.factor"),
]


@pytest.mark.parametrize(("others", "line"), NOT_READ, ids=str)
def test_a_key_whose_change_moves_nothing_is_named(others, line):
    lines = not_read({**LLAMA, **others})
    assert line in " ".join(lines)


def test_an_outer_base_beside_the_defaults_of_a_class_is_named():
    (line,) = not_read(
        {"model_type": "apertus", "num_hidden_layers": 2, "rope_theta": 2e4}
    )
    assert line == "not read by transformers' 'apertus': rope_theta"


def test_a_type_of_a_section_that_is_not_read_is_named():
    """Llama has one RoPE for all kinds of layers."""
    part = {"rope_type": "default", "rope_theta": 1e6}
    for settings in (
        {**LLAMA, "rope_parameters": {"full_attention": part}},
        {**LLAMA, "rope_scalling": part},
    ):
        assert ".rope_type" in " ".join(not_read(settings))
    assert not_read(scaled({"rope_type": "default"})) == []
    assert not_read(scaled(YARN)) == []


def test_a_length_outside_the_language_model_is_named():
    text = {**published("gemma3_text"), "max_position_embeddings": 64}
    settings = {"model_type": "gemma3", "text_config": text}

    (line,) = not_read({**settings, "max_position_embeddings": 999})

    assert line.endswith("'gemma3': max_position_embeddings")


def test_a_misspelt_length_is_named():
    lines = not_read({**LLAMA, "max_position_embedings": 64})
    assert "max_position_embedings" in " ".join(lines)


def test_what_only_images_read_is_not_called_unread():
    section = {"rope_type": "default", "mrope_section": [4, 2, 2]}
    lines = not_read({**LLAMA, "rope_parameters": section})
    assert lines == [
        "nothing for text alone: rope_parameters.mrope_section=[3 numbers from 2 to 4,"
        " mean 2.666667]"
    ]


def test_rounding_does_not_hide_that_yarn_reads_its_borders():
    """A tenth more of beta_fast is the same pair, since YaRN rounds."""
    assert not_read(scaled({**YARN, "beta_fast": 32, "beta_slow": 1})) == []


KINDS_OF_LISTS = [
    ("layer_types", ["full_attention", "sliding_attention"] * 3),
    ("sliding_window", 24),
]


@pytest.mark.parametrize(("key", "value"), KINDS_OF_LISTS)
def test_another_mask_is_a_change(key, value):
    settings = published("gemma2")
    before = read(settings)

    after = read({**settings, key: value})

    assert [rope.share for rope in before] != [rope.share for rope in after] or [
        rope.window for rope in before
    ] != [rope.window for rope in after]
    assert key not in " ".join(not_read(settings))


WRONG_VALUES = [
    ({"rope_theta": float("nan")}, "rope_theta is NaN: expected a number above 0"),
    ({"rope_theta": float("inf")}, "rope_theta is Infinity: expected a number"),
    ({"rope_theta": -1e4}, "rope_theta is -10000.0: expected a number above 0"),
    ({"rope_theta": True}, "rope_theta is true: expected a number above 0"),
    ({"rope_theta": [1e4]}, "rope_theta is .10000.0.: expected a number above 0"),
    ({"rope_scaling": [YARN]}, "rope_scaling is .*: expected keys and values"),
    ({"rope_scaling": "yarn"}, "rope_scaling is .yarn.: expected keys and values"),
    ({"rope_scaling": {**YARN, "factor": -4.0}}, "factor is -4.0: expected a number"),
    ({"rope_scaling": {**YARN, "factor": 0}}, "factor is 0: expected a number above"),
    ({"rope_scaling": {**YARN, "mscale": -1}}, "mscale is -1: expected a number, 0"),
    ({"rope_scaling": {**YARN, "factor": {"a": 4}}}, "factor is .*: expected a number"),
    (
        {"rope_scaling": {**YARN, "truncate": "false"}},
        "truncate is 'false': expected t",
    ),
    ({"max_position_embeddings": 0.5}, "max_position_embeddings is 0.5: expected a wh"),
    (
        {"max_position_embeddings": -1},
        "max_position_embeddings is -1: expected a whole",
    ),
    (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings is 0: expected a whole number above 0",
    ),
    (
        {"rope_scaling": {**LONGROPE, "long_factor": 8 * [0]}},
        "long_factor is .*: expected numbers above 0",
    ),
    ({"text_config": [1]}, "text_config is .1.: expected keys and values"),
    (
        {"rope_scaling": {**LONGROPE, "long_factor": [1, float("nan")]}},
        "long_factor is .*: expected numbers that are not negative",
    ),
    ({"rope_scaling": {**YARN, "type": "linear"}}, "two answers, .* expected one type"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
        "two answers, .* expected one base",
    ),
]


@pytest.mark.parametrize(("others", "message"), WRONG_VALUES, ids=str)
def test_a_value_that_no_model_has_is_refused_with_its_key(others, message):
    with pytest.raises(UserError, match=message) as refusal:
        configuration({**LLAMA, **others})
    assert "\n" not in str(refusal.value)


def test_a_trained_length_with_a_point_is_shown_without():
    rope = one(scaled({**YARN, "original_max_position_embeddings": 128.0}))
    lines = describe("a", [rope], [])
    assert "at 128 and 512 tokens" in "\n".join(lines)


def test_a_file_that_is_a_set_of_overrides_says_where_they_belong():
    with pytest.raises(UserError, match=r"no model_type: .* typed after one"):
        configuration({"rope_parameters": YARN})


def test_a_section_that_is_null_is_no_section():
    (rope,) = read({**LLAMA, "rope_scaling": None})
    assert rope.type == "default"


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_the_librarys_types_are_those_of_their_papers(section):
    rope = one(scaled(section))
    for length in (64, 129, 2000):
        assert by_paper_if_other(rope, length) is None


def test_a_trained_length_that_the_library_does_not_read_is_told():
    """Its `dynamic` starts at max_position_embeddings."""
    section = {"rope_type": "dynamic", "factor": 2.0, **ORIGINAL}
    rope = one(scaled(section))
    assert by_paper_if_other(rope, 128) is None
    assert by_paper_if_other(rope, 512) is not None


def test_a_class_that_never_uses_the_long_divisors_is_told():
    """Phi-3.5-MoE's module calls its own function without a length."""
    section = {"type": "longrope", **LONG, "short_mscale": 1.2, "long_mscale": 1.2}
    settings = {
        **LLAMA,
        "model_type": "phimoe",
        "rope_scaling": {**section, **ORIGINAL},
    }

    found = " ".join(of_settings("a", settings).lines)

    assert "it never uses the long divisors" in found
    assert "slowed 4 times" in found
    assert "rope_scaling.long_factor" in found


def test_code_of_the_authors_is_named_and_not_run():
    settings = {**LLAMA, "auto_map": {"AutoModel": "modeling_mine.Mine"}}
    assert "auto_map names code" in " ".join(of_settings("a", settings).lines)


OVERRIDES = [
    "rope_parameters.rope_type=yarn rope_scaling.factor=4"
    " rope_parameters.original_max_position_embeddings=128",
    "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 128",
    "--rope-scaling=yarn --rope-freq-scale=0.25 --yarn-orig-ctx=128",
    "llama.rope.scaling.type=yarn llama.rope.scaling.factor=4"
    " llama.rope.scaling.original_context_length=128",
    "--override-kv llama.rope.scaling.type=str:yarn --override-kv"
    " llama.rope.scaling.factor=float:4 --override-kv"
    " llama.rope.scaling.original_context_length=int:128",
]


@pytest.mark.parametrize("words", OVERRIDES)
def test_engines_spell_one_override_in_their_own_words(words):
    settings = overridden(LLAMA, joined_words(words.split()))
    assert turn_alike(one(settings), one(scaled(YARN)))


def test_a_json_replaces_the_section_as_engines_do():
    given = json.dumps({"rope_parameters": {**YARN, "rope_theta": 2e4}})
    before = {**LLAMA, "rope_theta": 2e4, "rope_scaling": LLAMA3}

    settings = overridden(before, joined_words(["--hf-overrides", given]))

    (rope,) = read(settings)
    assert rope.type == "yarn"
    assert "low_freq_factor" not in rope.parameters


@pytest.mark.parametrize("part", ["", "text_config."])
def test_a_path_names_the_section_that_is_there(part):
    settings = {"model_type": "gemma3", "text_config": published("gemma3_text")}
    full, _ = read(overridden(settings, [f"{part}rope_parameters.factor=2"]))
    f, _ = full.at(64)
    assert stretch_words(full, f) == "pairs 0 to 7 slowed 2 times"


SAME_BASE = [
    "rope_parameters.rope_theta=5e5",
    'rope_parameters={"rope_theta": 5e5, "rope_type": "default"}',
    '{"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}',
]


@pytest.mark.parametrize("word", SAME_BASE)
def test_a_base_that_is_typed_into_the_section_replaces_the_one_beside_it(word):
    assert one(overridden(scaled(YARN), joined_words([word]))).base == 5e5


def test_a_section_is_taken_away_by_either_of_its_names():
    settings = overridden(scaled(YARN), ["rope_parameters=null"])
    assert one(settings).type == "default"


def test_a_scale_without_a_type_is_linear_as_in_llama_cpp():
    (rope,) = read(overridden(LLAMA, joined_words(["--rope-scale", "4"])))
    assert rope.type == "linear"


FLAGS_IN_ANY_ORDER = [
    "--rope-scaling yarn --rope-scale 4 --yarn-attn-factor 2",
    "--yarn-attn-factor 2 --rope-scale 4 --rope-scaling yarn",
]


@pytest.mark.parametrize("words", FLAGS_IN_ANY_ORDER)
def test_attn_factor_multiplies_yarns_own(words):
    (rope,) = read(overridden(LLAMA, joined_words(words.split())))
    _, factor = rope.at(512)
    _, own = one(scaled({"rope_type": "yarn", "factor": 4.0})).at(512)
    assert factor == pytest.approx(2 * own)


def test_a_scale_is_not_read_without_scaling():
    words = joined_words(["--rope-scaling", "none", "--rope-scale", "4"])
    assert turn_alike(one(overridden(LLAMA, words)), one(LLAMA))


FLAGS_WITHOUT_A_NUMBER = [
    ("--rope-freq-scale 0", "1/factor is 0: expected a number above 0"),
    ("--rope-freq-scale x", "1/factor is 'x': expected a number above 0"),
    ("--yarn-attn-factor x", "attn_factor is 'x': expected a number above 0"),
    ("--rope-scale -4 --yarn-attn-factor 2", "factor is -4: expected a number"),
]


@pytest.mark.parametrize(("words", "message"), FLAGS_WITHOUT_A_NUMBER)
def test_a_flag_to_compute_with_has_a_number(words, message):
    with pytest.raises(UserError, match=message):
        overridden(LLAMA, joined_words(words.split()))


def test_flags_are_for_the_layers_without_a_window():
    text = published("gemma4_text")
    words = joined_words(["--rope-freq-base", "5e5"])
    full, sliding = read(overridden(text, words))
    assert full.base == 5e5
    assert sliding.base == 1e4


def test_notes_on_engines_are_those_of_the_type_and_the_keys():
    notes = notes_on({**YARN, "attention_factor": 1.0})
    assert any("vLLM 0.25" in note and "attention_factor" in note for note in notes)
    assert notes_on({"rope_type": "default"}) == []


def test_a_list_is_shown_by_what_tells_it_from_others():
    assert in_short([1.0, 2.0, 4.5]) == "[3 numbers from 1 to 4.5, mean 2.5]"


def test_a_file_without_the_number_of_key_heads_is_read():
    (rope,) = read(
        {"model_type": "qwen2", "hidden_size": 448, "num_attention_heads": 7}
    )
    assert rope.width == 64


# Keys that authors write, and that the library's classes do not read.
BESIDE = {
    "phi3": "rope_scaling.original_max_position_embeddings",  # the outer one is
    "gemma4_text": "rope_parameters.sliding_attention.partial_rotary_factor",
    "hunyuan_v1_dense": "rope_scaling.factor",  # beside alpha
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", PUBLISHED)
def test_every_key_of_a_published_configuration_is_read(kind):
    expected = []
    if kind in BESIDE:
        expected = [f"not read by transformers' '{kind}': {BESIDE[kind]}"]
    assert not_read(published(kind)) == expected


def test_the_first_pair_that_differs_is_named():
    plain = one(LLAMA)
    yarn = one(scaled(YARN))
    f, _ = plain.at(512)
    g, _ = yarn.at(512)
    place = first_difference(plain, yarn, 512)
    assert place is not None
    position, pair = place
    assert position * abs(f[pair] - g[pair]) > 1e-3
    assert_close(f[:pair], g[:pair], rtol=1e-6, atol=0)  # fp32's cosines and sines


def test_a_configuration_does_not_differ_from_itself():
    rope = one(LLAMA)
    same = one(LLAMA)
    assert first_difference(rope, same, 512) is None


def test_an_encoding_of_posbench_and_a_file_that_say_the_same_turn_alike():
    """The library's frequencies are fp32; ours are fp64."""
    words = ["factor=4", "head_dim=16", "train_length=128"]
    (ours,) = ropes_of("yarn", words).ropes
    theirs = one(scaled(YARN))
    assert first_difference(ours, theirs, 1_000_000) is None
    _, our_factor = ours.at(512)
    _, their_factor = theirs.at(512)
    assert our_factor == pytest.approx(their_factor)


def test_kinds_of_layers_are_compared_each_with_its_own():
    gemma = read(published("gemma3_text"))
    reversed_gemma = gemma[::-1]
    full, sliding = compared(gemma, reversed_gemma)
    assert "turn alike" in full
    assert "turn alike" in sliding


def test_each_kind_of_layer_is_compared_with_the_only_one_of_the_other():
    gemma = read(published("gemma3_text"))
    plain = read({**LLAMA, "max_position_embeddings": 4096})
    full, sliding = compared(gemma, plain)
    assert "turn alike" not in full
    assert "turn alike" in sliding


def test_half_of_a_head_differs_from_all_of_it_in_the_second_pair():
    (whole,) = ropes_of("rope", ["head_dim=16"]).ropes
    (half,) = ropes_of("rope", ["head_dim=8"]).ropes
    assert first_difference(half, whole, 512) == (1, 1)


def test_a_difference_in_short_inputs_alone_is_found():
    stretched = [2.0] * 8
    options = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    options |= {"factor": 4.0, "long_factor": stretched}
    right = one(scaled({**options, "short_factor": [1.0] * 8}))
    wrong = one(scaled({**options, "short_factor": stretched}))
    (line,) = compared([right], [wrong])
    assert "differ from position 1 on, pair 0 first within 128 tokens" in line


def test_a_comparison_says_how_many_layers_and_which_window_each_has():
    gemma = read(published("gemma3_text"))
    plain = read(LLAMA)
    *_, sliding = compared(gemma, plain)
    assert re.search(r"in \d+ of \d+ layers .* and in all 2 layers", sliding)
    assert re.search(r"window of \d+ tokens and no window", sliding)


def test_a_comparison_says_how_much_each_scales_its_queries():
    kind = {"model_type": "ministral3", "num_hidden_layers": 2}
    section = {**YARN, "llama_4_scaling_beta": 0.1}
    first = read({**kind, "rope_parameters": section})
    second = read({**kind, "rope_parameters": {**section, "llama_4_scaling_beta": 0.5}})

    (line,) = compared(first, second)

    # 1 + beta ln(1 + floor(2^20 / 128))
    steps = math.log(1 + 2**20 // 128)
    (said,) = re.findall(r"queries times (.*) and (.*) at position 1,048,576", line)
    assert [float(scale) for scale in said] == pytest.approx(
        [1 + 0.1 * steps, 1 + 0.5 * steps], rel=1e-3
    )


def test_a_comparison_names_layers_in_another_order():
    settings = published("gemma2")
    other = {**settings, "layer_types": settings["layer_types"][::-1]}
    full, _ = compared(read(settings), read(other))
    assert "in 3 of 6 layers (1, 3, 5) and in 3 of 6 layers (0, 2, 4)" in full


def test_a_comparison_names_what_changes_nothing_for_text():
    (rope,) = read(LLAMA)
    other = {**rope.parameters, "mrope_section": [4, 2, 2]}
    (line,) = compared([rope], [dataclasses.replace(rope, parameters=other)])
    assert line.endswith("another mrope_section, which changes nothing for text alone")


def test_a_factor_below_1_is_said_to_turn_faster():
    rope = one(scaled({"rope_type": "linear", "factor": 0.5}))
    f, _ = rope.at(512)
    assert stretch_words(rope, f) == "pairs 0 to 7 2 times as fast"
    yarn = one(scaled({**YARN, "factor": 0.25}))
    f, _ = yarn.at(512)
    assert stretch_words(yarn, f).endswith("4 times as fast")


def test_one_rotation_in_two_spellings_has_one_bound():
    f = frequencies(64, 1e6)
    with_pairs_that_stand_still = torch.cat((f, torch.zeros(32, dtype=f.dtype)))
    assert bound_by_base(with_pairs_that_stand_still, 131_072) == 6235
    assert bound_by_base(f, 131_072) == 6235


@pytest.fixture(scope="module")
def smallest_bases() -> tuple[str, list[str], list[str]]:
    """The line of the page of results on bases, with ours and those of Men et al.
    (2024), Table 2, for heads of 128.
    """
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"RoPE's smallest bases.*", page)
    _, _, ours, theirs, *_ = line.split("|")
    our_bases = re.findall(r"[\d.]+e\d", ours)
    their_bases = re.findall(r"[\d.]+e\d", theirs)
    return line, our_bases, their_bases


def bound_of(base: float, length: int) -> int:
    channels = torch.arange(0, 128, 2, dtype=torch.float64)
    frequencies = base ** (-channels / 128)
    return bound_by_base(frequencies, length)


@pytest.mark.parametrize("number", range(6))
def test_the_smallest_base_of_two_digits_is_that_of_the_page_of_results(
    smallest_bases, number
):
    _, ours, _ = smallest_bases
    smallest = float(ours[number])
    length = 1024 << number
    assert bound_of(smallest, length) == length
    for power in (3, 4, 5):
        for digits in range(10, 100):
            base = float(f"{digits / 10}e{power}")
            if 0.85 * smallest < base < smallest:
                assert bound_of(base, length) < length


def test_the_page_says_how_many_smallest_bases_are_the_papers(smallest_bases):
    line, ours, theirs = smallest_bases
    equal = [a for a, b in zip(ours, theirs, strict=True) if a == b]
    assert f"{len(equal)} of 6 reproduced" in line


def test_a_larger_base_than_the_smallest_may_fail_again():
    assert bound_of(1.05 * 4.3e3, 1024) < 1024


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two configurations of different bases in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("one.json").write_text(json.dumps(LLAMA))
    other = {**LLAMA, "rope_theta": 2e4}
    Path("other.json").write_text(json.dumps(other))
    Path("twice.json").write_text('{"rope_theta": 1, "rope_theta": 2}')
    return tmp_path


def test_overrides_are_compared_with_the_file_as_it_is(files, capsys):
    assert posbench("rope", "one.json", "rope_theta=20000", "lenght=8") == 0
    shown = capsys.readouterr().out
    assert "default, base 20,000" in shown
    assert "without the overrides and with them" in shown
    assert "differ from position 1 on, pair 1 first" in shown


def test_an_encoding_is_described_at_any_length(capsys):
    words = ["yarn", "factor=4", "head_dim=128", "train_length=32768"]
    assert posbench("rope", *words) == 0
    assert "at 32,768 and 131,072 tokens" in capsys.readouterr().out


def test_the_command_compares(files, capsys):
    assert posbench("rope", "one.json", "other.json") == 0
    shown = capsys.readouterr().out
    assert "all layers with RoPE: differ from position 1 on, pair 1 first" in shown


def test_an_encoding_is_described_with_its_options(capsys):
    words = ["yarn", "factor=8", "head_dim=64", "train_length=1024"]

    assert posbench("rope", *words) == 0

    shown = capsys.readouterr().out
    assert "yarn, base 10,000" in shown
    assert "slowed 8 times" in shown


def test_each_encoding_has_the_options_after_it(capsys):
    assert posbench("rope", "rope", "base=500", "rope") == 0

    shown = capsys.readouterr().out
    assert shown.count("default, base 500,") == 1
    assert shown.count("default, base 10,000,") == 1


def test_pairs_that_turn_are_counted_at_the_trained_length():
    rope = one(scaled({"rope_type": "dynamic", "factor": 2.0}))

    lines = describe("a", [rope], [100_000])

    f, _ = rope.at(512)
    n_whole_turns = sum(frequency * 512 >= 2 * torch.pi for frequency in f)
    (line,) = [line for line in lines if "turn once" in line]
    assert line.split()[0] == str(int(n_whole_turns))


WRONG_WORDS = [
    ("one.json --rope-scal yarn", "did you mean '--rope-scale'"),
    ("one.json --rope-scale", "expected a value after it"),
    ("one.json --override-kv llama.rope.freq_base", "KEY=TYPE:VALUE after it"),
    ("one.json --hf-overrides yarn", "overrides are yarn: expected JSON"),
    ("one.json llama.rope.freq_bas=1", "did you mean 'rope.freq_base'"),
    ("one.json llama.attention.sliding_window=8", "unknown GGUF key 'attention.slid"),
    ("twice.json", "the key 'rope_theta' stands there twice"),
    ("yarn train_length=8,16", "train_length is 8,16: expected one whole number"),
    ("layered/gemma3", "no configuration of RoPE"),
    ("one.json length=16x", "expected lengths in tokens"),
    ("one.json length=8 length=9", "length= once"),
    ("one.json other.json yarn", "or two to compare"),
    ("alibi", "no configuration of RoPE"),
    ("xpos", "no configuration of RoPE"),
    ("rop", "did you mean 'rope'"),
    ("none.json", "none.json: no such file"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_WORDS)
def test_wrong_words_are_refused_in_one_line(words, message, files, capsys):
    code = posbench("rope", *words.split())
    assert code == 2
    assert message in capsys.readouterr().err


def test_what_the_library_logs_is_not_printed_beside_its_error(files):
    """It would print all of a Falcon's keys."""
    Path("falcon.json").write_text('{"model_type": "falcon", "head_dim": 64}')
    command = [sys.executable, "-m", "posbench", "rope", "falcon.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRANSFORMERS_VERBOSITY", None)

    done = subprocess.run(command, capture_output=True, text=True, env=environment)

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "head_dim" in line


def test_without_transformers_words_and_runs_are_read_and_a_file_says_what_it_needs(
    files, monkeypatch, capsys
):
    write_text()
    words = [*TINY, "data.path=text.txt", "training.tokens=256"]
    assert posbench("train", "encoding=rope", "encoding.base=500", *words) == 0
    (run,) = Path("outputs").glob("*/rope-*")
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert posbench("rope", str(run), "yarn", "head_dim=8") == 0
    assert "default, base 500, 8 channels" in capsys.readouterr().out

    assert posbench("rope", "one.json") == 2
    assert "pip install 'posbench-runner[hf]'" in capsys.readouterr().err


EXTENSIONS = ["yarn", "ntk", "pi"]


def turn_alike(rope: Rope, other: Rope) -> bool:
    """Return whether two have the same frequencies for an input of 64 tokens."""
    f, _ = rope.at(64)
    g, _ = other.at(64)
    return torch.equal(f, g)


@pytest.mark.sample(3)
@pytest.mark.parametrize("method", EXTENSIONS)
@pytest.mark.parametrize("kind", ["glm4", "mistral"])
def test_an_extension_keeps_the_share_of_a_head_that_turns(kind, method):
    parameters = HALF if kind == "glm4" else WHOLE
    settings = {**SIZES, "model_type": kind, "rope_parameters": parameters}
    before = one(settings)

    (after,) = extended(settings, method)

    assert after.width == before.width
    assert not turn_alike(before, after)


@pytest.mark.sample(3)
@pytest.mark.parametrize("method", EXTENSIONS)
def test_an_extension_leaves_layers_with_a_window_as_they_are(method):
    text = {**SIZES, **KINDS, "model_type": "gemma3_text", "rope_theta": 1e6}
    settings = {"model_type": "gemma3", "text_config": text}
    full, sliding = read(settings)

    new_full, new_sliding = extended(settings, method)

    assert new_full.width == full.width
    assert new_sliding.width == sliding.width
    assert not turn_alike(full, new_full)
    assert turn_alike(sliding, new_sliding)


def extended(settings: dict[str, Any], method: str) -> list[Rope]:
    """Return what an extension by a factor of 2 makes of a config.json."""
    config = configuration(settings)
    train_length = ropes(config)[0].train_length
    length = 2 * train_length
    made = extension(config, method, length, train_length, {"factor": 2.0})
    return ropes(made.config)


def test_the_command_draws(files, capsys):
    assert posbench("rope", "one.json", "other.json", "--png=a.png") == 0

    assert capsys.readouterr().out.endswith("a.png\n")
    assert Path("a.png").stat().st_size > 10_000


def test_a_picture_has_each_curve_and_the_trained_length_once():
    first = read({**LLAMA, "rope_theta": 1e4})
    second = read({**LLAMA, "rope_theta": 2e4})

    figure = rope_picture.picture({"a": first, "b": second}, [64])

    (axes,) = figure.axes
    curves_of_a = 2  # plain, trained: it is drawn as plain
    curves_of_b = 2
    curves = axes.get_lines()
    legend = axes.get_legend()
    assert len(curves) == curves_of_a + curves_of_b
    assert len(legend.get_texts()) == 3
