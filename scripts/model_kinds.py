"""The kinds of HuggingFace models that posbench evaluates: a tiny random model of each is saved, read and probed.

    python scripts/model_kinds.py

prints the table of docs/your_model.md for the installed transformers. The last column is the largest difference of a
negative log-likelihood, in nats, to those of the logits that transformers computes from the same folder.
"""

import argparse
import copy
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from posbench.errors import PosbenchError, Undefined
from posbench.evaluation.variants import Variant
from posbench.huggingface import building, folder, probing
from posbench.huggingface.subject import HuggingFaceModel, limits_of

# Programs for GPUs, which transformers would take in the place of its own, and which fail without one.
_FOR_GPUS = ("fla", "mamba_ssm", "causal_conv1d")
LENGTH, LONG, VOCABULARY = 48, 96, 300
LAYERS = 3
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": LAYERS,
    "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LENGTH,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "initializer_range": 0.15,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_MOE = {**_EXPERTS, "moe_intermediate_size": 32}
_LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
_WINDOW = {"sliding_window": 12}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_OLD = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": LENGTH}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_GEMMA_3N = {
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.0] * LAYERS, "laurel_rank": 4, "altup_num_inputs": 2,
}  # fmt: skip

# What each needs beside `_BASE`.
KINDS: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "biogpt": {}, "codegen": {**_OLD, "rotary_dim": 4}, "cohere": {"logit_scale": 2.0},
    "cohere2": {**_MIXED, "logit_scale": 2.0}, "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "n_group": 1, "topk_group": 1}, "ernie4_5": {},
    "ernie4_5_moe": {**_MOE, "moe_num_experts": 4, "moe_k": 2}, "exaone4": _MIXED, "falcon": {"ffn_hidden_size": 64},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64}, "falcon_mamba": {"state_size": 8}, "gemma": {},
    "gemma3": {"text_config": {**_BASE, **_MIXED, "query_pre_attn_scalar": 8}, "mm_tokens_per_image": 4,
               "vision_config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                                 "num_attention_heads": 2, "image_size": 28, "patch_size": 14}},
    "gemma3n_text": {**_GEMMA_3N, **_MIXED},
    "gemma4_text": {**_MIXED, "global_head_dim": 8, "hidden_size_per_layer_input": 0},
    "glm": {}, "glm4": {}, "glm4_moe": {**_MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "gpt_bigcode": _OLD, "gpt_neo": {"attention_types": [[["global", "local", "local"], 1]], "window_size": 12,
                                     "num_layers": LAYERS, "num_heads": 4},
    "gpt_oss": {**_MIXED, "num_local_experts": 4}, "gptj": {**_OLD, "rotary_dim": 4},
    "granite": {"logits_scaling": 0.25, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2},
    "granitemoe": {"num_local_experts": 4},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "mamba", "attention"], "num_local_experts": 4,
                         "shared_intermediate_size": 32},
    "helium": {}, "hunyuan_v1_dense": {}, "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2,
                                                   "mamba_d_state": 8},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"]},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 16},
    "mamba": {"state_size": 8}, "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "ministral": _MIXED, "ministral3": {}, "mixtral": {"num_local_experts": 4}, "nanochat": {}, "nemotron": {},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8,
                   "ssm_state_size": 8, "n_groups": 1},
    "olmo3": _MIXED, "olmoe": _EXPERTS, "persimmon": {}, "phi": {},
    "phi3": {"original_max_position_embeddings": LENGTH}, "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32}, "qwen3_5_text": _DELTA, "qwen3_moe": _MOE,
    "qwen3_next": {**_DELTA, **_MOE, "shared_expert_intermediate_size": 32},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 12}, "rwkv": {"context_length": LENGTH},
    "seed_oss": {}, "stablelm": {}, "xglm": {"d_model": 32, "num_layers": LAYERS, "attention_heads": 4, "ffn_dim": 64},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of a kind: differences to the library in nats, or why there are none."""

    kind: str
    plain: float | str
    window: float | str = ""
    extension: float | str = ""
    beyond: str | None = None  # why longer inputs are undefined


def saved(kind: str, into: Path, **more: Any) -> None:
    """A model with random weights, none of them at its initial value, and a tokenizer."""
    options = {**_BASE, **KINDS[kind], **more}
    own = {field.name for field in dataclasses.fields(AutoConfig.for_model(kind))}
    attributes = AutoConfig.for_model(kind).attribute_map
    config = AutoConfig.for_model(kind, **{key: options[key] for key in options if key in own or key in attributes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(into)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))  # noqa: S106 - no password
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(into / "tokenizer.json"))


def subject_of(path: Path, longest: int = LONG) -> HuggingFaceModel:
    """A folder as a probed model."""
    checkpoint = folder.read(path)
    config = building.configuration(checkpoint, longest)
    building.refuse_too_large(checkpoint, config, "fp32", "cpu", longest)
    model = building.built(checkpoint, config, building.tensors_of(checkpoint), "fp32")
    made = HuggingFaceModel(checkpoint, model, checkpoint.kind, LENGTH, torch.device("cpu"), "fp32")
    return made if checkpoint.family.verified else dataclasses.replace(made, limits=probing.limits(made, [longest]))


def measured(kind: str, path: Path) -> Found:
    """Evaluate the model of a folder, as its rows would be."""
    try:
        subject = subject_of(path)
        limits = subject.limits or limits_of(subject.checkpoint, subject.config)
        length = min(LONG, limits.longest) if limits.beyond else LONG
        plain = subject.varied(Variant(), length).subject
    except PosbenchError as error:
        return Found(kind, str(error).removeprefix(f"{path}: "))
    ids = np.random.default_rng(0).integers(2, VOCABULARY, (2, length + 1))
    own = AutoConfig.from_pretrained(path)
    wanted = theirs(path, own, ids)
    assert wanted.std() > 0.3, f"the weights of {kind} do nothing"

    def difference(variant: Variant) -> float | str:
        try:
            varied = subject.varied(variant, length).subject
        except Undefined as error:
            return str(error)
        assert isinstance(varied, HuggingFaceModel)
        config, masks = copy.deepcopy(own), None
        if varied.extension is not None:
            config.get_text_config().rope_parameters = varied.extension.config.rope_parameters
            config.get_text_config().max_position_embeddings = LENGTH
        if variant.window is not None:
            masks = masks_of(config.get_text_config(), length, variant.window)
        return float(np.abs(varied.nll(ids, length, 0) - theirs(path, config, ids, masks)).max())

    differences = [difference(Variant(window=9)), difference(Variant(extension="yarn"))]
    return Found(kind, float(np.abs(plain.nll(ids, length, 0) - wanted).max()), *differences, limits.beyond)


@torch.no_grad()
def theirs(path: Path, config: Any, ids: np.ndarray, masks: Any = None) -> np.ndarray:
    """What the library's own loading and logits come to."""
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()
    logits = model(torch.from_numpy(ids[:, :-1]), use_cache=False, attention_mask=masks).logits.float()
    return cross_entropy(logits.transpose(1, 2), torch.from_numpy(ids[:, 1:]), reduction="none").numpy()


