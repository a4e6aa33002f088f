"""A model of transformers as the subject of an evaluation."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posbench import encodings, machine
from posbench.encodings.base import Shape
from posbench.encodings.extend import methods
from posbench.errors import RunFailed, Undefined, UserError
from posbench.evaluation.protocols import Integers
from posbench.evaluation.subject import Floats, Ranked, Varied
from posbench.evaluation.trained import nll_of, ranked_by
from posbench.evaluation.variants import Variant, parse_choice
from posbench.huggingface import attention, rope
from posbench.huggingface.folder import Checkpoint
from posbench.huggingface.head import Head
from posbench.huggingface.package import line


@dataclasses.dataclass(frozen=True)
class Limits:
    """Where a model's numbers are undefined, and why; None = nowhere."""

    everywhere: str | None = None
    windows: str | None = None
    extensions: str | None = None
    beyond: str | None = None  # inputs above `longest` tokens
    longest: int = 0

    def reasons(self) -> dict[str, str]:
        """What is undefined, each with its reason."""
        named = {"everything": self.everywhere, "windows and sinks": self.windows, "extensions": self.extensions}
        named[f"lengths above {self.longest}"] = self.beyond
        return {what: reason for what, reason in named.items() if reason is not None}


@dataclasses.dataclass(frozen=True, eq=False)
class HuggingFaceModel:
    """A model that was trained elsewhere. Extensions and windows give copies that share its weights."""

    checkpoint: Checkpoint
    model: Any  # the library's model
    name: str
    train_length: int
    device: torch.device  # device of the model
    precision: str  # fp32, bf16 or fp16
    limits: Limits | None = None  # as probed; None: what is known of its kind
    first_token: int | None = None  # replaces the first token of every window
    told: Callable[[int], None] = lambda tokens: None  # called with the tokens read by each forward pass
    window: int | None = None
    sinks: int = 0
    extension: rope.Extension | None = None
    length: int = 0  # target length of the extension

    @torch.no_grad()
    def nll(self, ids: Integers, scored: int, first: int) -> Floats:
        windows = machine.sent(torch.from_numpy(ids), self.device)
        inputs, targets = windows[:, :-1], windows[:, -scored:]
        nll = nll_of(self.head, self.hidden(inputs, scored).flatten(0, 1), targets.flatten())
        return nll.view(-1, scored).cpu().double().numpy()

    @torch.no_grad()
    def ranked(self, ids: Integers, candidates: Integers, first: int) -> Ranked:
        hidden = self.hidden(machine.sent(torch.from_numpy(ids[:, :-1]), self.device), candidates.shape[1])
        return ranked_by(self.head, hidden, torch.from_numpy(candidates))

    def varied(self, variant: Variant, length: int) -> Varied:
        limits = self.limits or limits_of(self.checkpoint, self.config)
        for concerned, reason in (
            (True, limits.everywhere),
            (length > limits.longest, limits.beyond),
            (variant.window is not None, limits.windows),
        ):
            if concerned and reason is not None:
                raise Undefined(reason)
        facts: dict[str, Any] | None = {"sinks": variant.sinks} if variant.sinks else None
        extension = None
        if variant.extension is not None:
            extension = self._extension(variant.extension, length)
            facts = extension.facts
        changed = dataclasses.replace(
            self, window=variant.window, sinks=variant.sinks, extension=extension, length=length
        )
        return Varied(changed, facts)

    @property
    def config(self) -> Any:
        return self.model.config

    @functools.cached_property
    def reading(self) -> Any:
        """The model for forward passes: unchanged, or with the rotary modules of the extension.

        Raises RunFailed if the built model has wrong rotary frequencies.
        """
        if self.extension is None:
            return self.model
        made = rope.exchanged(self.model, self.extension.config)
        if not rope.agrees(made, self.extension.turns, self.length):
            raise RunFailed(f"transformers built {self.name} with other frequencies than requested")
        return made

    def _extension(self, text: str, length: int) -> rope.Extension:
        """An extension, after checking without weights that the library computes its frequencies."""
        extension = extension_of(self.checkpoint, self.config, text, length, self.train_length)
        if self.limits is not None and self.limits.extensions is not None:
            raise Undefined(self.limits.extensions)
        try:
            agrees = rope.agrees(rope.rebuilt(self.model, extension.config), extension.turns, length)
        except Exception as error:  # a kind's own module may refuse a type of RoPE, in any way
            raise Undefined(f"transformers cannot extend {self.checkpoint.kind} by '{text}': {line(error)}") from None
        if not agrees:
            raise Undefined(f"transformers computes other frequencies for '{text}' than its definition")
        return extension

    @torch.no_grad()
    def hidden(self, inputs: Tensor, last: int) -> Tensor:
        """Hidden states (B, last, D) of the last tokens of inputs (B, C)."""
        if self.first_token is not None:
            inputs = inputs.clone()
            inputs[:, 0] = self.first_token
        rope.restore(self.reading)
        if self.extension is not None:  # shorter inputs use the frequencies of their length
            rope.difference(self.reading, self.extension.turns, self.length)
        with attention.narrowed(self.window, self.sinks):
            read = self.reading.get_submodule(self.head.body)(input_ids=inputs, use_cache=False)
        self.told(inputs.numel())
        hidden: Tensor = read.last_hidden_state[:, -last:]
        return hidden

    @functools.cached_property
    def head(self) -> Head:
        """Logits of hidden states, in fp32."""
        return Head(self.model)


def limits_of(checkpoint: Checkpoint, config: Any) -> Limits:
    """What is known of a verified kind of model before any forward pass."""
    family, kind = checkpoint.family, checkpoint.kind
    table = config.max_position_embeddings if family.position == "learned" else None
    windows = None if family.narrows else f"transformers runs {kind} without posbench's attention: no windows"
    return Limits(windows=windows) if table is None else beyond_table(Limits(windows=windows), kind, table)


def beyond_table(limits: Limits, kind: str, rows: int) -> Limits:
    """The limits of a model whose positions are the rows of a table."""
    told = f"{kind} has a table of {rows} positions: longer inputs are undefined"
    return dataclasses.replace(limits, longest=rows, beyond=told)


def position_of(checkpoint: Checkpoint, config: Any) -> str:
    """How a model encodes positions: rope, learned or alibi; other for kinds without RoPE that are not listed."""
    return checkpoint.family.position or ("rope" if getattr(config, "rope_parameters", None) else "other")


def extension_of(checkpoint: Checkpoint, config: Any, text: str, length: int, train_length: int) -> rope.Extension:
    """The configuration of a model under an extension.

    Raises:
        UserError: the extension is mistyped.
        Undefined: the model or transformers does not support it.
    """
    method, options = parse_choice(text)
    if position_of(checkpoint, config) == "rope":
        try:
            return rope.extended(config, method, length, train_length, options)
        except UserError:
            raise
        except Exception as error:  # a configuration in a form of this kind only
            raise Undefined(f"the RoPE of {checkpoint.kind} is none that transformers extends: {line(error)}") from None
    nothing = encodings.build("none", Shape(d_model=2, n_heads=1, n_layers=1, train_length=train_length))
    with contextlib.suppress(Undefined):  # a mistyped extension raises UserError here too
        methods.extended(nothing, method, length, train_length, **options)
    raise Undefined(f"{checkpoint.kind} has no rotary encoding: transformers extends only these")
