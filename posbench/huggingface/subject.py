"""A model of transformers as the subject of an evaluation."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench import encodings, machine
from posbench.encodings.base import Shape
from posbench.encodings.extend import methods
from posbench.errors import RunFailed, Undefined
from posbench.evaluation.protocols import Integers
from posbench.evaluation.subject import Floats, Ranked, Varied
from posbench.evaluation.trained import nll_of, ranked_by
from posbench.evaluation.variants import Variant, parse_choice
from posbench.huggingface import attention, rope
from posbench.huggingface.folder import Checkpoint


@dataclasses.dataclass(frozen=True, eq=False)
class HuggingFaceModel:
    """A model that was trained elsewhere. Extensions and windows give copies that share its weights."""

    checkpoint: Checkpoint
    model: Any  # the library's model
    name: str
    train_length: int
    device: torch.device  # device of the model
    precision: str  # fp32, bf16 or fp16
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
        nll = nll_of(self._logits, self._hidden(inputs, scored).flatten(0, 1), targets.flatten())
        return nll.view(-1, scored).cpu().double().numpy()

    @torch.no_grad()
    def ranked(self, ids: Integers, candidates: Integers, first: int) -> Ranked:
        hidden = self._hidden(machine.sent(torch.from_numpy(ids[:, :-1]), self.device), candidates.shape[1])
        return ranked_by(self._logits, hidden, torch.from_numpy(candidates))

    def varied(self, variant: Variant, length: int) -> Varied:
        family, config = self.checkpoint.family, self.config
        table = config.max_position_embeddings if family.position == "learned" else length
        if length > table:
            raise Undefined(f"{self.checkpoint.kind} has a table of {table} positions: longer inputs are undefined")
        if variant.window is not None and not family.narrows:
            raise Undefined(f"transformers runs {self.checkpoint.kind} without posbench's attention: no windows")
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
        if not rope.agrees(rope.rebuilt(self.model, extension.config), extension.turns, length):
            raise Undefined(f"transformers computes other frequencies for '{text}' than its definition")
        return extension

    def _hidden(self, inputs: Tensor, last: int) -> Tensor:
        """Hidden states (B, last, D) of the last tokens of inputs (B, C)."""
        if self.first_token is not None:
            inputs = inputs.clone()
            inputs[:, 0] = self.first_token
        rope.restore(self.reading)
        if self.extension is not None:  # shorter inputs use the frequencies of their length
            rope.difference(self.reading, self.extension.turns, self.length)
        with attention.narrowed(self.window, self.sinks):
            read = self.reading.base_model(input_ids=inputs, use_cache=False)
        self.told(inputs.numel())
        hidden: Tensor = read.last_hidden_state[:, -last:]
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits in fp32 in every precision of the model."""
        logits = F.linear(hidden.float(), *self._head)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @functools.cached_property
    def _head(self) -> tuple[Tensor, Tensor | None]:
        head = self.model.get_output_embeddings()
        return head.weight.float(), None if head.bias is None else head.bias.float()


def extension_of(checkpoint: Checkpoint, config: Any, text: str, length: int, train_length: int) -> rope.Extension:
    """The configuration of a model under an extension.

    Raises:
        UserError: the extension is mistyped.
        Undefined: the model or transformers does not support it.
    """
    method, options = parse_choice(text)
    if checkpoint.family.position == "rope":
        return rope.extended(config, method, length, train_length, options)
    nothing = encodings.build("none", Shape(d_model=2, n_heads=1, n_layers=1, train_length=train_length))
    with contextlib.suppress(Undefined):  # a mistyped extension raises UserError here too
        methods.extended(nothing, method, length, train_length, **options)
    raise Undefined(f"{checkpoint.kind} has no rotary encoding: transformers extends only these")
