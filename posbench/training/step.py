"""One update of the weights: learning rate, optimizer, gradients, and whether its pieces are compiled."""

import dataclasses
import inspect
import math
import os
import shutil
import sys
from typing import Any

import torch
from torch import Tensor, nn

from posbench import machine
from posbench.config.external import Trains
from posbench.config.schema import Config, TrainingConfig
from posbench.data.batches import Batch
from posbench.encodings.base import Encoding
from posbench.errors import RunFailed
from posbench.model.gpt import GPT
from posbench.processes import World
from posbench.randomness import generator

# Operations in matrix products per CPU thread: minutes of training, which make up for the seconds of the start.
PAYS_FROM = 2e14


def learning_rate(step: int, total: int, training: TrainingConfig) -> float:
    """The learning rate of update `step` (from 0) of `total`: a pure function, so resuming cannot lose it.

    Linear warm-up, then a cosine down to `final_learning_rate` x peak; or a constant whose last `decay_fraction`
    falls linearly to it.
    """
    warmup = training.warmup_steps
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    final = training.final_learning_rate
    if training.schedule == "cosine":
        progress = (step - warmup) / max(1, total - 1 - warmup)
        share = final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    elif training.decay_fraction == 0:
        share = 1.0
    else:
        fall = min(training.decay_fraction * total, total - 1 - warmup)  # updates
        share = final + (1 - final) * min(1.0, (total - 1 - step) / max(1.0, fall))
    return training.learning_rate * share


