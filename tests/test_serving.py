"""`posbench rope`: frequencies against transformers, and what engines read otherwise."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import hf_models
import pandas as pd
import pytest
import torch
from support import posbench

from posbench.errors import UserError
from posbench.huggingface.load import with_class_defaults
from posbench.serving.command import compare_ropes, picture, settings_of
from posbench.serving.engines import reach, remarks
from posbench.serving.read import Rope, bound_by_base, ropes, rotating
from posbench.serving.search import ranked

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
BARE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
LLAMA = {**BARE, "max_position_embeddings": 512, "rope_theta": 10000.0}
ORIGINAL = {"original_max_position_embeddings": 128}
LONG = {
    "short_factor": [1.0] * 7 + [1.5],
    "long_factor": [1, 1, 1.5, 2, 2.5, 3, 4, 4.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
SECTIONS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "truncate": False, "attention_factor": 1.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    {"rope_type": "longrope", **LONG, **ORIGINAL},
    {
        "rope_type": "longrope",
        **LONG,
        **ORIGINAL,
        "factor": 6.0,
        "attention_factor": 1.1,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_frequencies_equal_those_of_transformers(section: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**{**LLAMA, "rope_scaling": dict(section)})
    (rope,) = ropes({**LLAMA, "rope_scaling": section})
    longest = {
        "dynamic": 1024,
        "llama3": 1024,
        "longrope": 128 * section.get("factor", 4),
    }
    assert reach(rope) == longest.get(section["rope_type"], 512)
    for length in (64, 129, 512, 2000):
        f, factor = ROPE_INIT_FUNCTIONS[section["rope_type"]](
            config, torch.device("cpu"), seq_len=length
        )
        ours, our_factor = rope.at(length)
        torch.testing.assert_close(ours.float(), f, rtol=1e-6, atol=1e-9)
        assert our_factor == pytest.approx(factor)


SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
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
MLA = dict.fromkeys(("head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank"), 8)
MLA |= {"qk_nope_head_dim": 16, "v_head_dim": 16}
STEEP = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    **ORIGINAL,
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# as authors spell them: kinds of layers, parts of heads, defaults of a class
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **KINDS,
        "rope_theta": 1.5e5,
        "rope_scaling": {**YARN, "truncate": False},
    },
    "gemma3_text": {
        **KINDS,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4_text": {
        **KINDS,
        "global_head_dim": 32,
        "rope_parameters": {
            "sliding_attention": {**HALF, "partial_rotary_factor": 1.0},
            "full_attention": {
                **HALF,
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
            },
        },
    },
    "olmo3": {**KINDS, "rope_theta": 5e5, "rope_scaling": YARN},
    "deepseek_v3": {
        **MLA,
        "rope_theta": 1e4,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "llama4_text": {"rope_theta": 5e5, "no_rope_layers": [], "rope_scaling": STEEP},
    "exaone4": {
        "layer_types": ["full_attention"] * 6,
        "sliding_window": None,
        "rope_theta": 1e6,
    },
    "glm4": {"rope_parameters": HALF},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3, "rope_theta": 1e6},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"] * 3,
        "rope_parameters": HALF,
    },
    "gemma3n_text": {
        **KINDS,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": None,
    },
    "hunyuan_v1_dense": {
        "rope_theta": 1e4,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "afmoe": {**KINDS, "rope_theta": 1e4},
}
SAVED = ("gpt_neox", "mistral", "qwen2", "smollm3", "gemma2")


def rotary_module_frequencies(
    settings: dict[str, Any],
) -> dict[str, tuple[torch.Tensor, float]]:
    """Return the frequencies of a model's rotary module, and its factor on queries and
    keys, by kind of layer.
    """
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(settings)))
    module = importlib.import_module(
        type(config).__module__.replace("configuration", "modeling")
    )
    names = [
        name
        for name in vars(module)
        if name.endswith("RotaryEmbedding") and "Vision" not in name
    ]
    rotary = getattr(module, min(names, key=len))(config=config)
    # inv_freq
    buffers = {
        name[:-8]: buffer
        for name, buffer in rotary.named_buffers()
        if "original" not in name
    }
    return {
        of[:-1]: (buffer, getattr(rotary, f"{of}attention_scaling"))
        for of, buffer in buffers.items()
    }


def check_against_the_rotary_module(settings: dict[str, Any]) -> list[Rope]:
    """Compare frequencies and factors with the library's; return what turns."""
    turning = rotating(ropes(settings))
    theirs = rotary_module_frequencies(settings) if turning else {}
    for rope in turning:
        f, factor = theirs.get(rope.layers) or theirs[""]
        ours, our_factor = rope.at(64)
        torch.testing.assert_close(
            ours.float(), f, rtol=1e-5, atol=1e-9, msg=str(settings)
        )
        assert our_factor == pytest.approx(factor)
    return turning


