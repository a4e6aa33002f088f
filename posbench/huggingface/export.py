"""A run as a folder that transformers loads by itself: `posbench export RUN DIR`.

    block               encoding                 architecture
    rmsnorm + swiglu    rotary, none             Llama
    any                 any, with code=true      posbench's own class, which
                                                 `modeling_posbench.py` imports

The folder is written under a temporary name, read again, compared and renamed: it is
equal to the run, or absent.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
from torch import Tensor

from posbench import encodings, files
from posbench.config.schema import Config
from posbench.data.tokenizer import Tokenizer
from posbench.encodings.rope import Rotary
from posbench.errors import UserError
from posbench.huggingface.load import load
from posbench.huggingface.model_card import Exported, write_card
from posbench.model.gpt import GPT, RMS_EPS
from posbench.randomness import generator
from posbench.rope.imports import transformers
from posbench.rope.parameters import parameters_of
from posbench.run.folder import load_config
from posbench.run.model import model_of, tokenizer_of
from posbench.tasks.base import SEPARATOR

# the largest accepted difference of logits, as a share of the largest logit
LIMIT = 1e-5
# of fp32, in which transformers computes angles: above 167 tokens it decides the limit
_ROUNDING = 2.0**-24
SHORT = 16  # tokens; rounding is small up to here
# in a comparison, which holds two models and T x T attention scores
_MOST_LOGITS, _MOST_TOKENS = 2**27, 2**13
_TEXT = (
    "In 1984, two  spaces,\n\ta tab; naïve, 東京, 🙂 e\u0301. <|endoftext|> x=[[1]]\r\n"
)
# its keys would have the frequencies of a shorter input
_NO_CACHE = (
    " Its frequencies follow the input's length: `use_cache` is false. Load it anew for"
    " a shorter input."
)


def export(run: Path, folder: Path, code: bool = False) -> str:
    """Write a run's newest model into a new folder; return a line that says how far its
    logits are from the run's.

    `code`: whether to use posbench's own class, which has any encoding, instead of a
    stock architecture.
    """
    transformers()  # refuses first if it is not installed
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.is_symlink() or (folder.exists() and not is_empty):
        raise UserError(f"{folder} exists: expected a new folder or an empty one")
    config = load_config(run)
    if config.encoding.file:
        raise UserError(
            "posbench exports its own encodings, this one is in a file:"
            f" {config.encoding.file}"
        )
    tokenizer = tokenizer_of(run)
    model = model_of(run, config, tokenizer)
    if code:
        exported = as_posbench(model, config, tokenizer)
    else:
        exported = stock(model, config)

    length = config.training.train_length
    example = "Some text"
    text = _TEXT
    if config.data.task:  # it has no other words
        example = " ".join(tokenizer.texts[1:4])
        text = example
    with files.atomic_folder(folder) as new:
        _write(new, exported, tokenizer, length)
        shares = compare(new, model, [1, SHORT, length, 2 * length, 4 * length])
        agreement = (
            f"logits as the run's within {max(shares.values()):.1e} of the largest, at"
            f" {', '.join(map(str, shares))} tokens"
        )
        their_tokenizer = transformers().AutoTokenizer.from_pretrained(new)
        ids = tokenizer.encode([text])[0].tolist()
        if their_tokenizer(text)["input_ids"] != ids:
            raise UserError(
                "transformers splits a text into other tokens than the run's tokenizer;"
                " nothing is written"
            )
        write_card(new, run, config, exported, agreement, example)
    return f"{folder}: {agreement}"


def as_posbench(model: GPT, config: Config, tokenizer: Tokenizer) -> Exported:
    """Return a trained model as posbench's own class."""
    from posbench.huggingface import modeling  # it imports transformers

    settings = modeling.exported_settings(config, tokenizer.texts)
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors[f"model.{name}"] = tensor.contiguous()
    return Exported(
        settings, tensors, modeling.REMARK, {modeling.FILE: modeling.IMPORT}
    )


