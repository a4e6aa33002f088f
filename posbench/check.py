"""`posbench check`: whether an encoding keeps its contract, tried on a small model
without data, in seconds.

Its rules are those of training (`evaluation/contract.py`), and further ones that would
cost a run too much. All that they find is printed, a line each.
"""

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posbench import bench, files, machine
from posbench.config.overrides import WORDS, by_key
from posbench.config.schema import Config
from posbench.config.shipped import GROUPS
from posbench.data.tokenizer import raw_bytes
from posbench.encodings import own
from posbench.encodings.base import Encoding
from posbench.encodings.own import HookError
from posbench.errors import PosbenchError, UserError
from posbench.evaluation import contract, subjects
from posbench.evaluation.contract import Findings, Trial, at_fault, hidden, without
from posbench.evaluation.requests import lengths_of
from posbench.evaluation.subjects import TrainedGPT
from posbench.launch import compose
from posbench.model.definition import by_definition
from posbench.model.gpt import GPT, build
from posbench.randomness import generator
from posbench.terminal.console import plural
from posbench.typed import rewritten

# the model in which an encoding is tried
SMALL = [
    "model.n_layers=2",
    "model.d_model=64",
    "model.n_heads=4",
    "training.batch_size=8",
    "device=cpu",
    "threads=1",
]
SHORT, LONG = 20, 48  # tokens of an input, and of one that begins with it
ROWS = 160  # tokens whose rows are two blocks in training
LAST = 5  # rows of an evaluation that scores few tokens
ROUNDS, TURN_SECONDS = 5, 0.05  # of the speed
TEMPLATE = Path(own.__file__).with_name("template.txt")

Rule = Callable[[Trial], Findings]


class WrongDevice(RuntimeError):
    """Raised where a tensor on the CPU meets one of the model's device."""


class Untried(UserError):
    """What could not be tried, and why. It is no fault."""


def main(words: list[str]) -> None:
    """Print what is wrong with an encoding, a line each, or what was tried. Raises
    PosbenchError for faults.
    """
    machine.set_threads(1)
    try:
        name, config = configured(words)
        tried = trial_of(config)
    except HookError as error:  # it cannot be built
        print(error)
        raise PosbenchError("1 fault, and nothing else could be tried") from None
    with torch.random.fork_rng():
        errors = findings(tried)

    for finding in errors:
        print(finding)
    faults = [finding for finding in errors if not isinstance(finding, Untried)]
    if faults:
        raise PosbenchError(f"{name}: {plural(len(faults), 'fault')}")
    lengths = f"lengths {min(tried.lengths)} to {max(tried.lengths):,}"
    devices = "" if errors else "devices, "
    print(f"{name}: no fault. Tried: shapes and dtypes, {lengths}, {devices}{_TRIED}")
    speed = speed_beside_rope(config)
    print(f"{name}: trains at {speed:.2f} of the speed of RoPE, on a small model")


def configured(words: list[str]) -> tuple[str, Config]:
    """Return the name of an encoding and its configuration in the small model. Words
    are those of `posbench train`; NAME stands for encoding=NAME, and an option may be
    typed without `encoding.`.
    """
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)}: expected one encoding at a time")
    typed = []
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals:
            word = rewritten(word, f"encoding={word}")
        elif "." not in key and key not in (*WORDS, *GROUPS, "seed"):
            word = rewritten(word, f"encoding.{word}")
        typed.append(word)
    by_full_key = by_key(typed)
    name = by_full_key.get("encoding")
    if name is None:
        raise UserError(
            "expected an encoding: posbench check mine.py:Mine, or posbench check rope"
        )
    small = [word for word in SMALL if not by_full_key.keys() & by_key([word]).keys()]
    return name, compose.single([*small, *typed])