@pytest.mark.parametrize("kind", [*PUBLISHED, *SAVED])
def test_configurations_mean_what_the_models_own_rotary_modules_compute(
    kind: str,
) -> None:
    saved = (
        hf_models.configuration(kind).to_dict()
        if kind in SAVED
        else {**SIZES, "model_type": kind}
    )
    settings = saved | PUBLISHED.get(kind, {})
    turning = check_against_the_rotary_module(settings)
    assert sum(rope.number for rope in turning) == sum(
        rope.number for rope in ropes(settings)
    ) - {"llama4_text": 1, "smollm3": 1, "qwen3_next": 3, "lfm2": 3, "afmoe": 3}.get(
        kind, 0
    )
    windows = {rope.window for rope in ropes(settings)}
    assert windows == (
        {20}
        if kind == "mistral"
        else {20, None}
        if "sliding_attention" in str(settings)
        else {None}
    )
    for others in (
        {"position_embedding_type": "nope"},
        {"alibi": True},
        {"model_type": "gpt2"},
    ):
        assert rotating(ropes({**settings, **others})) == []


# Models whose sizes or kinds of layers have names of their own, or that have no module
# of their own.
APART = """bailing_hybrid beam blt dbrx deepseek_v4 dots3_note_text gemma4_assistant internlm3 iquestcoder jetmoe
           minimax_m3_vl_text recurrent_gemma zamba2"""


@pytest.mark.parametrize(
    "kinds", ["gemma3_text gemma4_text", pytest.param("", marks=pytest.mark.slow)]
)
def test_what_a_file_leaves_to_the_class_of_its_model_is_what_its_rotary_module_computes(
    kinds: str,
) -> None:
    every = (
        transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
        - {*APART.split()}
    )
    for kind in kinds.split() or sorted(every):
        if getattr(transformers.CONFIG_MAPPING[kind](), "rope_parameters", None):
            check_against_the_rotary_module(
                dict(with_class_defaults({"model_type": kind}))
            )


THREADS = {  # configurations, and what is said of them
    "vllm 48621": (
        {
            "rope_parameters": {
                **YARN,
                "mscale": 1,
                "mscale_all_dim": 1,
                "rope_theta": 1e4,
            }
        },
        (
            "vLLM 0.25 multiplies q and k by 1.1386, not 1.0000: it does not read"
            " mscale and mscale_all_dim"
        ),
    ),
    "transformers 38224": (
        {"rope_scaling": YARN, "max_position_embeddings": 160},
        (
            "its factor is max_position_embeddings / original_max_position_embeddings,"
            " 1.25"
        ),
    ),
    "llama.cpp 18013": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_theta": None,
        },
        "it reads rope_scaling and the rope_theta beside it, not rope_parameters",
    ),
    "automodel 2652": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "512, counts as the trained length",
    ),
    "safe-synthesizer 623": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "1,024 tokens: right only if",
    ),
    "soup 793": (
        {"rope_scaling": {**YARN, "yarn_beta_fast": 8}},
        "yarn_beta_fast is not read by type 'yarn': did you",
    ),
    "mlxcel 1358": (
        {"rope_scaling": {"type": "su", **LONG, **ORIGINAL}},
        "keeps the frequencies of 512 tokens for",
    ),
    "deepseek": (
        {"rope_scaling": {**YARN, "attention_factor": 1.0}},
        (
            "llama.cpp multiplies q and k by 1.1386, not 1.0000: it does not read"
            " attention_factor"
        ),
    ),
}