def masks_of(config: Any, length: int, window: int) -> Any:
    """A window for every layer, beside its own window or chunk: as one mask, or as one for each type of layer."""
    places = torch.arange(length)
    distance = places[:, None] - places
    near = (distance >= 0) & (distance < window)
    own = {"full_attention": near}
    if sliding := getattr(config, "sliding_window", None):
        own["sliding_attention"] = near & (distance < sliding)
    if chunk := getattr(config, "attention_chunk_size", None):
        own["chunked_attention"] = near & (places[:, None] // chunk == places // chunk)
    lowest = torch.finfo(torch.float32).min
    masks = {kind: torch.zeros(2, 1, length, length).masked_fill(~seen, lowest) for kind, seen in own.items()}
    several = set(getattr(config, "layer_types", None) or ()) & (own.keys() - {"full_attention"})
    return masks if several else masks["full_attention"]


def table(found: list[Found]) -> list[str]:
    lines = ["| kind | plain | windows | extensions | beyond its training length |", "|---|---|---|---|---|"]
    for one in sorted(found, key=lambda one: one.kind):
        cells = [
            shown if isinstance(shown, str) else f"{shown:.0e}" for shown in (one.plain, one.window, one.extension)
        ]
        cells = [cell.partition(". ")[0].replace(one.kind, "it") for cell in cells]
        lines.append(f"| `{one.kind}` | {' | '.join(cells)} | {'runs' if one.beyond is None else 'undefined'} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=sorted(KINDS), help="which; all unless given")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each result with its reasons")
    asked = parser.parse_args()
    sys.modules.update(dict.fromkeys(_FOR_GPUS))  # type: ignore[arg-type]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = []
    for kind in asked.kinds:
        with tempfile.TemporaryDirectory() as path:
            saved(kind, Path(path) / kind)
            found.append(measured(kind, Path(path) / kind))
        if asked.verbose:
            print(found[-1], flush=True)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
