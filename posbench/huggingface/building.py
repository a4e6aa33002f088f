"""Building a model with `transformers` from data that posbench has read.

The library gets a configuration of known keys and tensors in memory, but no file and no name to look up or to run.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posbench import machine
from posbench.errors import UserError
from posbench.huggingface import attention
from posbench.huggingface.folder import Checkpoint, Family, text_tensor
from posbench.huggingface.package import line, quiet, transformers

# Keys of every configuration, in addition to those of its kind of model.
_COMMON = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "is_decoder")
# Earlier names or places of these keys.
_EARLIER = (
    "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct", "rope_local_base_freq",
    "sliding_window_pattern", "n_embed", "num_attention_heads", "original_max_position_embeddings",
)  # fmt: skip
_DIFFERENCES = {
    "missing_keys": "lack",
    "unexpected_keys": "have, not used by it,",
    "mismatched_keys": "have another shape of",
}
_COUNT = re.compile("(layer|cycle|loop|depth|repeat)s?$")  # keys whose number the library counts up to
_MOST_LAYERS, _MOST_REPEATS = 10_000, 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def configuration(checkpoint: Checkpoint, longest: int) -> Any:
    """The library's configuration object of a model; UserError if the library refuses it.

    `longest`, the longest input in tokens, sets the size of MPT's bias.
    """
    kind = getattr(transformers(), checkpoint.family.model).config_class
    if kind.sub_configs and not checkpoint.family.verified:
        raise UserError(f"{checkpoint.folder}: {checkpoint.kind} is made of several models: expected one of text alone")
    _refuse_counts(checkpoint)
    base = {field.name for field in dataclasses.fields(transformers().PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(kind)} - base
    known = {*own, *kind.attribute_map, *kind.attribute_map.values(), *_COMMON, *_EARLIER}
    given = {key: value for key, value in checkpoint.config.items() if key in known}
    try:
        with quiet():
            made = kind(**given)
    except Exception as error:  # the library's checks raise many kinds
        raise UserError(f"{checkpoint.folder}: transformers refuses its configuration: {line(error)}") from None
    _refuse_odd_rope(checkpoint, made)
    if checkpoint.kind == "mpt":  # a larger value only enlarges the bias in memory
        made.max_seq_len = longest
    made.use_cache = False
    return made


def _refuse_counts(checkpoint: Checkpoint) -> None:
    """Raise UserError if the library would make lists or loops of a size that no model of these files has."""
    most = max(_MOST_LAYERS, len(checkpoint.weights.shapes))
    for key, value in checkpoint.config.items():
        if type(value) is int and value > most and _COUNT.search(key):
            raise _other_weights(checkpoint, f"{value:,} layers and {len(checkpoint.weights.shapes):,} tensors ({key})")
        if isinstance(value, list) and any(number > _MOST_REPEATS for number in _integers(value)):
            raise UserError(f"{checkpoint.folder}: {key} has numbers above {_MOST_REPEATS:,}: expected smaller ones")


def _other_weights(checkpoint: Checkpoint, has: str) -> UserError:
    return UserError(f"{checkpoint.folder}: its configuration has {has}: it is not that of these weights")


def _integers(values: list[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, list):
            yield from _integers(value)
        elif type(value) is int:
            yield value


def _refuse_odd_rope(checkpoint: Checkpoint, config: Any) -> None:
    """Raise UserError if a number in `rope_parameters` cannot give frequencies."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for part in (parameters, *(each for each in parameters.values() if isinstance(each, dict))):
        for key, value in part.items():
            numbers = value if isinstance(value, list) else [value]
            numbers = [one for one in numbers if isinstance(one, int | float) and not isinstance(one, bool)]
            may_be_zero = key in ("partial_rotary_factor", "mscale", "mscale_all_dim")
            if not all(0 < one < math.inf or (one == 0 and may_be_zero) for one in numbers):
                wrong = value if isinstance(value, int | float) else "a list"
                raise UserError(f"{checkpoint.folder}: {key} of its RoPE is {wrong}: expected finite numbers above 0")