@pytest.mark.parametrize("thread", THREADS)
def test_what_users_met_is_said_by_name(thread: str) -> None:
    settings, line = THREADS[thread]
    lines = remarks({**LLAMA, **settings})
    assert any(line in each for each in lines), lines


def test_a_wrong_configuration_is_refused_in_one_line() -> None:
    assert (
        remarks({**LLAMA, "rope_scaling": None})
        == remarks({**LLAMA, "rope_scaling": YARN})
        == []
    )
    assert [
        rope.window
        for rope in ropes({**LLAMA, "sliding_window": 20, "sliding_window_pattern": 2})
    ] == [20, None]
    with pytest.raises(UserError, match="did you mean 'yarn'"):
        ropes({**LLAMA, "rope_scaling": {"type": "yarm", "factor": 2}})


def test_smallest_bases_of_two_digits_are_those_of_the_page_of_results() -> None:
    """Beside those of Men et al. (2024), Table 2, for heads of 128. A larger base than
    the smallest may fail again.
    """
    (row,) = re.findall(
        r"RoPE's smallest bases.*",
        (ROOT / "docs/results.md").read_text(encoding="utf-8"),
    )
    ours, theirs = (re.findall(r"[\d.]+e\d", cell) for cell in row.split("|")[2:4])
    exponents, lengths = (
        -torch.arange(0, 128, 2, dtype=torch.float64) / 128,
        [1024 << i for i in range(6)],
    )
    grid = [
        float(f"{digits / 10}e{power}")
        for power in range(3, 6)
        for digits in range(10, 100)
    ]
    for base, length in zip(map(float, ours), lengths, strict=True):
        close = [each for each in grid if 0.85 * base < each <= base]
        assert [
            each for each in close if bound_by_base(each**exponents, length) == length
        ] == [base]
    assert f"{sum(map(str.__eq__, ours, theirs))} of 6 reproduced" in row
    assert bound_by_base((1.05 * 4.3e3) ** exponents, 1024) < 1024


def test_the_command_describes_compares_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = f"{tmp_path}/one.json", f"{tmp_path}/other.json"
    for path, base in ((first, 1e4), (second, 2e4)):
        Path(path).write_text(json.dumps({**LLAMA, "rope_theta": base}))
    assert posbench("rope", first, second, f"--png={tmp_path}/a.png") == 0
    assert "all layers: differ from position" in capsys.readouterr().out
    gemma = ropes({**SIZES, **PUBLISHED["gemma3_text"], "model_type": "gemma3_text"})
    for both, kinds in (
        ([gemma, gemma[::-1]], [True, True]),
        ([gemma, ropes(LLAMA)], [True, False]),
    ):
        assert [
            "turn alike" in line for line in compare_ropes(["a", "b"], both)[2:]
        ] == kinds
    (axes,) = picture(
        ["a", "b"], [ropes(LLAMA | {"rope_theta": base}) for base in (1e4, 2e4)], [64]
    ).axes
    # the trained length is named once
    assert len(axes.get_lines()) == 4 and len(axes.get_legend().get_texts()) == 3
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert posbench("rope", first, "extension=yarn:factor=8", "length=4096") == 0
    assert posbench("rope", "yarn", "factor=8", "head_dim=64", "train_length=1024") == 0
    assert capsys.readouterr().out.count("slowed 8 times") == 2
    wrong = (
        "lenght=8",
        "base=2",
        "length=16k",
        "length=-5",
        "extension=pi:factor=x",
    )
    assert [posbench("rope", first, words) for words in wrong] == [2] * 5
    assert [posbench("rope", name) for name in ("alibi", "pope", "xpos", "rop")] == [
        2
    ] * 4
    assert (
        "did you mean 'length='" in (error := capsys.readouterr().err)
        and "did you mean 'rope'" in error
    )


