"""One update: what is scored, how parts of a batch add up, what is computed again, and
what is compiled.
"""

import copy
import dataclasses
import math
import sys
import time
from typing import Any

import pytest
import torch

from posbench.config.schema import Config, EncodingConfig
from posbench.data.batches import Batch
from posbench.errors import RunFailed
from posbench.model.gpt import GPT, build
from posbench.model.loss import IGNORED
from posbench.processes import World
from posbench.training.step import Clock, Trainer, begin_update, is_compiled
from posbench.training.validation import validate

V, B, T = 50, 6, 16
CPU = torch.device("cpu")
SWIGLU = {"norm": "rmsnorm", "mlp": "swiglu"}


def batch(step: int = 0, scored: list[int] | None = None) -> Batch:
    """Return a batch of random tokens; `scored`: how many labels of each sequence are
    scored.
    """
    draw = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(V, (2, B, T), generator=draw)
    for row, count in enumerate(scored or []):
        labels[row, torch.randperm(T, generator=draw)[count:]] = IGNORED
    return Batch.of(ids, labels)


def trainer(
    config: Config,
    accumulation: int = 1,
    dtype: torch.dtype = torch.float32,
    encoding: str = "",
    **runtime: Any,
) -> Trainer:
    training = dataclasses.replace(config.training, accumulation=accumulation)
    config = dataclasses.replace(
        config,
        training=training,
        runtime=dataclasses.replace(config.runtime, **runtime),
    )
    config = dataclasses.replace(
        config, encoding=EncodingConfig(encoding) if encoding else config.encoding
    )
    return Trainer(build(config, V), config, CPU, dtype)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def update(
    trainer: Trainer, batch: Batch, step: int = 0, rate: float = 1e-2
) -> tuple[float, float]:
    return begin_update(trainer, batch, step, rate).read()


