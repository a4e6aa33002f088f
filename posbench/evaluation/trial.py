"""A user's own encoding is tried before training, with the initial weights: what fails
later would cost a trained run, and what is wrong without an error a wrong number.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posbench import machine
from posbench.config.schema import Config
from posbench.data.tokens import TaskData, Tokens
from posbench.encodings.base import Encoding
from posbench.encodings.own import place_of
from posbench.errors import UserError
from posbench.evaluation import problems
from posbench.evaluation.models import TrainedGPT, refuse_not_causal
from posbench.evaluation.requests import lengths_of
from posbench.model.gpt import GPT, build
from posbench.randomness import generator

logger = logging.getLogger(__name__)
LONGEST = 32  # tokens of an input that hooks are compared and differentiated on
# the hooks through which queries, keys and values pass
_HOOKS_OF = {
    "q": ("rotate", "prepare", "bias", "scores", "attend", "map_outputs"),
    "k": ("rotate", "prepare", "bias", "scores", "attend", "map_outputs"),
    "v": ("map_values", "attend", "map_outputs"),
}
SAME = 1e-5  # differences below this share of the SD are rounding


def refuse_broken(
    config: Config, tokens: Tokens | TaskData, device: torch.device
) -> None:
    """Raise UserError if a user's class draws at random, lets a model see later tokens
    or other rows of a batch, cuts a gradient, or fails at a length that the run asks
    for; warn of parameters that nothing uses. Ours are tested.
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
        rows = np.random.default_rng(1).integers(
            tokenizer.vocab_size, size=(3, min(LONGEST, train_length) + 1)
        )
        ids = machine.to_device(torch.from_numpy(rows), device)
        model.train()
        _refuse_other_rows(model, ids)
        _refuse_cut_gradients(model, ids[:2])


@torch.no_grad()
def _acts(model: GPT, ids: Tensor, weight: Tensor, hidden: Tensor) -> bool:
    """Return whether the states that a model has computed, `hidden`, depend on a
    weight.
    """
    before = weight.clone()
    size = weight.abs().max().clamp(min=0.1)
    weight += 0.1 * size * torch.randn_like(weight)
    changed = _hidden(model, ids)
    weight.copy_(before)
    return _differ(hidden, changed)


def _cut(model: GPT, ids: Tensor, what: str, hooks: Sequence[str]) -> UserError:
    """Return the error about a gradient that is cut, with the place of the first of
    these hooks whose result has none.
    """
    with _traced(model.encoding) as results:
        _hidden(model, ids)
    place = f"encoding '{model.encoding.name}'"
    for at, result in reversed(results):
        is_hook = any(f"', {hook}: " in at for hook in hooks)
        if is_hook and not result.requires_grad:
            place = at
    return UserError(
        f"{place}: gives {what} no gradient, though the outputs depend on them:"
        " expected torch's operations alone, without detach, .data, item or numpy"
    )


def is_own(encoding: Encoding) -> bool:
    """Return whether a class of the user's takes part in an encoding."""
    return bool(_own_parts(encoding))


def _own_parts(encoding: Encoding) -> list[Encoding]:
    """Return the objects of a user's classes in an encoding."""
    own = []
    for part in encoding.modules():
        is_ours = type(part).__module__.startswith("posbench.")
        if isinstance(part, Encoding) and not is_ours:
            own.append(part)
    return own


def refuse_later_tokens(subject: TrainedGPT) -> None:
    """Raise UserError if an encoding lets its model see later tokens, or draws at
    random.
    """
    exact = dataclasses.replace(subject, dtype=torch.float32)
    encoding = subject.model.encoding
    vocabulary = subject.model.tokens.num_embeddings
    ids = np.arange(min(LONGEST, subject.train_length) + 1)[None] % vocabulary
    scored = np.ones((1, ids.shape[1] - 1), np.bool_)
    passes = []
    for _ in range(2):
        with _traced(encoding) as results:
            logits = torch.cat([*exact.logits(ids, scored, 0)])
        passes.append((logits, results))
    if _differ(passes[0][0], passes[1][0]):
        raise UserError(
            f"{_first_difference(passes, encoding)}: gives another result for the same"
            " input: expected draws from the generator of `positions`, or noise only"
            " if self.training"
        )
    refuse_not_causal(exact, vocabulary, "fp32", f"encoding '{encoding.name}'")


Result = tuple[str, Tensor]  # where the hook stands, and what it returned
Pass = tuple[Tensor, list[Result]]  # outputs of a model, and what hooks returned


@contextlib.contextmanager
def _traced(encoding: Encoding) -> Iterator[list[Result]]:
    """Yield the list of the tensors that hooks of a user's classes return within the
    block, in order.
    """
    results: list[Result] = []

    def traced(place: str, hook: Any) -> Any:
        def call(*args: Any) -> Any:
            result = hook(*args)
            parts = result if isinstance(result, tuple | list) else [result]
            results.extend((place, part) for part in parts if torch.is_tensor(part))
            return result

        return call

    hooks = []
    for part in _own_parts(encoding):
        for name in part.overridden:
            if callable(getattr(part, name)):
                hooks.append((part, name))
    for part, name in hooks:
        place = place_of(type(part), name)
        object.__setattr__(part, name, traced(place, getattr(part, name)))
    try:
        yield results
    finally:
        for part, name in hooks:
            object.__delattr__(part, name)


