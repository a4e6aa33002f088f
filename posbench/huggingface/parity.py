"""The parity check: an exported folder, loaded by transformers alone, computes the same as the run's model.

Both get the same random tokens, in fp32 on the CPU, at lengths up to the training length and beyond. The largest
difference of two logits may be 1e-5 of the largest logit, or 1e-5 if all are below 1.

Beyond some hundred tokens transformers itself rounds more: it computes positions times frequencies in fp32, with errors
up to 2^-24 of a number; ours are exact. That share of the largest logit, times the length, is allowed if it is larger.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posbench.data.tokenizer import Tokenizer
from posbench.errors import UserError
from posbench.huggingface.package import quiet, transformers
from posbench.randomness import generator

LIMIT = 1e-5  # as a share of the largest logit
_ROUNDING = 2.0**-24  # error of a number in fp32, as a share of it
SHORT = 16  # tokens; rounding is small up to here
_MOST_LOGITS = 2**28  # per forward pass; there are two
_MOST_SCORES = 2**29  # per layer: some encodings hold all of them
_TEXT = "In 1984, two  spaces,\n\ta tab; naïve, 東京, 🙂 e\u0301. <|endoftext|> x=[[1]]\r\n"


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The difference of logits at one length."""

    length: int  # tokens
    difference: float  # the largest difference of two logits
    largest_logit: float

    @property
    def limit(self) -> float:
        return max(LIMIT, _ROUNDING * self.length) * max(1.0, self.largest_logit)

    @property
    def holds(self) -> bool:
        return self.difference <= self.limit  # false for NaN

    def to_json(self) -> dict[str, float]:
        return {**dataclasses.asdict(self), "limit": self.limit}


@torch.inference_mode()
def compare(
    folder: Path,
    ours: Callable[[Tensor], Tensor],
    vocabulary: int,
    n_heads: int,
    wanted: Iterable[int],
) -> list[Agreement]:
    """Compare the model in a folder with what computes logits (1, T, V) of ids (1, T), by length.

    Args:
        wanted: lengths in tokens; those that need too much memory become the longest that does not.

    Raises:
        UserError: a tensor is missing, unknown or misshapen, or the logits differ by more than rounding.
    """
    room = max(1, min(math.isqrt(_MOST_SCORES // n_heads), _MOST_LOGITS // vocabulary))
    lengths = sorted({min(length, room) for length in wanted})  # some encodings remember the longest input
    theirs = _read(folder)
    found = []
    for length in lengths:
        ids = torch.randint(vocabulary, (1, length), generator=generator(0, "export", length))
        own, other = ours(ids), theirs(ids).logits
        one = Agreement(length, (own - other).abs().max().item(), own.abs().max().item())
        if not one.holds:
            raise UserError(
                f"the exported model is not the run's: at {length} tokens their logits differ by "
                f"{one.difference:.2g}, expected at most {one.limit:.2g}; nothing was written"
            )
        found.append(one)
    return found


def refuse_other_ids(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if the exported tokenizer splits a text into other tokens than the run's."""
    with quiet():
        theirs = transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
        found = theirs(_TEXT)["input_ids"]
    if found != tokenizer.encode([_TEXT])[0].tolist():
        raise UserError("transformers splits a text into other tokens than the run's tokenizer; nothing was written")


def _read(folder: Path) -> Any:
    with quiet():
        model, told = transformers().AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    wrong = {what: sorted(map(str, told[f"{what}_keys"]))[:3] for what in ("missing", "unexpected", "mismatched")}
    wrong = {what: names for what, names in wrong.items() if names}
    if wrong:
        raise UserError(f"transformers cannot read the exported weights: {wrong}; nothing was written")
    return model.eval()
