"""Training a model of transformers further, `posbench train start=FOLDER`: to a folder of results with the new model.

A model's folder does not say how it was trained. Settings that are not typed are:

    learning_rate    2e-5, as Chen et al. (2023) and Peng et al. (2023) have it for PI and YaRN
    batches          single sequences, so many to an update that there are about 400 updates (those of YaRN)
    warm-up          the first twentieth of the tokens
    ratios           the length before and the new one, up to four times that
    at_tokens        0: what the stretch does before any training
"""

import copy
import dataclasses
import functools
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputing

from posbench import machine
from posbench.config import start
from posbench.config.external import TrainedOn, TrainingElsewhere
from posbench.config.overrides import pairs, read, split, value
from posbench.config.schema import EvaluationConfig
from posbench.errors import Undefined, UserError
from posbench.evaluation.job import results_of
from posbench.huggingface import export, rope
from posbench.huggingface.card import card
from posbench.huggingface.evaluate import described, evaluate_into, precision_of, record, subject_of, text_of
from posbench.huggingface.load import DTYPES, LENGTHS, TESTED, Source, find, position_of, transformers
from posbench.huggingface.subject import forward
from posbench.kernels.cross_entropy import cross_entropy
from posbench.run import MODEL, tracking
from posbench.run.rows import evaluation_rows, headline_split
from posbench.run.run import Run, Where, held_config
from posbench.terminal.signals import signals_as_errors
from posbench.training.step import learner_for
from posbench.training.train import begin, end, fit

logger = logging.getLogger(__name__)

RATE, UPDATES = 2e-5, 400
# Keys and groups that are for posbench's own models.
_OTHERS = ("model", "encoding", "training", "experiment", "evaluation", "data.tokenizer", "data.vocab_size",
           "runtime.compile", "runtime.processes")  # fmt: skip


def train_model(word: str, overrides: list[str], restart: bool = False, config_dir: Path | None = None) -> Path:
    """Train a model further, evaluate it, and save it as a folder of the same kind; repeated, it continues.

    Args:
        word: a folder, or a name on the hub.
        overrides: all settings as typed.

    Returns:
        The folder of results.

    Raises:
        UserError: the model, its tokenizer, the text or a setting cannot be used.
        RunFailed: the training diverged or ran out of memory or disk; what was computed is kept.
        Stopped: a signal asked for an end; the run was saved and can be continued.
    """
    source = find(word)
    config, extension = _asked(source, [text for text in overrides if not text.startswith("start=")], config_dir)
    device = machine.current(machine.resolve(config.runtime.device))
    dtype = machine.resolve_precision(config.training.precision, device)
    machine.be_deterministic(device, config.runtime.deterministic)
    folder = Path(config.runtime.outputs) / config.study / config.id
    if not restart:
        held_config(folder, config)
    threads = machine.set_threads(config.runtime.threads)
    subject = subject_of(source, config, "fp32", device, extension)
    model, precision = subject.model, precision_of(source, config.evaluation, device)
    tokens = text_of(config, config.runtime.cache)
    with (
        Run.open(folder, config, ["posbench", "train", *overrides], restart=restart) as run,
        signals_as_errors(),
    ):
        where = Where(device=str(device), dtype=machine.dtype_name(dtype), threads=threads)
        tracking.mirror(config, run, results_of)
        begin(run, config, tokens, where)
        with machine.out_of_memory_as_failure("a smaller training.batch_size, with more training.accumulation,"):
            loss = Learning(model, subject.first_token, config.runtime.checkpointing)
            learner = learner_for(loss, config, device, dtype)
            record(run, subject, tokens, config.reading)

            def evaluated(step: int, settings: EvaluationConfig) -> None:
                trained = step * config.training.tokens_per_step
                saved = rounded(model, DTYPES[source.precision], DTYPES[precision])  # the weights that its folder has
                now = dataclasses.replace(subject, model=saved, precision=precision)
                evaluate_into(run, now, tokens, settings, step, trained)

            batches = tokens.batches(config.training, config.seed)
            fit(learner, batches, tokens, config, run, where, evaluated)
        learner.optimizer.zero_grad(set_to_none=True)  # room for copies of the weights
        with machine.out_of_memory_as_failure("the same command again, which goes on from the trained weights,"):
            evaluated(config.training.steps, config.evaluation)
            if not (run.folder / MODEL).exists():
                _save(run, model, source, config)
            logger.info("the trained model, for transformers: %s", run.folder / MODEL)
        end(run, config)
    return folder


