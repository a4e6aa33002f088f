"""A run as a folder that transformers loads by itself: `posbench export RUN DIR`.

    block               encoding                 architecture
    rmsnorm + swiglu    rotary, none             Llama
    any                 any, with code=true      posbench's own class, which
                                                 `modeling_posbench.py` imports

The folder is written under a temporary name, read again, compared and renamed: it is
equal to the run, or absent.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import tokenizers
import torch
import yaml
from torch import Tensor

from posbench import encodings, files
from posbench.config.schema import Config, to_container
from posbench.data.tokenizer import Tokenizer
from posbench.encodings.rope import Rotary
from posbench.errors import UserError
from posbench.huggingface.load import load
from posbench.model.gpt import GPT, RMS_EPS
from posbench.randomness import generator
from posbench.rope.imports import transformers
from posbench.rope.parameters import parameters_of
from posbench.run import checkpoint
from posbench.run.model import model_of, tokenizer_of
from posbench.run.rows import evaluation_rows, headline_split
from posbench.run.run import load_config, versions
from posbench.tasks.base import SEPARATOR

PARITY = "posbench_parity.json"
# the largest accepted difference of logits, as a share of the largest logit
LIMIT = 1e-5
SHORT = 16  # tokens; rounding is small up to here
# of fp32, in which transformers computes angles: above 167 tokens it decides the limit
_ROUNDING = 2.0**-24
# in a comparison, which holds two models and T x T attention scores
_MOST_LOGITS, _MOST_TOKENS = 2**27, 2**13
_TEXT = (
    "In 1984, two  spaces,\n\ta tab; naïve, 東京, 🙂 e\u0301. <|endoftext|> x=[[1]]\r\n"
)
# no cache: its keys would have the frequencies of a shorter input
_FOLLOW_LENGTH = ("longrope", "dynamic_ntk")
_NO_CACHE = (
    " Its frequencies follow the input's length: `use_cache` is false. Load it anew for"
    " a shorter input."
)
_USE = f"""
```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained("PATH")
ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer("Some text").input_ids]])
logits = model(ids).logits
```