class _AdamW(torch.optim.AdamW):
    """Torch's own, never compiled, without the decorators that would load its compiler to keep it out.

    Those imports are a third of the processor time of a start, where nothing else needs them.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def optimizer_for(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on the model's matrices only: never on norms, nor on an encoding's parameters.

    Parameters with a learning rate of their own (`Encoding.rates`) have groups of their own, `times` with the factor.
    """
    encodings = [module for module in model.modules() if isinstance(module, Encoding)]
    own = {one.get_parameter(name): times for one in encodings for name, times in one.rates.items()}
    matrices = [p for name, p in model.named_parameters() if p.dim() >= 2 and not name.startswith("encoding.")]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or name.startswith("encoding.")]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": [p for p in others if p not in own], "weight_decay": 0.0},
    ]
    for times in sorted(set(own.values())):
        groups.append({"params": [p for p in own if own[p] == times], "weight_decay": 0.0, "times": times})
    return _AdamW(
        [group for group in groups if group["params"]], lr=training.learning_rate, betas=training.betas, fused=True
    )


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model and all that its updates share."""

    model: nn.Module  # called as `GPT.forward`
    optimizer: torch.optim.Optimizer
    device: torch.device
    dtype: torch.dtype  # of matrix products
    training: TrainingConfig
    seed: int  # of random positions
    failed: Tensor  # (), on the device: 1 after an update that was not finite; later updates are left out
    scale: torch.amp.GradScaler | None = None  # in fp16
    world: World = dataclasses.field(default_factory=World)  # the processes that share each batch


def learner_for(
    model: nn.Module, config: Trains, device: torch.device, dtype: torch.dtype, world: World | None = None
) -> Learner:
    """The learner of a model that is on its device already."""
    training, world = config.training, world or World()
    if isinstance(model, GPT):
        model.compiles = is_compiled(config, device, world)
    return Learner(
        model=model,
        optimizer=optimizer_for(model, training),
        device=device,
        dtype=dtype,
        training=training,
        seed=config.seed,
        failed=torch.zeros((), device=device),
        scale=torch.amp.GradScaler(device.type) if dtype == torch.float16 else None,
        world=world,
    )


def is_compiled(config: Trains, device: torch.device, world: World) -> bool:
    """Whether the compiler serves a run.

    `auto` compiles what it was measured to make faster by more than its start takes (docs/results.md): on CPUs with
    a C++ compiler, blocks of RMSNorm and SwiGLU, if there are minutes to train. GPT blocks gained nothing, and on other
    devices nothing was measured. It follows from the configuration and the machine, so a continued run does the same.

    Args:
        world: the processes that share the work; threads are as set in this one.
    """
    if not isinstance(config, Config):
        return False  # a model of transformers runs as it is
    asked, model = config.runtime.compile, config.model
    if asked != "auto":
        return asked
    if device.type != "cpu" or (model.norm, model.mlp) != ("rmsnorm", "swiglu"):
        return False
    vocabulary = config.data.vocab_size if config.data.tokenizer == "bpe" else 257
    blocks = model.n_layers * (4 * model.d_model + 3 * model.hidden_width)
    operations = 6 * model.d_model * (blocks + vocabulary) * config.training.tokens
    if operations < PAYS_FROM * torch.get_num_threads() * world.size:
        return False
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of an update, possibly still being computed on CUDA: reading it waits, nothing else does."""

    step: int
    rate: float
    # Loss, gradient norm, whether an update failed up to this one, whether this was left out; then states of processes.
    numbers: Tensor
    arrived: torch.cuda.Event | None  # on the host; None = no device to wait for
    learner: Learner

    def read(self) -> tuple[float, float]:
        """The mean loss in nats per scored token and the gradient norm before clipping.

        From now on the world knows the states of its processes in that update.

        Raises:
            RunFailed: the loss or the gradient is not finite. The weights are as they were before the update, whatever
                updates were begun after it.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, failed, _, *states = self.numbers.tolist()
        self.learner.world.hear(states)
        if self.learner.scale is not None and not math.isfinite(norm):
            failed = failed or self.learner.scale.get_scale() < 1  # else a smaller scale may mend it
        why = (
            f"(learning rate {self.rate:.3g}): stopped before the update; a lower training.learning_rate usually helps"
        )
        if self.step == 0:
            why = "before any update, so not by the learning rate: check what the encoding's hooks compute"
        for what, number in (("loss", loss), ("gradient norm", norm)) if failed else ():
            if not math.isfinite(number):
                raise RunFailed(f"{what} is {number} at step {self.step + 1} {why}", reason="diverged")
        return loss, norm


def update(learner: Learner, batch: Batch, step: int, rate: float) -> tuple[float, float]:
    """One optimizer step, as `begin_update`, and its loss and gradient norm, as `Outcome.read`."""
    return begin_update(learner, batch, step, rate).read()


def begin_update(learner: Learner, batch: Batch, step: int, rate: float) -> Outcome:
    """Launch one optimizer step; the host does not wait for its result.

    Each part of the batch counts by its share of the scored tokens, so that accumulation changes memory alone.

    Args:
        batch: the whole batch; of several processes, the rows of this one (`batches.own_rows`).
        step: number of the update, from 0; random positions are drawn from it.
        rate: the learning rate.

    Raises:
        ValueError: no label of the batch is scored.
    """
    n_scored = batch.n_scored if batch.n_scored_by_all is None else batch.n_scored_by_all
    if not n_scored:
        raise ValueError(f"the batch of step {step + 1} has no label that is scored")
    tell_progress(learner.model, step / learner.training.steps)
    parts = [part.to(learner.device) for part in batch.parts(learner.training.accumulation)]
    total = torch.zeros((), device=learner.device)
    learner.optimizer.zero_grad(set_to_none=True)
    for part in parts:
        # The number of such parts in the batch. Dividing by it is exact when parts are equal.
        times = n_scored / part.n_scored if part.n_scored else math.inf
        with machine.autocast(learner.device, learner.dtype):
            draw = generator(learner.seed, "positions", step, device=learner.device)  # the same for all parts
            given = {"n_scored": part.n_scored, "positions": part.positions, "generator": draw}
            loss: Tensor = learner.model(part.ids, part.labels, **given) / times
        (loss if learner.scale is None else learner.scale.scale(loss)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    total, states = learner.world.sum_gradients(list(learner.model.parameters()), total)
    for group in learner.optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)
    numbers, arrived = _step(learner, total), None
    numbers = numbers if states is None else torch.cat((numbers, states))
    if numbers.device.type == "cuda":
        numbers, arrived = numbers.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
    return Outcome(step, rate, numbers, arrived, learner)


def tell_progress(model: nn.Module, done: float) -> None:
    """Pass training progress in [0, 1] to the model's encoding and to encodings inside it."""
    for module in model.modules():
        if isinstance(module, Encoding):
            module.set_progress(done)


def _step(learner: Learner, loss: Tensor) -> Tensor:
    """Clip, and step if all is finite; returns what `Outcome.numbers` is."""
    scale, parameters = learner.scale, list(learner.model.parameters())
    if scale is not None:
        scale.unscale_(learner.optimizer)
    norm = torch.nn.utils.clip_grad_norm_(parameters, learner.training.clip)
    lost, infinite = (~torch.stack((loss, norm)).isfinite()).float()
    learner.failed.copy_(learner.failed.maximum(lost if scale is not None else lost.maximum(infinite)))
    left_out = infinite.maximum(learner.failed)
    numbers = torch.stack((loss, norm, learner.failed, left_out))
    if scale is not None:
        scale.step(learner.optimizer)  # unless a gradient overflowed
        scale.update()
        return numbers
    if loss.device.type == "mps":  # no word on whether its fused optimizer looks at `found_inf`
        numbers = numbers.cpu()
        if numbers[-1]:
            return numbers
    else:
        learner.optimizer.found_inf = left_out  # type: ignore[attr-defined]
    learner.optimizer.step()
    return numbers
