"""A user's own encoding is tried before training: what fails later would cost a trained
run, and what is wrong without an error a wrong number.

A rule is a generator of what it finds wrong. Training raises the first finding;
`posbench check` prints all of them.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posbench import machine
from posbench.config.schema import Config
from posbench.data.tokens import TaskData, Tokens
from posbench.encodings.base import Encoding
from posbench.encodings.own import HookError, place_of
from posbench.errors import UserError
from posbench.evaluation import problems
from posbench.evaluation.requests import lengths_of
from posbench.evaluation.subjects import (
    NOT_FINITE,
    READS_LATER,
    TrainedGPT,
    why_not_causal,
)
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
# hooks that no other one reads: a model can do without each
SEPARATE = (
    "embed",
    "rotate",
    "map_values",
    "map_outputs",
    "distance_bias",
    "bias",
    "scores",
    "attend",
)
_CURES = {
    READS_LATER: "expected no mean, sum or norm over the tokens, axis T",
    NOT_FINITE: "expected no division by 0, no log of 0, no exp of large numbers",
}
SAME = 1e-5  # differences below this share of the SD are rounding
Findings = Iterator[UserError]


@dataclasses.dataclass(frozen=True)
class Trial:
    """An encoding inside a model, and what it is tried on."""

    subject: TrainedGPT  # in fp32
    parts: Sequence[Encoding]  # the objects whose hooks are tried
    lengths: Sequence[int] = ()  # in tokens, in the order in which they are tried

    @property
    def model(self) -> GPT:
        return self.subject.model

    @property
    def vocabulary(self) -> int:
        return self.model.tokens.num_embeddings

    def ids(self, length: int = LONGEST, rows: int = 3) -> Tensor:
        """Return random ids (rows, n + 1), the same at every call; n is `length`, or
        the encoding's `max_length` if that is smaller.
        """
        ends_at = self.model.encoding.max_length or length
        size = (rows, min(length, ends_at) + 1)
        drawn = np.random.default_rng(1).integers(self.vocabulary, size=size)
        return machine.to_device(torch.from_numpy(drawn), self.subject.device)

    @property
    def name(self) -> str:
        return f"encoding '{self.model.encoding.name}'"


def refuse_broken(
    config: Config, tokens: Tokens | TaskData, device: torch.device
) -> None:
    """Raise UserError if a user's class draws at random, lets a model see later tokens
    or other rows of a batch, cuts a gradient, or fails at a length that the run asks
    for; warn of parameters that nothing uses. Ours are tested.
    """
    tokenizer = tokens.tokenizer
    if not own_parts(config.build_encoding(tokenizer.texts)):
        return
    logger.info(
        "%s: tried before training: shapes, dtypes, lengths, equality, causality,"
        " other rows of a batch, gradients ('posbench check' tries more)",
        config.encoding.file or config.encoding.name,
    )
    with torch.random.fork_rng():  # a user's class may draw from torch's own
        model = build(config, tokenizer.vocab_size, tokenizer.texts).to(device)
        perturb(model.encoding)
        train_length = config.training.train_length
        subject = TrainedGPT(model, train_length, device, torch.float32, config.seed)
        trial = Trial(subject, own_parts(model.encoding), _lengths(config, tokens))
        for rule in (
            repeated,
            causal,
            at_lengths,
            beside_others,
            of_finite_gradients,
            with_gradients,
        ):
            for error in rule(trial):
                raise error
        for error in used(trial):
            logger.warning("%s", error)


def refuse_later_tokens(subject: TrainedGPT) -> None:
    """Raise UserError if a user's class lets its model see later tokens, or draws at
    random. Ours are tested.
    """
    exact = dataclasses.replace(subject, dtype=torch.float32)
    trial = Trial(exact, own_parts(subject.model.encoding))
    if not trial.parts:
        return
    for rule in (repeated, causal):
        for error in rule(trial):
            raise error


@torch.no_grad()
def perturb(encoding: Encoding) -> None:
    """Add noise to the parameters of an encoding: zeros would hide faults."""
    for number, weight in enumerate(encoding.parameters()):
        size = weight.abs().max().clamp(min=0.1)
        rng = generator(0, "check", number)
        drawn = torch.randn(weight.shape, generator=rng)
        weight.add_(0.1 * size * drawn.to(weight))


def own_parts(encoding: Encoding) -> list[Encoding]:
    """Return the objects of a user's classes in an encoding."""
    own = []
    for part in encoding.modules():
        is_ours = type(part).__module__.startswith("posbench.")
        if isinstance(part, Encoding) and not is_ours:
            own.append(part)
    return own