In training `{SEPARATOR}` began every document. The tokenizer does not add it: put its
id first yourself, as above. Generation also ends at this id."""

# one per length: `length`, `difference` of logits, `largest_logit`, `limit`
Agreements = list[dict[str, float]]
# a model in transformers' terms: its configuration and weights
Exported = tuple[dict[str, Any], dict[str, Tensor]]


def export(run: Path, folder: Path, code: bool = False) -> str:
    """Write a run's newest model into a new folder; return a line that says how far its
    logits are from the run's.

    `code`: whether to use posbench's own class, which has any encoding, instead of a
    stock architecture.
    """
    config, tokenizer, _ = load_config(run), tokenizer_of(run), transformers()
    if folder.is_symlink() or (
        folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    ):
        raise UserError(f"{folder} exists: expected a new folder or an empty one")
    if code and config.encoding.file:
        raise UserError(
            "code=true exports posbench's own encodings, this one is in a file:"
            f" {config.encoding.file}"
        )
    trained = checkpoint.trained(run)
    model = model_of(run, config, tokenizer)
    if code:
        # not at the top: it imports transformers
        from posbench.huggingface import modeling

        settings = modeling.settings_of(config, tokenizer.texts)
        tensors = {
            f"model.{name}": tensor.contiguous()
            for name, tensor in model.state_dict().items()
        }
    else:
        settings, tensors = stock(model, config)
    length, longest = config.training.train_length, model.encoding.max_length
    with files.atomic_folder(
        folder, sum(tensor.nbytes for tensor in tensors.values())
    ) as new:
        _write(new, settings, tensors, tokenizer, length)
        if code:
            (new / modeling.FILE).write_text(modeling.IMPORT)
        lengths = [
            min(tokens, longest or tokens)
            for tokens in (1, SHORT, length, 2 * length, 4 * length)
        ]
        agreements = compare(new, model, tokenizer.vocab_size, lengths)
        their_tokenizer = transformers().AutoTokenizer.from_pretrained(new)
        # a task has no other words
        example = " ".join(tokenizer.texts[1:4]) if config.data.task else "Some text"
        text = example if config.data.task else _TEXT
        if their_tokenizer(text)["input_ids"] != tokenizer.encode([text])[0].tolist():
            raise UserError(
                "transformers splits a text into other tokens than the run's tokenizer;"
                " nothing is written"
            )
        (architecture,) = settings["architectures"]
        remark = "" if settings["use_cache"] else _NO_CACHE
        if code:
            remark = modeling.REMARK
        about = (
            f"A small GPT, trained at {length:,} tokens of"
            f" `{config.data.dataset or config.data.name}` by posbench, as "
            f"`{architecture}`, after {trained.step:,} of {config.training.steps:,}"
            f" updates. It is for measuring, not for use.{remark}"
        )
        use = (
            _USE.replace("float32)", "float32, trust_remote_code=True)")
            if code
            else _USE
        )
        facts = {
            "architecture": architecture,
            "step": trained.step,
            "train_length": length,
        }
        write_card(
            new,
            run,
            config,
            f"{about}\n{use.replace('Some text', example)}",
            agreements,
            **facts,
        )
    return (
        f"{folder}: logits as the run's within {worst(agreements):.1e} of the largest,"
        f" at {len(agreements)} lengths"
    )


def stock(model: GPT, config: Config) -> Exported:
    """Return a trained model as the Llama that computes the same; UserError says why
    there is none.
    """
    refuse_not_stock(model, config)
    rope = None if model.encoding.name == "none" else cast(Rotary, model.encoding)
    train_length = config.training.train_length
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.model.d_model,
        "num_hidden_layers": config.model.n_layers,
        "num_attention_heads": config.model.n_heads,
        "num_key_value_heads": config.model.n_heads,
        "intermediate_size": config.model.hidden_width,
        "hidden_act": "silu",
        "rms_norm_eps": RMS_EPS,
        "max_position_embeddings": getattr(rope, "original_length", train_length),
        "rope_parameters": parameters_of(rope),
        "use_cache": model.encoding.name not in _FOLLOW_LENGTH,
        "tie_word_embeddings": model.head is None,
    }
    return settings, _tensors(model, rope)


def refuse_not_stock(model: GPT, config: Config) -> None:
    """Raise UserError for a model that Llama of transformers cannot compute."""

    def refused(reason: str) -> UserError:
        return UserError(
            f"no stock architecture has {reason}; code=true exports it with posbench's"
            " class"
        )

    settings = config.model
    if (settings.norm, settings.mlp) != ("rmsnorm", "swiglu"):
        raise refused(
            f"model.norm={settings.norm} with model.mlp={settings.mlp}: expected"
            " model=llama"
        )
    if not encodings.architectures(model.encoding):
        raise refused(
            f"'{model.encoding.name}': expected 'rope' and its family, or 'none'"
        )
    if model.window is not None:
        raise refused(f"model.attention.window={model.window}: expected null")
    if settings.d_ff == 0:
        raise refused("model.d_ff=0: expected null, or a number from 1 on")
    if settings.qk_norm:
        raise refused("model.qk_norm=true: expected false")
    if settings.n_kv_heads is not None:
        raise refused(f"model.n_kv_heads={settings.n_kv_heads}: expected null")


# A part of a posbench model, and its name in Llama.
_NAMES = {
    "tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attn.qkv_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def _tensors(model: GPT, rope: Rotary | None) -> dict[str, Tensor]:
    """Return weights under Llama's names."""
    order = slice(None) if rope is None else _channel_order(rope)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.startswith("encoding."):
            continue
        weight = parameter.detach()
        module = name.removesuffix(".weight")
        place = ""
        if name.startswith("blocks."):
            _, number, module = module.split(".", 2)
            place = f"{_NAMES['blocks']}.{number}."
        theirs = f"{place}{_NAMES[module]}.weight"
        if module != "attention.qkv":
            tensors[theirs] = weight.clone()
            continue
        n_heads = model.config.n_heads
        q, k, v = weight.view(3, n_heads, -1, weight.shape[1])  # each (H, Dh, D)
        for letter, part in (("q", q[:, order]), ("k", k[:, order]), ("v", v)):
            separate = theirs.replace("qkv", letter)
            tensors[separate] = part.flatten(0, 1).clone(
                memory_format=torch.contiguous_format
            )
    return tensors


def _channel_order(rope: Rotary) -> Tensor:
    """Return the indices of a head's channels in transformers' order: of w that turn, p
    is paired with p + w/2.
    """
    turning = torch.arange(rope.width)
    still = torch.arange(rope.width, rope.shape.head_dim)
    if rope.layout == "interleaved":
        pairs = turning.view(-1, 2).T
    else:
        pairs = turning.view(2, -1)
    return torch.cat((pairs, still.view(2, -1)), dim=1).flatten()


