"""Train a model of transformers further (`posbench train start=FOLDER`): all weights,
or LoRA adapters by `peft`.
"""

import copy
import dataclasses
import functools
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputing

from posbench import files, machine
from posbench.config import compose
from posbench.config.overrides import by_key, ratios, read, split
from posbench.config.schema import EvaluationConfig, TrainedOn, TrainingElsewhere
from posbench.errors import Undefined, UserError
from posbench.evaluation.job import results_of
from posbench.huggingface import export
from posbench.huggingface.evaluate import (
    evaluate_into,
    precision_of,
    record,
    sections_of,
    subject_of,
    text_of,
)
from posbench.huggingface.load import (
    DTYPES,
    LENGTHS,
    TESTED,
    Source,
    find,
    position_of,
)
from posbench.huggingface.subject import forward
from posbench.randomness import derive
from posbench.rope import extension as rope
from posbench.rope.library import library, transformers
from posbench.run import MODEL, TOKENIZER, tracking
from posbench.run.run import Run
from posbench.terminal.signals import signals_as_errors
from posbench.training.step import Trainer
from posbench.training.train import begin, end, fit

logger = logging.getLogger(__name__)

# as in the papers of PI and YaRN; the last as in that of LoRA
RATE, UPDATES, LORA_RATE = 2e-5, 400, 2e-4
# Keys and groups that are for posbench's own models.
_OTHERS = (
    "model",
    "encoding",
    "training",
    "experiment",
    "evaluation",
    "data.tokenizer",
    "data.vocab_size",
    "runtime.compile",
    "runtime.processes",
)


def train_model(
    word: str,
    overrides: list[str],
    restart: bool = False,
    config_dir: Path | None = None,
) -> Path:
    """Train a model further, evaluate and save it; return the folder of results. The
    same call again continues.
    """
    source = find(word)
    config, extension = _config(source, overrides, config_dir)
    device = machine.current(machine.resolve(config.runtime.device))
    dtype = machine.resolve_precision(config.training.precision, device)
    machine.be_deterministic(device, config.runtime.deterministic)
    folder = Path(config.runtime.outputs) / config.study / config.id
    threads = machine.set_threads(config.runtime.threads)
    subject, precision = (
        subject_of(source, config, "fp32", device),
        precision_of(source, config.evaluation, device),
    )
    model = subject.model
    if extension:
        model = rope.extend_model(model, extension, config.training.train_length)
        model.config = extension.config
    tokens = text_of(config, config.runtime.cache)
    with (
        Run.open(
            folder, config, ["posbench", "train", *overrides], restart=restart
        ) as run,
        signals_as_errors(),
    ):
        tracking.mirror(config, run, results_of)
        begin(
            run,
            config,
            tokens,
            machine.dtype_name(dtype),
            device=str(device),
            threads=threads,
        )
        record(run, subject, tokens, config.reading)
        with machine.out_of_memory_as_failure(
            "a smaller training.batch_size, with more training.accumulation,"
        ):
            if config.lora:
                model = with_adapters(model, config.lora, config.seed)
            trainer = Trainer(
                Learning(model, subject.first_token, config.runtime.checkpointing),
                config,
                device,
                dtype,
            )

            def merged_model() -> Any:
                return copy.deepcopy(model).merge_and_unload() if config.lora else model

            # with weights rounded as in the saved folder
            def evaluate(step: int, settings: EvaluationConfig) -> None:
                saved = cast_weights(
                    merged_model(), DTYPES[source.precision], DTYPES[precision]
                )
                trained_subject = dataclasses.replace(
                    subject, model=saved, precision=precision
                )
                evaluate_into(
                    run,
                    trained_subject,
                    tokens,
                    settings,
                    step,
                    step * config.training.tokens_per_step,
                )

            fit(
                trainer,
                tokens.batches(config.training, config.seed),
                tokens,
                config,
                run,
                evaluate,
            )
        # makes room for copies of the weights
        trainer.optimizer.zero_grad(set_to_none=True)
        with machine.out_of_memory_as_failure(
            "the same command again, which goes on from the trained weights,"
        ):
            evaluate(config.training.steps, config.evaluation)
            if not (run.folder / MODEL).exists():
                _save(run, merged_model(), source, config)
            logger.info("the trained model, for transformers: %s", run.folder / MODEL)
        end(run, config)
    return folder