# -- the rules
# --------------------------------------------------------------------------------------


def repeated(trial: Trial) -> Findings:
    """The same input has the same output twice."""
    trial.model.eval()
    length = min(LONGEST, trial.subject.train_length)
    ids = np.arange(length + 1)[None] % trial.vocabulary
    scored = np.ones((1, length), np.bool_)
    passes = []
    for _ in range(2):
        with traced(trial.parts) as results:
            logits = torch.cat([*trial.subject.logits(ids, scored, 0)])
        passes.append((logits, results))
    if differ(passes[0][0], passes[1][0]):
        yield _at_first_difference(
            trial,
            passes,
            "gives another result for the same input: expected draws from the generator"
            " of `positions`, or noise only if self.training",
        )


def causal(trial: Trial) -> Findings:
    """Logits are finite, and later tokens change no earlier ones."""
    trial.model.eval()

    def reason() -> str:
        return why_not_causal(trial.subject, trial.vocabulary, "fp32")

    why = reason()
    if why:
        yield at_fault(trial, f"{why}: {_CURES[why]}", lambda: bool(reason()))


def at_lengths(trial: Trial) -> Findings:
    """The encoding works at each length that is asked for. After the first failure no
    other length is tried; if shorter ones work, the error has the cure.
    """
    trial.model.eval()
    ends_at = trial.model.encoding.max_length
    defined: int | None = None
    for length in trial.lengths:
        if ends_at is not None and length > ends_at:
            continue
        ids = np.arange(length + 1)[None] % trial.vocabulary
        last = np.arange(length)[None] == length - 1
        try:
            for _ in trial.subject.logits(ids, last, 0):
                pass
        except UserError as error:
            cure = ""
            if defined is not None and length > defined:
                cure = (
                    f"; up to {defined} it works: with self.max_length = {defined} in"
                    " __init__ longer lengths are undefined, and no error"
                )
            text = f"at {length} tokens: {error}{cure}"
            if isinstance(error, HookError):
                yield HookError(text, error.hook)
            else:
                yield UserError(text)
            return
        defined = length


def beside_others(trial: Trial) -> Findings:
    """A row of a batch changes nothing that a model in training computes of another."""
    trial.model.train()
    ids = trial.ids(min(LONGEST, trial.subject.train_length))
    passes = []
    for rows in (ids[[0, 1]], ids[[0, 2]]):
        with traced(trial.parts) as results, torch.no_grad():
            states = hidden(trial.model, rows)
        passes.append((states, results))
    if differ(passes[0][0][0], passes[1][0][0]):
        yield _at_first_difference(
            trial,
            passes,
            "another row of the batch changes its result: expected no mean, sum or norm"
            " over axis 0, the batch",
        )


def of_finite_gradients(trial: Trial) -> Findings:
    """Gradients are finite where outputs are."""

    def fails() -> bool:
        _, _, states, of_embedding, by_weight = _differentiated(trial)
        gradients = [of_embedding, *by_weight.values()]
        known = [gradient for gradient in gradients if gradient is not None]
        are_finite = all(gradient.isfinite().all() for gradient in known)
        return bool(states.isfinite().all()) and not are_finite

    if fails():
        cure = "expected no root, power or log of 0"
        yield at_fault(trial, f"its gradients are not finite: {cure}", fails)