def built(checkpoint: Checkpoint, config: Any, tensors: Mapping[str, Tensor], precision: str) -> nn.Module:
    """A model in eval mode, on the CPU; it shares tensors that already have its precision.

    Raises:
        UserError: a tensor is missing, left over, of another shape, or not finite.
    """
    kind = getattr(transformers(), checkpoint.family.model)
    attention.register()
    try:
        with quiet():
            model, found = kind.from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                dtype=DTYPES[precision],
                **_attention(checkpoint.family),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with one line
            )
    except Exception as error:
        raise UserError(f"{checkpoint.folder}: transformers cannot build it: {line(error)}") from None
    for key, what in _DIFFERENCES.items():
        if found[key]:
            names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in found[key])
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f"{checkpoint.folder}: its weights do not match its configuration: they {what} {names[0]}{more}"
            )
    if found["error_msgs"]:
        raise UserError(f"{checkpoint.folder}: its weights cannot be used: {line(found['error_msgs'][0])}")
    made: nn.Module = model.eval()
    for name, weight in made.named_parameters():
        if not weight.isfinite().all():
            raise UserError(f"{checkpoint.folder}: its weights have NaN or infinity in {precision}: in {name}")
    return made


def _attention(family: Family) -> dict[str, str]:
    """Which attention the library uses; of a kind that is not listed, the library's own choice."""
    if not family.verified:
        return {}
    return {"attn_implementation": attention.NAME if family.narrows else "eager"}


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors of the checkpoint's files, mapped into memory; UserError if a file cannot be."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for path in checkpoint.weights.paths:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    own = name if checkpoint.whole is None else text_tensor(name)
                    if own is not None:
                        tensors[own] = file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, MemoryError) as error:  # torch's allocator raises RuntimeError
            size = f"{path.stat().st_size / 2**30:,.1f} GiB"
            raise UserError(f"{path} ({size}) cannot be read into memory: {line(error)}") from None
    return tensors


def refuse_too_large(checkpoint: Checkpoint, config: Any, precision: str, device: str, longest: int) -> None:
    """Refuse a model that does not fit into memory, before allocating anything.

    Raises:
        UserError: the configuration has more layers or numbers than the files, or memory does not suffice.
    """
    weights = checkpoint.weights
    if config.num_hidden_layers > len(weights.shapes):
        told = f"{config.num_hidden_layers:,} layers and {len(weights.shapes):,} tensors"
        raise _other_weights(checkpoint, told)
    kind = getattr(transformers(), checkpoint.family.model)
    try:
        with quiet(), torch.device("meta"), _no_more_numbers(checkpoint):
            made = kind(config)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{checkpoint.folder}: transformers cannot build it: {line(error)}") from None
    numbers = sum(parameter.numel() for parameter in made.parameters())
    if numbers > 2 * weights.numbers:  # a head tied to the token table may be counted twice
        raise _other_weights(checkpoint, f"{numbers:,} numbers and its files {weights.numbers:,}")
    if weights.learned > 2 * numbers:
        told = f"{weights.learned:,} numbers and its configuration {numbers:,}"
        raise UserError(f"{checkpoint.folder}: its files have {told}: they are not those of this configuration")
    held = numbers * (4 if precision == "fp32" else 2)
    held += config.vocab_size * config.hidden_size * (0 if precision == "fp32" else 4)  # the head, in fp32
    held += sum(buffer.numel() * buffer.element_size() for buffer in made.buffers())
    window = 16 * longest * config.hidden_size * 4
    scores = (getattr(config, "num_attention_heads", None) or 1) * longest**2
    if checkpoint.family.narrows:
        window += 4 * 3 * min(scores, attention.SCORES)  # copies in fp32, of a block
    elif not checkpoint.family.verified and kind._supports_sdpa:
        window += 8 * longest**2  # a mask for all heads, also in fp32
    else:
        window += 4 * 3 * scores  # copies in fp32, of a whole layer
    limit = machine.memory_limit(device)
    for needed, of in ((held, "its weights need"), (held + window, f"with a window of {longest:,} tokens it needs")):
        if limit is not None and needed > limit[0]:
            raise UserError(
                f"{checkpoint.folder}: {of} about {needed / 2**30:,.1f} GiB in {precision}, there are "
                f"{limit[0] / 2**30:,.1f} GiB ({limit[1]}): lower length or evaluation.precision; "
                f"{machine.MEMORY}=GIB sets another limit"
            )


@contextlib.contextmanager
def _no_more_numbers(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise UserError as soon as a model that is built has far more parameters than its files: it may have no end."""
    most, found = 8 * checkpoint.weights.numbers + 2**20, 0  # a tied table counts each time that it is set

    def counted(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal found
        found += 0 if parameter is None else max(1, parameter.numel())
        if found > most:
            raise _other_weights(checkpoint, f"{most:,} numbers and more, its files {checkpoint.weights.numbers:,}")

    hook = nn.modules.module.register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()