def _config(
    source: Source, words: list[str], config_dir: Path | None
) -> tuple[TrainedOn, rope.Extension | None]:
    """Return the configuration that the words ask for, and the model's extension, if
    any.
    """
    start, keys = f"start={source.origin}", {split(word)[0] for word in words}
    if source.kind not in TESTED:
        kinds = ", ".join(TESTED)
        raise UserError(
            f"{start}: {source.kind} models can be evaluated, not trained further:"
            f" expected {kinds}"
        )
    if wrong_key := next(
        (key for key in keys if key in _OTHERS or key.startswith("model.")), None
    ):
        raise UserError(
            f"{wrong_key} cannot be set beside {start}: a HuggingFace model keeps its"
            " architecture"
        )
    texts = by_key(words)
    method = texts.pop("encoding", None)
    del texts["start"]
    options = {
        key.partition(".")[2]: read(texts.pop(key))
        for key in list(texts)
        if key.startswith("encoding.")
    }
    start_length, bos = (
        read(texts.pop("start.train_length", str(source.train_length))),
        texts.pop("bos", None),
    )
    lora = read(texts.pop("lora", "null"))
    for key, number, minimum in (
        ("start.train_length", start_length, 2),
        ("lora", 1 if lora is None else lora, 1),
    ):
        if type(number) is not int or number < minimum:
            raise UserError(f"{start}: expected {key}=N, which is {number}")
    for key in ("training.train_length", "training.tokens"):
        if key not in texts:
            raise UserError(
                f"expected {key}=N, a number of tokens: for a HuggingFace model it has"
                " no default"
            )
    defaults = {
        "study": compose.STUDY,
        "training.batch_size": "1",
        "training.accumulation": "1",
        "at_tokens": "0",
    }
    defaults |= {"training.learning_rate": str(LORA_RATE if lora else RATE)} | texts
    base = compose.single(
        [f"{key}={text}" for key, text in defaults.items()], config_dir
    )
    training, evaluation = base.training, base.evaluation
    length, tokens = training.train_length, training.tokens
    if any(len(stage) > 2 for stage in training.lengths):
        raise UserError(
            "training.lengths: expected [share,length] alone, without windows, beside"
            f" {start}"
        )
    if "training.accumulation" not in texts:
        accumulation = max(1, round(tokens / UPDATES / length / training.batch_size))
        training = dataclasses.replace(training, accumulation=accumulation)
    if "training.warmup_tokens" not in texts:
        training = dataclasses.replace(training, warmup_tokens=tokens // 20)
    if not {"evaluation.length", "evaluation.ratios"} & texts.keys():
        lengths = ratios([start_length, length, 2 * length, 4 * length], base)
        evaluation = dataclasses.replace(evaluation, ratios=tuple(lengths))
    extension = _extension(source, length, start_length, method, options)
    shared: dict[str, Any] = {
        name: getattr(base, name) for name in ("study", "seed", "tracking", "runtime")
    }
    shared |= sections_of(
        source, extension.config if extension else source.config, base.data, bos, method
    )
    settings = {
        "start": TrainingElsewhere(start_length),
        "training": training,
        "evaluation": evaluation,
        "lora": lora,
    }
    return TrainedOn(**shared, **settings), extension


def _extension(
    source: Source,
    length: int,
    start_length: int,
    method: str | None,
    options: dict[str, Any],
) -> rope.Extension | None:
    """Return the requested extension to a new training length, if any; UserError if a
    position table is too short.
    """
    rows = getattr(source.config, "max_position_embeddings", 0)
    if position_of(source.config) == "learned" and length > rows:
        raise UserError(
            f"training.train_length is {length:,}: {source.kind} has a table of"
            f" {rows:,} positions"
        )
    if method is None and not options:
        return None
    if method is None and options.keys() != {"base"}:
        raise UserError(
            f"encoding.{min(options)}: expected extension=NAME beside it, or"
            " encoding.base alone"
        )
    try:
        return rope.extension(
            source.config,
            method or "abf",
            length,
            start_length,
            options,
            every_length=True,
        )
    except Undefined as error:
        raise UserError(f"extension={method or 'abf'}: {error}") from None


class Learning(nn.Module):
    """A model's loss as training calls it, without dropout. `recomputed`: blocks run
    again in the backward pass.
    """

    def __init__(
        self, model: Any, first_token: int | None, recomputed: bool = False
    ) -> None:
        super().__init__()
        self.model, self.first_token = model, first_token
        self.eval()
        layer = transformers().modeling_layers.GradientCheckpointingLayer
        recompute = functools.partial(
            recomputing, use_reentrant=False, preserve_rng_state=False
        )
        for block in model.modules() if recomputed else ():
            # the library's own switch also turns on dropout
            if isinstance(block, layer):
                block.forward = functools.partial(recompute, block.forward)

    def train(self, mode: bool = True) -> "Learning":
        super().train(False)
        return self

    def forward(self, ids: Tensor, labels: Tensor, **unused: Any) -> Tensor:
        """Return mean negative log-likelihood, in nats per token, of labels (B, T)
        after ids (B, T).
        """
        return F.cross_entropy(
            forward(self.model, ids, self.first_token).flatten(0, -2).float(),
            labels.flatten(),
        )

    def state_dict(self, *unused: Any, **also: Any) -> Any:
        """Return the parameters that are trained, by name; all others are those of the
        model's folder.
        """
        return {
            name: parameter.detach()
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }

    def load_state_dict(  # type: ignore[override]
        self, state: Mapping[str, Any], *unused: Any, **also: Any
    ) -> None:
        for name, parameter in self.state_dict().items():
            parameter.copy_(state[name])


def with_adapters(model: Any, rank: int, seed: int) -> Any:
    """Add LoRA adapters to all linear layers but the head, in place, and return the
    model; only the adapters learn.
    """
    peft = library("peft", "posbench-runner[lora]")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns of GPT-2's layers, but treats them correctly
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(derive(seed, "lora"))
        return peft.get_peft_model(model, config)


def cast_weights(
    model: Any, *dtypes: torch.dtype, device: torch.device | None = None
) -> Any:
    """Return a copy with weights cast to these dtypes one after the other, or the model
    itself if nothing changes.
    """
    device = device or model.device
    if device == model.device and all(dtype == model.dtype for dtype in dtypes):
        return model
    weights = {}
    for weight in model.parameters():
        values = functools.reduce(
            lambda tensor, dtype: tensor.to(dtype), dtypes, weight.detach()
        )
        weights[id(weight)] = nn.Parameter(values.to(device), requires_grad=False)
    return copy.deepcopy(model, weights).to(device)


def _save(run: Run, model: Any, source: Source, config: TrainedOn) -> None:
    """Save the model as a folder like the one that it came from, read that again, and
    compare logits.
    """
    dtype, cpu, length = (
        DTYPES[source.precision],
        torch.device("cpu"),
        config.training.train_length,
    )
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    with files.atomic_folder(run.folder / MODEL, size) as new:
        saved = copy.copy(cast_weights(model, dtype, device=cpu))
        saved.config = library = copy.deepcopy(saved.config)
        parameters = library.rope_parameters if position_of(library) == "rope" else {}
        kind = parameters.get("full_attention", parameters).get("rope_type")
        # cached keys would have a shorter text's frequencies
        library.use_cache = kind not in ("dynamic", "longrope")
        # `dynamic` starts from this setting
        if kind != "dynamic" and position_of(library) != "learned":
            key = next((key for key in LENGTHS if hasattr(library, key)), "seq_length")
            setattr(library, key, max(length, source.settings.get(key) or 0))
        saved.generation_config = transformers().GenerationConfig.from_model_config(
            library
        )
        saved.save_pretrained(new)
        changes: dict[str, Any] = {
            "tokenizer_config.json": {"model_max_length": length}
        }
        changes["generation_config.json"] = (
            {} if library.use_cache else {"use_cache": False}
        )
        for name in (
            TOKENIZER,
            "special_tokens_map.json",
            "chat_template.jinja",
            *changes,
        ):
            if (source.folder / name).exists():
                content = (source.folder / name).read_bytes()
                if name in changes:
                    content = json.dumps(
                        json.loads(content) | changes[name], indent=2
                    ).encode()
                (new / name).write_bytes(content)
        trained = cast_weights(model, dtype, torch.float32, device=cpu)
        lengths = [
            min(tokens, length)
            for tokens in (1, export.SHORT, config.start.train_length, length)
        ]
        agreements = export.compare(
            new, lambda ids: forward(trained, ids), config.data.vocab_size, lengths
        )
        about = (
            f"`{config.model.source}`, trained further by posbench at **{length:,}"
            f" tokens**, with `{run.record['command']}`. The licence and the limits of"
            " that model hold for it, too."
        )
        export.write_card(new, run.folder, config, about, agreements)