def with_gradients(trial: Trial) -> Findings:
    """Token embeddings, queries, keys, values and an encoding's parameters get a
    gradient if outputs depend on them.
    """
    model, ids, states, of_embedding, by_weight = _differentiated(trial)
    if of_embedding is None or not of_embedding.any():
        table = model.tokens.weight
        yield _cut(trial, ids, table, "the token embeddings", ("embed",))

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
            if not of_part.any() and _acts(model, ids, part, states):
                what = f"{letter} and its weights"
                yield _cut(trial, ids, part, what, _HOOKS_OF[letter])

    for encoding, name, weight in _without_gradient(trial, by_weight):
        if _acts(model, ids, weight, states):
            hooks = tuple(encoding.overridden)
            yield _cut(trial, ids, weight, f"self.{name}", hooks)


def used(trial: Trial) -> Findings:
    """Outputs depend on each parameter of an encoding."""
    model, ids, states, _, by_weight = _differentiated(trial)
    for part, name, weight in _without_gradient(trial, by_weight):
        if not _acts(model, ids, weight, states):
            yield UserError(
                f"{place_of(type(part), '__init__')}: nothing uses self.{name} at"
                f" {states.shape[1]} tokens: it is counted, and not trained"
            )


def _without_gradient(
    trial: Trial, by_weight: dict[Tensor, Tensor | None]
) -> Iterator[tuple[Encoding, str, Tensor]]:
    """Yield the parameters of encodings that have no gradient but 0, each once, with
    its encoding and its name there.
    """
    seen = set[Tensor]()
    # inner encodings come first
    for part in reversed(trial.parts):
        for name, weight in part.named_parameters():
            is_trained = weight.requires_grad and weight not in seen
            seen.add(weight)
            gradient = by_weight[weight]
            if is_trained and (gradient is None or not gradient.any()):
                yield part, name, weight


# -- where a fault is
# --------------------------------------------------------------------------------------


def at_fault(trial: Trial, text: str, fails: Callable[[], bool]) -> UserError:
    """Return the error about a fault, with the place of the hook without which it is
    gone. `fails`: whether the fault is there.
    """
    with contextlib.ExitStack() as left_out:
        for hook in SEPARATE:
            for part in trial.parts:
                if hook not in part.overridden:
                    continue
                left_out.enter_context(without([part], hook))
                try:
                    is_gone = not fails()
                except Exception:  # what is left may need this hook
                    is_gone = False
                if is_gone:
                    place = place_of(type(part), hook)
                    return HookError(f"{place}: {text}", hook)
    return UserError(f"{trial.name}: {text}")


@contextlib.contextmanager
def without(parts: Sequence[Encoding], *hooks: str) -> Iterator[None]:
    """Let encodings act within the block as if they did not override these hooks."""
    changed = []
    for part in parts:
        for hook in part.overridden.intersection(hooks):
            changed.append((part, hook))
    before = [part.overridden for part in parts]
    for part, hook in changed:
        part.leave_out(hook)
        # a model calls some hooks whether or not they are overridden
        object.__setattr__(part, hook, getattr(Encoding, hook).__get__(part))
    try:
        yield
    finally:
        for part, overridden in zip(parts, before, strict=True):
            part.overridden = overridden
        for part, hook in changed:
            object.__delattr__(part, hook)


Result = tuple[str, str, Tensor]  # where the hook stands, its name, what it returned
Pass = tuple[Tensor, list[Result]]  # outputs of a model, and what hooks returned


@contextlib.contextmanager
def traced(parts: Sequence[Encoding]) -> Iterator[list[Result]]:
    """Yield the list of the tensors that hooks of encodings return within the block, in
    order.
    """
    results: list[Result] = []

    def recorded(place: str, name: str, hook: Any) -> Any:
        def call(*args: Any) -> Any:
            result = hook(*args)
            returned = result if isinstance(result, tuple | list) else [result]
            for each in returned:
                if torch.is_tensor(each):
                    results.append((place, name, each))
            return result

        return call

    hooks = []
    for part in parts:
        for name in part.overridden:
            if callable(getattr(part, name)):
                hooks.append((part, name))
    for part, name in hooks:
        place = place_of(type(part), name)
        object.__setattr__(part, name, recorded(place, name, getattr(part, name)))
    try:
        yield results
    finally:
        for part, name in hooks:
            object.__delattr__(part, name)