def trial_of(config: Config) -> Trial:
    """Return an encoding in its model, ready to be tried. Raises UserError if it cannot
    be built.
    """
    tokenizer = raw_bytes()
    device = machine.resolve(config.runtime.device)
    model = build(config, tokenizer.vocab_size, tokenizer.texts).to(device)
    parts = [part for part in model.encoding.modules() if isinstance(part, Encoding)]
    guarded = contract.own_parts(model.encoding)  # users' classes are already
    for part in parts:
        if part not in guarded:
            part.__class__ = own.guarded(type(part))  # type: ignore[arg-type]
    contract.perturb(model.encoding)

    train_length = config.training.train_length
    subject = TrainedGPT(model, train_length, device, torch.float32, config.seed)
    asked = lengths_of(config.evaluation, train_length)
    return Trial(subject, parts, contract.in_order(asked, train_length))


def findings(tried: Trial) -> list[UserError]:
    """Return all that the rules find, each once.

    A rule goes on without a hook that it has found at fault, so that it finds others. A
    hook that fails is left out of all later rules, and one that makes outputs unequal
    of later comparisons: they would find it again.
    """
    found: dict[str, UserError] = {}
    failing = set[str]()
    unequal = set[str]()
    with own.collected() as survived:
        for rule in RULES:
            if failing and rule is contract.used:
                continue  # a hook that is left out reads no parameter
            left_out = failing | unequal if rule in COMPARISONS else set(failing)
            hooks: set[str] | None = None
            while hooks is None or hooks:
                with without(tried.parts, *left_out):
                    errors: list[UserError] = []
                    raised: list[UserError] = []
                    try:
                        errors.extend(rule(tried))  # what came before it raises stays
                    except UserError as error:
                        raised.append(error)
                    except RuntimeError:  # torch's, of a result in another precision
                        if not survived:
                            raise
                        raised.extend(survived)
                    overridden = [part.overridden for part in tried.parts]
                separate = frozenset().union(*overridden) & {*contract.SEPARATE}
                for finding in [*survived, *errors, *raised]:
                    text = str(finding)
                    # A failure at one length is met at others, and torch refuses the
                    # gradient of what was changed in place.
                    is_torchs = re.search("modified (inplace|by an inplace)", text)
                    known = "\n".join(found)
                    follows = is_torchs and "in place, which" in known
                    if text not in known and not follows:
                        found[text] = finding
                survived.clear()

                others = [] if rule in AT_ONCE else errors
                hooks = _hooks_of([*raised, *others]) & separate
                left_out |= hooks
                failing |= _hooks_of(raised)
                if rule in COMPARISONS:
                    unequal |= hooks
    return list(found.values())


def _hooks_of(errors: list[UserError]) -> set[str]:
    return {error.hook for error in errors if isinstance(error, HookError)}


def speed_beside_rope(config: Config) -> float:
    """Return the speed of training with an encoding as a share of that with RoPE."""
    tokenizer = raw_bytes()
    rope = dataclasses.replace(config, encoding=compose.single([]).encoding)
    updates = {}
    for name, each in {"rope": rope, "checked": config}.items():
        model = build(each, tokenizer.vocab_size, tokenizer.texts)
        updates[name] = bench.update_of(model, each, tokenizer.vocab_size)
    device = machine.resolve(config.runtime.device)
    seconds = bench.take_turns(updates, ROUNDS, device, TURN_SECONDS)
    return float((seconds["rope"] / seconds["checked"]).median())


# -- rules beside those of training
# --------------------------------------------------------------------------------------


def runs(tried: Trial) -> Findings:
    """Hooks run, and return what has the right shape and dtype."""
    with torch.no_grad():
        hidden(tried.model.train(), tried.ids())
    yield from ()


@torch.no_grad()
def alone(tried: Trial) -> Findings:
    """A row has the same outputs alone and beside others."""
    model = tried.model.eval()
    ids = tried.ids()[:, :-1]

    def fails() -> bool:
        positions = _positions(model, ids)
        of_last = None
        if positions is not None:
            of_last = positions[-1:]
        # the last row: the first one may be right by chance
        together = model.hidden(ids, positions)[-1:]
        by_itself = model.hidden(ids[-1:], of_last)
        return subjects.logits_differ(by_itself, together, "fp32")

    if fails():
        yield at_fault(
            tried,
            "a row alone has other outputs than beside others: expected nothing that"
            " depends on axis 0, the batch",
            fails,
        )