def _write(
    new: Path,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    tokenizer: Tokenizer,
    length: int,
) -> None:
    """Write a model and the run's tokenizer, which adds no token to a text and reads no
    text as the separator.
    """
    library = transformers()
    ends = {"bos_token_id": tokenizer.separator, "eos_token_id": tokenizer.separator}
    facts = {
        "pad_token_id": None,
        "vocab_size": tokenizer.vocab_size,
        "dtype": "float32",
    }
    library.AutoConfig.for_model(**settings, **ends, **facts).save_pretrained(new)
    library.GenerationConfig(**ends, use_cache=settings["use_cache"]).save_pretrained(
        new
    )
    safetensors.torch.save_file(
        tensors, new / "model.safetensors", metadata={"format": "pt"}
    )
    description = json.dumps(tokenizer.description | {"post_processor": None})
    library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(description),
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=length,
    ).save_pretrained(new)


@torch.inference_mode()
def compare(
    folder: Path,
    model: Callable[[Tensor], Tensor],
    vocabulary: int,
    lengths: Iterable[int],
) -> Agreements:
    """Compare a folder's model in fp32 with `model`, from ids (1, T) to logits (1, T,
    V); UserError if they differ.
    """
    exported = load(folder, transformers().AutoConfig.from_pretrained(folder), "fp32")
    agreements = []
    for length in sorted(
        {
            max(1, min(length, _MOST_TOKENS, _MOST_LOGITS // vocabulary))
            for length in lengths
        }
    ):
        ids = torch.randint(
            vocabulary, (1, length), generator=generator(0, "export", length)
        )
        logits = model(ids)
        difference, largest = (
            (logits - exported(ids).logits).abs().max().item(),
            logits.abs().max().item(),
        )
        limit = max(LIMIT, _ROUNDING * length) * max(1.0, largest)
        if not difference <= limit:  # also NaN
            reason = (
                f"at {length} tokens their logits differ by {difference:.2g}, expected"
                f" at most {limit:.2g}"
            )
            raise UserError(
                f"the written model is not the trained one: {reason}; nothing is kept"
            )
        agreements.append(
            {
                "length": length,
                "difference": difference,
                "largest_logit": largest,
                "limit": limit,
            }
        )
    return agreements


def worst(agreements: Agreements) -> float:
    """Return the largest difference of logits, as a share of the largest logit, or of 1
    if that is larger.
    """
    return max(
        agreement["difference"] / max(1.0, agreement["largest_logit"])
        for agreement in agreements
    )


def write_card(
    new: Path,
    run: Path,
    config: Config,
    about: str,
    agreements: Agreements,
    **facts: Any,
) -> None:
    """Write a model's README.md, with the results in the run's rows, and a file of the
    differences of its logits.
    """
    setup = {
        "versions": {**versions(), "transformers": transformers().__version__},
        "device": "cpu",
        "dtype": "fp32",
    }
    differences = {"run": run.name, **facts, **setup, "differences": agreements}
    (new / PARITY).write_text(json.dumps(differences, indent=2) + "\n")
    tags = ["posbench", "positional-encoding", config.encoding.name]
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    lines = [
        "| protocol | after tokens | tokens | nats per token |",
        "|---|---:|---:|---:|",
    ]
    rows = evaluation_rows(run)
    split = headline_split(rows, config.evaluation.split)
    for row in rows:
        if row.split != split:
            continue
        nll = f"{row.nll:.4f}" if row.measured else row.status
        lines.append(
            f"| `{row.curve_name}` | {row.tokens or 0:,} | {row.length:,} | {nll} |"
        )
    sections = ("encoding", "model", "start", "training", "seed")
    settings = {
        key: part for key, part in to_container(config).items() if key in sections
    }
    parity = (
        "On random tokens its logits in transformers differ from the run's by at most"
        f" {worst(agreements):.1e} of the largest, in fp32 on a CPU; `{PARITY}` has"
        " each length."
    )
    parts = [
        f"---\n{yaml.safe_dump(front)}---",
        f"# {run.name}",
        about,
        "\n".join(lines),
        parity,
    ]
    parts.append(
        f"```yaml\n{yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)}```\n"
    )
    (new / "README.md").write_text("\n\n".join(parts))