@pytest.mark.parametrize("kind", ["glm4", "gemma3", "mistral"])
def test_an_extension_keeps_what_it_does_not_extend(kind: str, tmp_path: Path) -> None:
    settings = {
        **SIZES,
        "sliding_window": 20,
        "model_type": kind,
        "rope_parameters": HALF,
    }
    if kind == "gemma3":
        settings = {
            "text_config": {
                **SIZES,
                **KINDS,
                "model_type": "gemma3_text",
                "rope_theta": 1e6,
            }
        }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for extension in ("yarn", "ntk", "pi:factor=2"):
        extended = settings_of(
            str(tmp_path), {"extension": extension, "length": "8192,10000"}
        )
        assert extended.keys() == settings.keys()
        before, after = rotating(ropes(settings)), rotating(ropes(extended))
        assert [rope.width for rope in before] == [rope.width for rope in after]
        assert [
            not torch.equal(a.at(64)[0], b.at(64)[0])
            for a, b in zip(before, after, strict=True)
        ][-1]
        assert before[0].at(64)[0].equal(after[0].at(64)[0]) == (kind == "gemma3")


@pytest.mark.slow
def test_a_search_ranks_by_the_worse_of_loss_and_retrieval_and_reports_test_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hf_models.save("llama", Path("llama"))
    hf_models.write_text(Path("text.txt"))
    words = [
        "data=text",
        "data.path=text.txt",
        "targets=16",
        "blocks=16",
        "device=cpu",
        "threads=1",
    ]
    assert (
        posbench("evaluate", "./llama", "extension=search", "length=192", *words) == 0
    )
    shown = capsys.readouterr().out
    table = [
        line.split()
        for line in shown.splitlines()
        if ":factor=" in line or line.startswith(("none", "dynamic"))
    ]
    # no token of this tokenizer is a digit
    losses = [float(line[1]) for line in table[:12]]
    assert (
        losses == sorted(losses)
        and "trained at 48 tokens" in shown
        and "by loss: in passkey none" in shown
    )
    assert re.search(
        rf"\n{table[0][0]} less {table[1][0]} at 192 tokens of validation text: [-+].*"
        r" segments.\n",
        shown,
    )
    assert (
        ("none at 48 tokens of test" in shown)
        == ("None of these" not in shown)
        == (table[0][0] != "none")
    )
    frame = pd.DataFrame(
        {"extension": [None, "pi", "yarn"] * 2, "variant": "plain", "length": 192}
    )
    frame = frame.assign(
        length_ratio=4.0,
        unit_nll=None,
        unit_tokens=None,
        ci_over="",
        chance=0.1,
        newest=True,
    )
    frame["protocol"], frame["task"] = (
        ["fixed_target"] * 3 + ["task"] * 3,
        [None] * 3 + ["passkey"] * 3,
    )
    frame["nll"], frame["accuracy"] = (
        [1.0, 1.1, 1.2, *[None] * 3],
        [*[None] * 3, 0.1, 0.5, 0.4],
    )
    # on other targets
    others = (
        frame.assign(variant="sinks", extension="sinks"),
        frame.assign(newest=False, nll=9.0),
    )
    frame = pd.concat([frame, *others], ignore_index=True)
    # of 5 none beats chance
    for blocks, best_first in (
        (100, ["pi", "none", "yarn"]),
        (5, ["none", "pi", "yarn"]),
    ):
        assert (
            list(ranked(frame.assign(n_blocks=blocks), 192)["extension"]) == best_first
        )