def _first_difference(passes: Sequence[Pass], encoding: Encoding) -> str:
    """Return where the first hook stands whose results differ between two passes; of
    a batch of two rows in the first one.
    """
    (_, results), (_, others) = passes
    for (place, result), (_, other) in zip(results, others, strict=False):
        if result.dim() and len(result) == 2:
            result, other = result[:1], other[:1]
        if _differ(result, other):
            return place
    return f"encoding '{encoding.name}'"


def _differ(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape:
        return True
    if torch.equal(tensor, other):
        return False
    tensor, other = tensor.double(), other.double()
    is_finite = tensor.isfinite() & other.isfinite()
    change = torch.where(is_finite, tensor - other, 0.0).abs().max()
    scale = torch.where(is_finite, tensor, 0.0).abs().max()
    return bool(change > SAME * scale)


def _refuse_other_rows(model: GPT, ids: Tensor) -> None:
    """Raise UserError if a row of a batch changes what a model in training computes of
    another.
    """
    passes = []
    for rows in (ids[[0, 1]], ids[[0, 2]]):
        with _traced(model.encoding) as results, torch.no_grad():
            hidden = _hidden(model, rows)
        passes.append((hidden, results))
    if _differ(passes[0][0][0], passes[1][0][0]):
        raise UserError(
            f"{_first_difference(passes, model.encoding)}: another row of the batch"
            " changes its result: expected no mean, sum or norm over axis 0, the batch"
        )


def _hidden(model: GPT, ids: Tensor) -> Tensor:
    """Return the states (B, T, D) of all but the last ids, with the same draws each
    time.
    """
    torch.manual_seed(0)
    draws = generator(0, "trial", device=ids.device)
    return model.hidden(ids[:, :-1], generator=draws)


def _gradients(
    model: GPT, ids: Tensor
) -> tuple[Tensor, Tensor | None, dict[Tensor, Tensor | None]]:
    """Return the states that a model computes, and the gradients of its loss on token
    embeddings and by weight; None where the loss does not depend on them.
    """
    embedded: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        embedded.append(output)

    handle = model.tokens.register_forward_hook(note)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        hidden = _hidden(model, ids)
        loss = model.loss(hidden, ids[:, 1:])
        gradients = torch.autograd.grad(loss, [*embedded, *weights], allow_unused=True)
    except RuntimeError as error:  # torch's, of what was changed in place
        if machine.is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"encoding '{model.encoding.name}' has no gradient: {reason}"
        ) from error
    finally:
        handle.remove()
    of_embedding, *others = gradients
    return hidden, of_embedding, dict(zip(weights, others, strict=True))


def _refuse_cut_gradients(model: GPT, ids: Tensor) -> None:
    """Raise UserError if the outputs of a model depend on queries, keys, values, token
    embeddings or an encoding's parameters that get no gradient; warn of parameters on
    which they do not depend.
    """
    hidden, of_embedding, by_weight = _gradients(model, ids)
    if of_embedding is None or not of_embedding.any():
        raise _cut(model, ids, "the token embeddings", ("embed",))

    width = model.config.d_model // model.config.n_heads
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        qkv: Tensor = block.attention.qkv.weight
        gradient = by_weight[qkv]
        if gradient is None:
            gradient = torch.zeros_like(qkv)
        sizes = [heads * width for heads in block.attention.heads_of_qkv]
        parts = zip(
            "qkv", torch.split(qkv, sizes), torch.split(gradient, sizes), strict=True
        )
        for letter, part, of_part in parts:
            if not of_part.any() and _acts(model, ids, part, hidden):
                raise _cut(model, ids, f"{letter} and its weights", _HOOKS_OF[letter])

    for own in _own_parts(model.encoding):
        for name, weight in own.named_parameters():
            if not weight.requires_grad or by_weight[weight] is not None:
                continue
            if _acts(model, ids, weight, hidden):
                raise _cut(model, ids, f"self.{name}", tuple(own.overridden))
            logger.warning(
                "%s: nothing uses self.%s at %d tokens: it is counted, and not trained",
                place_of(type(own), "__init__"),
                name,
                hidden.shape[1],
            )


def _lengths(config: Config, tokens: Tokens | TaskData) -> list[int]:
    """Return the lengths in tokens that a run reads: the training length and longer
    ones, then shorter ones.
    """
    train_length = config.training.train_length
    asked = lengths_of(config.evaluation, train_length)
    if isinstance(tokens, TaskData):
        task = tokens.task
        points = problems.measurements(config.evaluation, task, train_length)
        asked = [task.size(point.length) for point in points]
    longer = {length for length in asked if length > train_length}
    shorter = {length for length in asked if length < train_length}
    return [train_length, *sorted(longer), *sorted(shorter)]


def _refuse_lengths(subject: TrainedGPT, lengths: list[int]) -> None:
    """Raise UserError at the first of these lengths at which the encoding fails; if
    shorter ones work, with the cure.
    """
    ends_at = subject.model.encoding.max_length
    defined: int | None = None
    for length in lengths:
        if ends_at is not None and length > ends_at:
            continue
        ids = np.arange(length + 1)[None] % subject.model.tokens.num_embeddings
        last = np.arange(length)[None] == length - 1
        try:
            for _ in subject.logits(ids, last, 0):
                pass
        except UserError as error:
            cure = ""
            if defined is not None and length > defined:
                cure = (
                    f"; up to {defined} it works: with self.max_length = {defined} in"
                    " __init__ longer lengths are undefined, and no error"
                )
            raise UserError(f"at {length} tokens: {error}{cure}") from error
        defined = length