def _at_first_difference(trial: Trial, passes: Sequence[Pass], text: str) -> UserError:
    """Return the error about passes that differ, with the place of the first hook whose
    results do; of a batch of two rows in the first one.
    """
    (_, results), (_, others) = passes
    for (place, name, result), (_, _, other) in zip(results, others, strict=False):
        if result.dim() and len(result) == 2:
            result, other = result[:1], other[:1]
        if differ(result, other):
            return HookError(f"{place}: {text}", name)
    return UserError(f"{trial.name}: {text}")


def _cut(
    trial: Trial, ids: Tensor, weight: Tensor, what: str, hooks: Sequence[str]
) -> UserError:
    """Return the error about the gradient of a weight that is cut, with the place of
    the first of these hooks whose result has none; else of the one that reads it.
    """
    text = (
        f"gives {what} no gradient, though the outputs depend on them: expected torch's"
        " operations alone, without detach, .data, item or numpy"
    )
    model = trial.model
    with traced(trial.parts) as results:
        hidden(model, ids)
    for place, name, result in results:
        if name in hooks and not result.requires_grad:
            return UserError(f"{place}: {text}")
    return at_fault(trial, text, lambda: _acts(model, ids, weight, hidden(model, ids)))


# -- passes
# --------------------------------------------------------------------------------------


def differ(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ by more than rounding."""
    if tensor.shape != other.shape:
        return True
    if torch.equal(tensor, other):
        return False
    tensor, other = tensor.double(), other.double()
    is_finite = tensor.isfinite() & other.isfinite()
    change = torch.where(is_finite, tensor - other, 0.0).abs().max()
    scale = torch.where(is_finite, tensor, 0.0).abs().max()
    return bool(change > SAME * scale)


def hidden(model: GPT, ids: Tensor) -> Tensor:
    """Return the states (B, T, D) of all but the last ids, with the same draws each
    time.
    """
    torch.manual_seed(0)
    draws = generator(0, "trial", device=ids.device)
    return model.hidden(ids[:, :-1], generator=draws)


@torch.no_grad()
def _acts(model: GPT, ids: Tensor, weight: Tensor, states: Tensor) -> bool:
    """Return whether the states that a model has computed depend on a weight."""
    before = weight.clone()
    size = weight.abs().max().clamp(min=0.1)
    weight += 0.1 * size * torch.randn_like(weight)
    try:
        changed = hidden(model, ids)
    finally:
        weight.copy_(before)
    return differ(states, changed)


def _differentiated(
    trial: Trial,
) -> tuple[GPT, Tensor, Tensor, Tensor | None, dict[Tensor, Tensor | None]]:
    """Return a trial's model, ids, the states that it computes of them in training, and
    the gradients of its loss on token embeddings and by weight; None where the loss
    does not depend on them.
    """
    model = trial.model.train()
    ids = trial.ids(min(LONGEST, trial.subject.train_length), rows=2)
    embedded: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        embedded.append(output)

    handle = model.tokens.register_forward_hook(note)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        states = hidden(model, ids)
        loss = model.loss(states, ids[:, 1:])
        gradients = torch.autograd.grad(loss, [*embedded, *weights], allow_unused=True)
    except RuntimeError as error:  # torch's, of what was changed in place
        if machine.is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(f"{trial.name} has no gradient: {reason}") from error
    finally:
        handle.remove()
    of_embedding, *others = gradients
    by_weight: dict[Tensor, Tensor | None] = {}
    for weight, gradient in zip(weights, others, strict=True):
        by_weight[weight] = gradient
    return model, ids, states, of_embedding, by_weight


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
    return in_order(asked, train_length)


def in_order(asked: Sequence[int], train_length: int) -> list[int]:
    """Return the training length and longer ones, then shorter ones."""
    longer = {length for length in asked if length > train_length}
    shorter = {length for length in asked if length < train_length}
    return [train_length, *sorted(longer), *sorted(shorter)]