def stock(model: GPT, config: Config) -> Exported:
    """Return a trained model as the Llama that computes the same; UserError says why
    there is none.
    """
    refuse_not_stock(model, config)
    rope = None
    if isinstance(model.encoding, Rotary):
        rope = model.encoding
    train_length = config.training.train_length
    follows_length = model.encoding.length_dependent
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
        "use_cache": not follows_length,
        "tie_word_embeddings": model.head is None,
    }

    # weights under Llama's names, with the channels of queries and keys in
    # transformers' order: of w that turn, p is paired with p + w/2
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

        by_head = weight.view(3, model.config.n_heads, -1, weight.shape[1])
        q, k, v = by_head  # (H, Dh, D) each
        if rope is not None:
            turning = torch.arange(rope.width)
            still = torch.arange(rope.width, rope.shape.head_dim)
            pairs = turning.view(2, -1)
            if rope.layout == "interleaved":
                pairs = turning.view(-1, 2).T
            order = torch.cat((pairs, still.view(2, -1)), dim=1).flatten()
            q = q[:, order]
            k = k[:, order]
        for letter, part in {"q": q, "k": k, "v": v}.items():
            tensors[theirs.replace("qkv", letter)] = part.flatten(0, 1).contiguous()

    remark = _NO_CACHE if follows_length else ""
    return Exported(settings, tensors, remark)


def refuse_not_stock(model: GPT, config: Config) -> None:
    """Raise UserError for a model that Llama of transformers cannot compute."""

    def refused(reason: str) -> UserError:
        return UserError(
            f"posbench exports no stock architecture that has {reason}; code=true"
            " exports it with posbench's class"
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


def _write(new: Path, exported: Exported, tokenizer: Tokenizer, length: int) -> None:
    """Write a model and the run's tokenizer, which adds no token to a text and reads no
    text as the separator.
    """
    library = transformers()
    settings = exported.settings
    ends = {"bos_token_id": tokenizer.separator, "eos_token_id": tokenizer.separator}
    config = library.AutoConfig.for_model(
        **settings,
        **ends,
        pad_token_id=None,
        vocab_size=tokenizer.vocab_size,
        dtype="float32",
    )
    config.save_pretrained(new)
    generation = library.GenerationConfig(**ends, use_cache=settings["use_cache"])
    generation.save_pretrained(new)
    weights = new / "model.safetensors"
    safetensors.torch.save_file(exported.tensors, weights, metadata={"format": "pt"})
    for name, text in exported.code.items():
        (new / name).write_text(text, encoding="utf-8")

    description = json.dumps(tokenizer.description | {"post_processor": None})
    their_tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(description),
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_max_length=length,
    )
    their_tokenizer.save_pretrained(new)


@torch.inference_mode()
def compare(folder: Path, model: GPT, lengths: Sequence[int]) -> dict[int, float]:
    """Compare a folder's model with a run's, in fp32 on random tokens, at each length
    that memory and the encoding allow; UserError if they differ.

    Returns the largest difference by length, as a share of the largest logit.
    """
    exported = load(folder, transformers().AutoConfig.from_pretrained(folder), "fp32")
    vocabulary = exported.config.vocab_size
    most = min(_MOST_TOKENS, _MOST_LOGITS // vocabulary)
    if model.encoding.max_length is not None:
        most = min(most, model.encoding.max_length)
    shares = {}
    possible = {min(length, most) for length in lengths}
    for length in sorted(possible):
        rng = generator(0, "export", length)
        ids = torch.randint(vocabulary, (1, length), generator=rng)
        logits = model(ids)  # (1, T, V)
        difference = (logits - exported(ids).logits).abs().max()
        shares[length] = (difference / logits.abs().max()).item()
        limit = max(LIMIT, _ROUNDING * length)
        if not shares[length] <= limit:  # also NaN
            raise UserError(
                f"the written model is not the trained one: at {length} tokens their"
                f" logits differ by {shares[length]:.2g} of the largest, expected at"
                f" most {limit:.2g}; nothing is kept"
            )
    return shares
