"""A user's own encoding is tried before training, with the initial weights, at every
length that the run asks for: what fails later would cost a trained run.
"""

import dataclasses

import numpy as np
import torch

from posbench.config.schema import Config
from posbench.data.tokens import TaskData, Tokens
from posbench.encodings.base import Encoding
from posbench.errors import UserError
from posbench.evaluation import problems
from posbench.evaluation.models import TrainedGPT, refuse_not_causal
from posbench.evaluation.requests import lengths_of
from posbench.model.gpt import build


def refuse_broken(
    config: Config, tokens: Tokens | TaskData, device: torch.device
) -> None:
    """Raise UserError if a user's class lets a model see later tokens, or fails at a
    length that the run asks for. Ours are tested.
    """
    tokenizer = tokens.tokenizer
    if not is_own(config.build_encoding(tokenizer.texts)):
        return
    with torch.random.fork_rng():  # a user's class may draw from torch's own
        model = build(config, tokenizer.vocab_size, tokenizer.texts).to(device).eval()
        train_length = config.training.train_length
        subject = TrainedGPT(model, train_length, device, torch.float32, config.seed)
        refuse_later_tokens(subject)
        _refuse_lengths(subject, _lengths(config, tokens))


def is_own(encoding: Encoding) -> bool:
    """Return whether a class of the user's takes part in an encoding."""
    for part in encoding.modules():
        is_ours = type(part).__module__.startswith("posbench.")
        if isinstance(part, Encoding) and not is_ours:
            return True
    return False


def refuse_later_tokens(subject: TrainedGPT) -> None:
    """Raise UserError if an encoding lets its model see later tokens."""
    exact = dataclasses.replace(subject, dtype=torch.float32)
    name = f"encoding '{subject.model.encoding.name}'"
    refuse_not_causal(exact, subject.model.tokens.num_embeddings, "fp32", name)


def _lengths(config: Config, tokens: Tokens | TaskData) -> list[int]:
    """Return the lengths in tokens that a run reads, from the training length on."""
    train_length = config.training.train_length
    asked = lengths_of(config.evaluation, train_length)
    if isinstance(tokens, TaskData):
        task = tokens.task
        points = problems.measurements(config.evaluation, task, train_length)
        asked = [task.size(point.length) for point in points]
    longer = {length for length in asked if length > train_length}
    return [train_length, *sorted(longer)]


def _refuse_lengths(subject: TrainedGPT, lengths: list[int]) -> None:
    """Raise UserError at the first of ascending lengths at which the encoding fails,
    with the cure.
    """
    ends_at = subject.model.encoding.max_length
    defined: int | None = None
    for length in lengths:
        if ends_at is not None and length > ends_at:
            return
        ids = np.arange(length + 1)[None] % subject.model.tokens.num_embeddings
        last = np.arange(length)[None] == length - 1
        try:
            for _ in subject.logits(ids, last, 0):
                pass
        except UserError as error:
            cure = ""
            if defined is not None:
                cure = (
                    f"; up to {defined} it works: with self.max_length = {defined} in"
                    " __init__ longer lengths are undefined, and no error"
                )
            raise UserError(f"at {length} tokens: {error}{cure}") from error
        defined = length