def trained(
    trainer: Trainer, steps: int = 3
) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Return what updates return, and the weights after them."""
    return [update(trainer, batch(step), step) for step in range(steps)], weights(
        trainer
    )


def assert_gradients_are_close(
    first: Trainer, second: Trainer, relative: float = 1e-4
) -> None:
    for (name, p), q in zip(
        first.model.named_parameters(), second.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            q.grad, p.grad, atol=1e-6, rtol=relative, msg=lambda t, n=name: f"{n}: {t}"
        )


@pytest.mark.parametrize(
    ("parts", "scored"), [(3, [16, 3, 1, 0, 9, 16]), (2, [0, 0, 0, 0, 7, 2])]
)
def test_parts_with_unequal_numbers_of_scored_labels_take_the_step_of_the_whole(
    tiny_config, parts, scored
):
    whole = trainer(tiny_config)
    divided = trainer(tiny_config, accumulation=parts)
    assert update(divided, batch(0, scored)) == pytest.approx(
        update(whole, batch(0, scored)), rel=1e-5
    )
    assert_gradients_are_close(whole, divided)


def test_parts_share_the_random_positions_of_the_whole(tiny_config):
    whole, parts = (
        update(trainer(tiny_config, parts, encoding="randomized"), batch(0))[0]
        for parts in (1, 6)
    )
    assert parts == pytest.approx(whole, rel=1e-5)


def test_the_optimizer_takes_torchs_steps_and_goes_on_from_its_state(tiny_config):
    # whose table has its own rate
    ours, theirs, resumed = (trainer(tiny_config, encoding="t5") for _ in range(3))
    theirs.optimizer = torch.optim.AdamW(theirs.optimizer.param_groups, fused=True)
    assert trained(ours)[0] == trained(theirs)[0]
    state = copy.deepcopy(theirs.optimizer.state_dict())
    torch.testing.assert_close(ours.optimizer.state_dict(), state, rtol=0, atol=0)
    resumed.model.load_state_dict(theirs.model.state_dict())
    resumed.optimizer.load_state_dict(state)
    for each in (ours, theirs, resumed):
        trained(each)
    assert torch.equal(weights(ours), weights(theirs))
    assert torch.equal(weights(resumed), weights(theirs))


def test_t5s_table_alone_moves_ten_times_as_fast(tiny_config):
    fresh = trainer(
        dataclasses.replace(
            tiny_config, encoding=EncodingConfig("temperature", {"inner": "t5"})
        )
    )
    before = {name: p.detach().clone() for name, p in fresh.model.named_parameters()}
    update(fresh, batch(), rate=1e-3)
    # AdamW's first update moves a number by the rate, whatever its gradient; what has
    # none stays.
    farthest = {
        name: float((p.detach() - before[name]).abs().max())
        for name, p in fresh.model.named_parameters()
    }
    assert farthest.pop("encoding.inners.0.table") == pytest.approx(1e-2, rel=0.01)
    # weight decay adds a little
    assert max(farthest.values()) == pytest.approx(1e-3, rel=0.1)


def test_weight_decay_spares_norms_and_the_encodings_parameters(tiny_config):
    fresh = trainer(tiny_config, encoding="learned")
    decayed = {
        id(p)
        for group in fresh.optimizer.param_groups
        if group["weight_decay"]
        for p in group["params"]
    }
    names = {name for name, p in fresh.model.named_parameters() if id(p) in decayed}
    named = fresh.model.named_parameters()
    assert names == {
        name for name, p in named if p.dim() == 2 and not name.startswith("encoding.")
    }
    assert sum(len(group["params"]) for group in fresh.optimizer.param_groups) == len(
        list(fresh.model.parameters())
    )


def test_an_update_that_is_not_finite_and_all_after_it_change_nothing_however_late_it_is_looked_at(
    tiny_config, monkeypatch
):
    fresh = trainer(tiny_config)
    update(fresh, batch(0))
    before = weights(fresh)
    state = copy.deepcopy(fresh.optimizer.state_dict()["state"])
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "loss", lambda self, hidden, *_: hidden.sum() * math.nan)
        lost = begin_update(fresh, batch(1), 1, 1e-2)
    assert fresh.failed == 1
    after = begin_update(fresh, batch(2), 2, 1e-2)
    assert fresh.failed == 1
    assert after.read()[0] > 0  # itself it was finite
    with pytest.raises(RunFailed, match="loss is nan at step 2: a lower training"):
        lost.read()
    with pytest.raises(
        RunFailed, match="loss is nan at step 1: check the encoding's hooks"
    ):
        lost._replace(step=0).read()
    assert torch.equal(weights(fresh), before)
    torch.testing.assert_close(
        fresh.optimizer.state_dict()["state"], state, rtol=0, atol=0
    )


@pytest.mark.parametrize("encoding", ["rope", "t5", "fox"])
def test_blocks_that_are_computed_again_have_the_same_gradients_to_the_bit(
    tiny_config, encoding
):
    kept, again = (
        trainer(tiny_config, encoding=encoding, checkpointing=chosen)
        for chosen in (False, True)
    )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():  # zeros would hide errors
        for one, other in zip(
            kept.model.encoding.parameters(),
            again.model.encoding.parameters(),
            strict=True,
        ):
            other.copy_(one.add_(0.1 * torch.randn(one.shape, generator=draw)))
    (loss, norm), (other_loss, other_norm) = (
        update(each, batch()) for each in (kept, again)
    )
    assert loss == other_loss
    assert norm == pytest.approx(other_norm, rel=1e-6)
    for (name, one), other in zip(
        kept.model.named_parameters(), again.model.parameters(), strict=True
    ):
        assert (one.grad is None and other.grad is None) or torch.equal(
            one.grad, other.grad
        ), name


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "block"), [("rope", SWIGLU), ("fire", {})])
def test_compiled_steps_are_those_of_plain_ones_in_graphs_that_depth_adds_nothing_to(
    tiny_config, block, encoding
):
    graphs = []
    for n_layers in (2, 5):
        model = dataclasses.replace(tiny_config.model, n_layers=n_layers, **block)
        config = dataclasses.replace(
            tiny_config, model=model, encoding=EncodingConfig(encoding)
        )
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch.compiler.set_stance(force_backend="aot_eager"):
            plain = trainer(config)
            compiled = trainer(config, compile=True, checkpointing=encoding == "fire")
            assert update(compiled, batch()) == pytest.approx(
                update(plain, batch()), rel=1e-5
            )
            assert_gradients_are_close(plain, compiled)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 2 <= graphs[0] == graphs[1] <= 5  # before and after attention


# Block, tokens, device, whether a C++ compiler is there | whether
# `runtime.compile=auto` compiles.
@pytest.mark.parametrize(
    "line",
    [
        "swiglu 1e9 cpu yes | True",
        "swiglu 1e6 cpu yes | False",
        "gelu 1e9 cpu yes | False",
        "swiglu 1e9 cuda yes | False",
        "swiglu 1e9 cpu no | False",
    ],
)
def test_auto_compiles_where_it_pays(tiny_config, monkeypatch, line):
    block, tokens, device, compiler, _, expected = line.split()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("CXX", sys.executable if compiler == "yes" else "no-such")
    shape = {"n_layers": 4, "d_model": 256, "n_heads": 4} | (
        SWIGLU if block == "swiglu" else {}
    )
    config = dataclasses.replace(
        tiny_config,
        model=dataclasses.replace(tiny_config.model, **shape),
        training=dataclasses.replace(tiny_config.training, tokens=int(float(tokens))),
        runtime=dataclasses.replace(tiny_config.runtime, compile="auto"),
    )
    assert is_compiled(config, torch.device(device), World()) == (expected == "True")
    always = dataclasses.replace(config.runtime, compile=True)
    assert is_compiled(dataclasses.replace(config, runtime=always), CPU, World())


def test_a_validation_counts_tokens_and_whole_problems(tiny_config):
    trained = trainer(tiny_config)
    ids = batch().ids
    with torch.no_grad():
        labels = trained.model.eval().logits(trained.model.hidden(ids)).argmax(-1)
    labels[:, : T // 2], labels[0, -1] = IGNORED, (labels[0, -1] + 1) % V
    numbers = validate(trained, [Batch.of(ids, labels)], answers=True)
    assert numbers["val/accuracy"] == 1 - 2 / (B * T)
    assert numbers["val/exact_match"] == (B - 1) / B


def test_a_clock_counts_all_attempts_and_tokens_since_the_last_row(
    tiny_config, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: now[0] / 2)
    (trained := trainer(tiny_config)).world, per_step = (
        World(0, 2),
        tiny_config.training.tokens_per_step,
    )
    clock = Clock(trained, 10 * per_step, {"train_seconds": 5.0, "cpu_seconds": 1.0})
    now[0] = 4.0
    assert clock.speed(20) == {
        "train/tokens_per_second": 10 * per_step / 4,
        "seconds": 9.0,
    }
    with clock.paused():
        now[0] = 50.0
    now[0] = 51.0
    assert clock.speed(30)["train/tokens_per_second"] == 10 * per_step
    assert [clock.totals()[name] for name in ("train_seconds", "cpu_seconds")] == [
        10.0,
        1 + 2 * (4 + 1) / 2,
    ]