# -- what was asked for ------------------------------------------------------------------------------------------------


def _asked(source: Source, words: list[str], config_dir: Path | None) -> tuple[TrainedOn, rope.Extension | None]:
    """What is trained further and how, by what was typed.

    Raises:
        UserError: a setting that cannot be read, or that such a model cannot have.
    """
    from posbench.config import compose

    place, typed = f"start={source.given}", {split(word, "training.train_length=4096")[0] for word in words}
    if source.kind not in TESTED:
        known = ", ".join(TESTED)
        raise UserError(f"{place}: {source.kind} models can be evaluated, not trained further: expected {known}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{place}: a HuggingFace model is trained further in one process")
    if wrong := next((key for key in typed if key in _OTHERS or key.startswith("model.")), None):
        raise UserError(f"{wrong}: not beside {place}, a HuggingFace model that is trained as it is")
    given = pairs([start.spelt(word) for word in words])
    method = given.pop("encoding", None)
    options = {key.partition(".")[2]: read(given.pop(key)) for key in list(given) if key.startswith("encoding.")}
    before, bos = read(given.pop("start.train_length", str(source.train_length))), given.pop("bos", None)
    at_tokens = value("evaluation.at_tokens", given.pop("evaluation.at_tokens", "0"))
    if type(before) is not int or before < 2:
        raise UserError(f"{place}: expected start.train_length=N, the tokens that it was trained on at a time")
    for key in ("training.train_length", "training.tokens"):
        if key not in given:
            raise UserError(f"{key}: expected a number of tokens, which a HuggingFace model does not bring with it")
    usual = {"study": start.STUDY, "training.batch_size": "1", "training.learning_rate": str(RATE)} | given
    numbers = [value(key, usual[key]) for key in ("training.train_length", "training.tokens", "training.batch_size")]
    if all(type(number) is int and number > 0 for number in numbers):  # else it is refused where it is read
        length, tokens, batch_size = numbers
        accumulation = max(1, round(tokens / UPDATES / length / batch_size))
        usual = {"training.accumulation": str(accumulation), "training.warmup_tokens": str(tokens // 20)} | usual
        if not {"evaluation.length", "evaluation.ratios"} & given.keys():
            usual["evaluation.length"] = ",".join(map(str, sorted({before, length, 2 * length, 4 * length})))
    base = compose.single([f"{key}={text}" for key, text in usual.items()], config_dir)
    extension = _extension(source, base.training.train_length, before, method, options)
    config = TrainedOn(
        study=base.study,
        seed=base.seed,
        start=TrainingElsewhere(before),
        training=base.training,
        evaluation=dataclasses.replace(base.evaluation, at_tokens=tuple(at_tokens)),
        tracking=base.tracking,
        runtime=base.runtime,
        **described(source, extension.config if extension else source.config, base.data, bos, method),
    )
    return config, extension


def _extension(
    source: Source, length: int, before: int, method: str | None, options: dict[str, Any]
) -> rope.Extension | None:
    """The extension to a new training length, if one was typed; UserError if the model does not reach that length."""
    rows = getattr(source.config, "max_position_embeddings", 0)
    if position_of(source.config) == "learned" and length > rows:
        raise UserError(f"training.train_length is {length:,}: {source.kind} has a table of {rows:,} positions")
    if method is None and not options:
        return None
    if method is None and options.keys() != {"base"}:
        raise UserError(f"encoding.{min(options)}: expected extension=NAME beside it, or encoding.base alone")
    try:
        return rope.extension(source.config, method or "abf", length, before, options, every_length=True)
    except Undefined as error:
        raise UserError(f"extension={method or 'abf'}: {error}") from None


# -- the model ---------------------------------------------------------------------------------------------------------


class Learning(nn.Module):
    """The loss of a model as training calls it. It trains without dropout, as it is evaluated.

    Args:
        first_token: replaces the first token of every window; None: it is read as it stands.
        recomputed: keep only the input of each block for the backward pass, which computes the rest again.
    """

    def __init__(self, model: Any, first_token: int | None, recomputed: bool = False) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        super().__init__()
        self.model, self.first_token = model, first_token
        self.eval()
        for block in model.modules() if recomputed else ():
            if isinstance(block, GradientCheckpointingLayer):  # the library's own switch also turns on dropout
                block.forward = functools.partial(
                    recomputing, block.forward, use_reentrant=False, preserve_rng_state=False
                )

    def train(self, mode: bool = True) -> "Learning":
        super().train(False)
        return self

    def forward(self, ids: Tensor, labels: Tensor, **unused: Any) -> Tensor:
        """Mean negative log-likelihood, in nats per token, of labels (B, T) after ids (B, T)."""
        return cross_entropy(forward(self.model, ids, self.first_token), labels)

    def state_dict(self, *unused: Any, **also: Any) -> Any:
        """Each parameter once, under the library's name for it; buffers follow from the configuration."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any], *unused: Any, **also: Any) -> None:  # type: ignore[override]
        parameters = dict(self.named_parameters())
        if parameters.keys() != state.keys():
            raise RuntimeError("the names of its parameters are others")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])


def rounded(model: Any, *dtypes: torch.dtype, device: torch.device | None = None) -> Any:
    """A copy whose weights took these dtypes one after the other; the model itself if that changes nothing."""
    device = device or model.device
    if device == model.device and all(dtype == model.dtype for dtype in dtypes):
        return model
    weights = {}
    for weight in model.parameters():
        new = functools.reduce(lambda tensor, dtype: tensor.to(dtype), dtypes, weight.detach())
        weights[id(weight)] = nn.Parameter(new.to(device), requires_grad=False)
    return copy.deepcopy(model, weights).to(device)


def _save(run: Run, model: Any, source: Source, config: TrainedOn) -> None:
    """Save the model as a folder like the one that it came from, read that again, and compare logits.

    Raises:
        UserError: transformers computes other logits with what was written; nothing is left behind.
        RunFailed: no room on the disk.
    """
    dtype, cpu, length = DTYPES[source.precision], torch.device("cpu"), config.training.train_length
    with export.aside(run.folder / MODEL, sum(weight.numel() for weight in model.parameters()) * dtype.itemsize) as new:
        saved = copy.copy(rounded(model, dtype, device=cpu))
        saved.config = library = copy.deepcopy(saved.config)
        every = library.rope_parameters if position_of(library) == "rope" else {}
        kind = every.get("full_attention", every).get("rope_type")  # of layers that see everything, if kinds differ
        library.use_cache = kind not in ("dynamic", "longrope")  # cached keys would have a shorter text's frequencies
        if kind != "dynamic" and position_of(library) != "learned":  # `dynamic` starts from this setting
            key = next(key for key in LENGTHS if hasattr(library, key))
            setattr(library, key, max(length, source.settings.get(key) or 0))
        saved.generation_config = transformers().GenerationConfig.from_model_config(library)
        saved.save_pretrained(new)
        for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
            if (source.folder / name).exists():
                shutil.copyfile(source.folder / name, new / name)
        for name, changes in (
            ("generation_config.json", {} if library.use_cache else {"use_cache": False}),
            ("tokenizer_config.json", {"model_max_length": length}),
        ):
            if (source.folder / name).exists():
                export.write_json(new / name, json.loads((source.folder / name).read_bytes()) | changes)
        trained = rounded(model, dtype, torch.float32, device=cpu)
        lengths = [min(one, length) for one in (1, export.SHORT, config.start.train_length, length)]
        agreements = export.compare(new, lambda ids: forward(trained, ids), config.data.vocab_size, lengths)
        export.write_parity(new, agreements, run=config.id)
        about = (
            f"`{config.model.source}`, trained further by posbench at **{length:,} tokens**, with "
            f"`{run.record['command']}`. The licence and the limits of that model hold for it, too."
        )
        rows = evaluation_rows(run.folder)
        split = headline_split(rows, config.evaluation.split)
        rows = [row for row in rows if row.is_headline and row.kind == "plain" and row.split == split]
        (new / "README.md").write_text(card(config, config.id, about, rows, agreements))
