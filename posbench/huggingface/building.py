"""Loading a model with `transformers`, from data alone: no code of a folder runs, no pickle is opened."""

from typing import Any

import torch

from posbench import machine
from posbench.errors import UserError
from posbench.huggingface import attention
from posbench.huggingface.folder import Checkpoint
from posbench.huggingface.package import causal_models, line, quiet, transformers

_DIFFERENCES = {
    "missing_keys": "lack",
    "unexpected_keys": "have, not used by it,",
    "mismatched_keys": "have another shape of",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def configuration(checkpoint: Checkpoint, longest: int) -> Any:
    """The library's configuration object of a model; UserError if the library refuses it.

    `longest`, the longest input in tokens, sets the size of MPT's bias.
    """
    try:
        with quiet():
            made = transformers().AutoConfig.from_pretrained(
                checkpoint.folder, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # the library's checks raise many kinds
        raise UserError(f"{checkpoint.folder}: transformers refuses its configuration: {line(error)}") from None
    if checkpoint.kind == "mpt":  # a larger value only enlarges the bias in memory
        made.max_seq_len = longest
    made.use_cache = False
    return made


def built(checkpoint: Checkpoint, config: Any, precision: str) -> Any:
    """A model in eval mode, on the CPU.

    Raises:
        UserError: a tensor is missing, left over, or of another shape; the library would fill it with random numbers.
    """
    kind = getattr(transformers(), causal_models()[checkpoint.kind])
    attention.register()
    try:
        with quiet():
            model, found = transformers().AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                config=config,
                dtype=DTYPES[precision],
                attn_implementation="sdpa" if kind._supports_sdpa else "eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with one line
            )
    except Exception as error:
        if machine.is_out_of_memory(error):
            raise
        raise UserError(f"{checkpoint.folder}: transformers cannot load it: {line(error)}") from None
    for key, what in _DIFFERENCES.items():
        if found[key]:
            names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in found[key])
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(
                f"{checkpoint.folder}: its weights do not match its configuration: they {what} {names[0]}{more}"
            )
    return model.eval()