@torch.no_grad()
def of_any_length(tried: Trial) -> Findings:
    """The beginning of an input has the same outputs whatever the input's length,
    unless the encoding says that it has not.
    """
    model = tried.model.eval()
    encoding = model.encoding
    ids = tried.ids(LONG)[:, :-1]
    n_short = min(SHORT, ids.shape[1] // 2)
    if encoding.length_dependent:
        return

    def fails() -> bool:
        positions = _positions(model, ids)
        beginning = None
        if positions is not None:
            beginning = positions[:, :n_short]
        whole = model.hidden(ids, positions)[:, :n_short]
        short = model.hidden(ids[:, :n_short], beginning)
        return subjects.logits_differ(short, whole, "fp32")

    if fails():
        yield at_fault(
            tried,
            "outputs at the beginning of an input change with its length: expected"
            " nothing that depends on the number of tokens, or self.length_dependent ="
            " True in __init__",
            fails,
        )


def in_blocks(tried: Trial) -> Findings:
    """Rows that are computed in blocks, as in training, and the last rows alone, have
    the outputs of the definition, which computes all rows at once.
    """
    model = tried.model.eval()
    ids = tried.ids(ROWS, rows=2)[:, :-1]

    def fails() -> bool:
        positions = _positions(model, ids)
        with torch.no_grad():
            defined, _ = by_definition(model, ids, positions)
            last = model.hidden(ids, positions, last=LAST)
        in_training = model.hidden(ids, positions)
        return subjects.logits_differ(
            in_training, defined, "fp32"
        ) or subjects.logits_differ(last, defined[:, -LAST:], "fp32")

    if fails():
        yield at_fault(
            tried,
            "a block of rows has other outputs than the same rows among all: expected"
            " nothing that mixes rows, and layer.rows, layer.keys and layer.distance to"
            " say which rows and keys these are",
            fails,
        )


def unchanged(tried: Trial) -> Findings:
    """Use changes no parameter and no kept buffer, and no later output."""
    model = tried.model.eval()
    ids = tried.ids(LONG)
    state = copy.deepcopy(model.encoding.state_dict())

    def fails() -> bool:
        with torch.no_grad():
            before = hidden(model, ids[:, : SHORT + 1])
            hidden(model, ids)
            after = hidden(model, ids[:, : SHORT + 1])
        changed = contract.differ(before, after)
        for name, tensor in model.encoding.state_dict().items():
            if not torch.equal(tensor, state[name]):
                changed = True
        model.encoding.load_state_dict(state)
        return changed

    if fails():
        yield at_fault(
            tried,
            "use changes the encoding: expected its parameters, buffers and attributes"
            " to stay as they are",
            fails,
        )


def in_16_bits(tried: Trial) -> Findings:
    """The encoding works in a model whose matrix products are in bfloat16."""
    subject = dataclasses.replace(tried.subject, dtype=torch.bfloat16)
    tried.model.eval()
    ids = tried.ids().cpu().numpy()
    scored = np.ones((len(ids), ids.shape[1] - 1), np.bool_)
    try:
        logits = torch.cat([*subject.logits(ids, scored, 0)])
    except HookError as error:
        cure = ""
        if error.hook == "attend":
            cure = ": v has the dtype of the model: expected .to(v.dtype)"
        raise HookError(f"in bfloat16: {error}{cure}", error.hook) from error
    exact = torch.cat([*tried.subject.logits(ids, scored, 0)])
    if exact.isfinite().all() and not logits.isfinite().all():
        yield UserError(
            f"{tried.name}: logits are not finite in bfloat16, and are in fp32:"
            " expected numbers below 3e38 in attend"
        )


def on_the_models_device(tried: Trial) -> Findings:
    """Each tensor is on the device of the model.

    The model is moved to torch's device `meta`, whose tensors have no numbers. A tensor
    that stays on the CPU is noticed where it meets another one.
    """
    model = tried.model.eval()
    ids = tried.ids()[:, :-1].cpu()
    positions = _positions(model.cpu(), ids)
    if positions is None:
        positions = torch.arange(ids.shape[1])[None]
    meta = copy.deepcopy(model).to("meta")
    parts = [part for part in meta.encoding.modules() if isinstance(part, Encoding)]
    reason: Exception | None = None
    mode = _OneDevice()  # type: ignore[no-untyped-call]
    with contract.traced(parts) as results, torch.no_grad(), mode:
        try:
            by_definition(meta, ids.to("meta"), positions.to("meta"))
        except Exception as error:
            reason = error
    model.to(tried.subject.device)

    for place, hook, result in results:
        if result.device.type != "meta" and result.dim():
            yield HookError(
                f"{place}: gave a tensor on the CPU to a model elsewhere: {_MOVED}",
                hook,
            )
            return
    if reason is None:
        return
    if "WrongDevice" in str(reason) and isinstance(reason, HookError):
        yield reason
        return
    yield Untried(f"devices are not tried: {reason}")


class _OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise WrongDevice where tensors of two devices meet. A GPU takes single numbers
    of the CPU, and its indices.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = []
        for item in tree_leaves((args, kwargs)):
            if isinstance(item, Tensor) and item.dim():
                tensors.append(item)
        is_mixed = len({tensor.device.type for tensor in tensors}) > 1
        name = func.overloadpacket.__name__
        indexes = "index" in name and tensors[0].device.type == "meta"
        if is_mixed and not indexes and name not in ("copy_", "_to_copy"):
            raise WrongDevice(f"a tensor on the CPU meets the model's: {_MOVED}")
        return func(*args, **kwargs or {})


_MOVED = (
    "expected device=x.device where it is made, or self.register_buffer(...,"
    " persistent=False) in __init__"
)


def _positions(model: GPT, ids: Tensor) -> Tensor | None:
    """Return the positions of ids if the encoding chooses them; None: 0 .. T-1."""
    if "positions" not in model.encoding.hooks:
        return None
    rng = generator(0, "check", device=ids.device)
    return model.encoding.positions(ids, rng)


# Rules that compare outputs. They come first: an encoding may remember what it reads.
_EARLY: tuple[Rule, ...] = (
    contract.repeated,
    unchanged,
    contract.causal,
    contract.beside_others,
    alone,
    of_any_length,
)
AT_ONCE = (
    contract.of_finite_gradients,
    contract.with_gradients,
    contract.used,
)  # they report all in one pass
RULES: tuple[Rule, ...] = (
    runs,
    *_EARLY,
    *AT_ONCE,
    contract.at_lengths,
    in_16_bits,
    on_the_models_device,
    in_blocks,  # longer than the training length
)
COMPARISONS = (*_EARLY, in_blocks)
_TRIED = (
    "gradients of inputs and parameters, bfloat16, the same twice, nothing changed by"
    " use, causality, a row alone and beside others, the beginning of longer inputs,"
    " blocks of rows"
)


# -- a file to begin with
# --------------------------------------------------------------------------------------


def write_new(path: Path) -> str:
    """Write a commented encoding to begin with, and return its class. Raises UserError
    if there is such a file.
    """
    name = re.sub(r"\W", "", path.stem.title().replace("_", ""))
    if path.suffix != ".py" or not name.isidentifier():
        raise UserError(f"--new {path}: expected a Python file, such as mine.py")
    if path.exists():
        raise UserError(f"{path} is there already: expected a new file")
    text = TEMPLATE.read_text(encoding="utf-8")
    files.write(path, text.replace("Mine", name).replace("mine.py", str(path)).encode())
    return name
