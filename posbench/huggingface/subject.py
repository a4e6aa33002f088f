"""A model of transformers as the subject of an evaluation."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench import encodings, machine
from posbench.encodings.base import Shape
from posbench.encodings.extend import methods
from posbench.errors import RunFailed, Undefined, UserError
from posbench.evaluation.protocols import Integers
from posbench.evaluation.subject import Floats, Ranked, Varied
from posbench.evaluation.variants import Variant, parse_choice
from posbench.huggingface import attention, rope
from posbench.huggingface.folder import Checkpoint
from posbench.huggingface.package import line
from posbench.randomness import generator

_MOST_LOGITS = 2**27  # held at once, unless a single window has more
_SHORT, _NARROW = 64, 4  # tokens that checks read, and see through a window
_SHARE = {"fp32": 1e-3, "bf16": 0.15, "fp16": 0.15}  # of the spread of logits, by which equal ones may differ


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
        nll = [
            F.cross_entropy(self.logits(part[:, :-1], scored).transpose(1, 2), part[:, -scored:], reduction="none")
            for part in torch.split(machine.sent(torch.from_numpy(ids), self.device), self._at_once(scored))
        ]
        return torch.cat(nll).cpu().double().numpy()

    @torch.no_grad()
    def ranked(self, ids: Integers, candidates: Integers, first: int) -> Ranked:
        answers, nll, likeliest = candidates.shape[1], [], []
        parts = (
            torch.split(torch.from_numpy(each).to(self.device), self._at_once(answers)) for each in (ids, candidates)
        )
        for windows, tokens in zip(*parts, strict=True):
            logits = self.logits(windows[:, :-1], answers)
            nll.append(-logits.log_softmax(-1).gather(2, tokens).cpu())
            likeliest.append(logits.argmax(-1).cpu())
        return Ranked(torch.cat(nll).double().numpy(), torch.cat(likeliest).numpy())

    def varied(self, variant: Variant, length: int) -> Varied:
        kind, family = self.checkpoint.kind, self.checkpoint.family
        position = position_of(self.checkpoint, self.config)
        if position == "learned" and length > (rows := self.config.max_position_embeddings):
            raise Undefined(f"{kind} has a table of {rows} positions: longer inputs are undefined")
        if family is None and position != "rope" and length > self.train_length:
            raise Undefined(f"{kind} is no tested kind, and has no RoPE: its inputs may end at {self.train_length}")
        if variant.window is not None and not self._narrows:
            raise Undefined(f"transformers does not narrow all of {kind} by masks: no windows")
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
        """The library's configuration; of a model of several parts that of its text part."""
        return self.model.config.get_text_config()

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
        try:
            agrees = rope.agrees(rope.rebuilt(self.model, extension.config), extension.turns, length)
        except Exception as error:  # a kind's own module may refuse a type of RoPE, in any way
            raise Undefined(f"transformers cannot extend {self.checkpoint.kind} by '{text}': {line(error)}") from None
        if not agrees:
            raise Undefined(f"transformers computes other frequencies for '{text}' than its definition")
        return extension

    @torch.no_grad()
    def logits(self, inputs: Tensor, last: int) -> Tensor:
        """The model's own logits (B, last, V) of the last tokens of inputs (B, T), in fp32."""
        if self.first_token is not None:
            inputs = inputs.clone()
            inputs[:, 0] = self.first_token
        rope.restore(self.reading)
        if self.extension is not None:  # shorter inputs use the frequencies of their length
            rope.difference(self.reading, self.extension.turns, self.length)
        keeps = "logits_to_keep" in inspect.signature(type(self.model).forward).parameters
        with attention.narrowed(self.window, self.sinks):
            read = self.reading(input_ids=inputs, use_cache=False, **({"logits_to_keep": last} if keeps else {}))
        self.told(inputs.numel())
        logits: Tensor = read.logits[:, -last:]
        return logits.float()

    def _at_once(self, scored: int) -> int:
        """Windows of which logits are held at once."""
        return max(1, _MOST_LOGITS // (scored * int(self.config.vocab_size)))

    def refuse_not_causal(self) -> None:
        """Raise UserError unless logits are finite, and later tokens change no earlier ones."""
        ids, others = torch.split(self._random_tokens(), 1)
        length, half = ids.shape[1], ids.shape[1] // 2
        later = torch.cat((ids[:, :half], others[:, half:]), dim=1)
        try:
            one, other = (self.logits(each, length)[:, :half] for each in (ids, later))
        except Exception as error:
            if machine.is_out_of_memory(error):
                raise
            raise UserError(f"{self.checkpoint.folder}: transformers cannot run it: {line(error)}") from None
        if not one.isfinite().all():
            raise UserError(f"{self.checkpoint.folder}: its logits are not finite in {self.precision}")
        if self._differ(one, other):
            raise UserError(f"{self.checkpoint.folder} is no causal model: later tokens change its earlier logits")

    @functools.cached_property
    def _narrows(self) -> bool:
        """Whether a window hides tokens: not those that a recurrent state keeps."""
        if getattr(self.model, "_is_stateful", False):
            return False
        ids = self._random_tokens()[:1]
        return self._differ(self.logits(ids, 1), dataclasses.replace(self, window=_NARROW).logits(ids, 1))

    def _random_tokens(self) -> Tensor:
        size, vocabulary = (2, min(_SHORT, self.train_length)), int(self.config.vocab_size)
        return torch.randint(vocabulary, size, generator=generator(0, "check", vocabulary)).to(self.device)

    def _differ(self, one: Tensor, other: Tensor) -> bool:
        """Whether logits differ by more than rounding."""
        return not bool((one - other).square().mean().sqrt() <= _SHARE[self.precision] * one.std())


def position_of(checkpoint: Checkpoint, config: Any) -> str:
    """How a model encodes positions: rope, learned or alibi; other for untested kinds without RoPE."""
    if checkpoint.family is not None:
        return checkpoint.family.position
    return "rope" if getattr(config, "rope_parameters", None) else "other"


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
