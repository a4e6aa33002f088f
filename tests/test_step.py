"""One update: what is scored, how parts of a batch add up, what is computed again, and
what is compiled.
"""

import copy
import time
from typing import Any

import pytest
import support
import torch
from torch.testing import assert_close

from posbench.config.schema import Config
from posbench.data.batches import Batch
from posbench.errors import RunFailed
from posbench.model import IGNORED
from posbench.model.gpt import build
from posbench.processes import World
from posbench.training.step import Clock, Trainer, begin_update
from posbench.training.validation import validation_losses

V = 50  # size of the vocabulary
B = 6  # sequences of a batch
T = 16  # tokens of a sequence
CPU = torch.device("cpu")
SWIGLU = {"norm": "rmsnorm", "mlp": "swiglu"}


def batch(step: int = 0, scored: list[int] | None = None) -> Batch:
    """Return a batch of random tokens; `scored`: how many labels of each sequence are
    scored.
    """
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(V, (2, B, T), generator=generator)
    for row, count in enumerate(scored or []):
        order = torch.randperm(T, generator=generator)
        labels[row, order[count:]] = IGNORED
    return Batch.of(ids, labels)


def trainer(
    config: Config,
    accumulation: int = 1,
    encoding: str = "rope",
    optimizer: str = "adamw",
    **runtime: Any,
) -> Trainer:
    config = support.encoded(config, encoding)
    training = {"accumulation": accumulation, "optimizer": optimizer}
    config = support.changed(config, training=training, runtime=runtime)
    model = build(config, V)
    return Trainer(model, config, CPU, torch.float32)


def weights(trainer: Trainer) -> torch.Tensor:
    flat = [p.detach().flatten() for p in trainer.model.parameters()]
    return torch.cat(flat)


def update(
    trainer: Trainer, batch: Batch, step: int = 0, rate: float = 1e-2
) -> tuple[float, float]:
    return begin_update(trainer, batch, step, rate).read()


def updates(trainer: Trainer) -> list[tuple[float, float]]:
    """Return loss and gradient norm of three updates."""
    return [update(trainer, batch(step), step) for step in range(3)]


def assert_gradients_are_close(first: Trainer, second: Trainer) -> None:
    expected = dict(first.model.named_parameters())
    for name, p in second.model.named_parameters():
        gradient = expected[name].grad
        assert_close(p.grad, gradient, atol=1e-6, rtol=1e-4, msg=name)


PARTS = [
    (3, [16, 3, 1, 0, 9, 16]),
    (2, [0, 0, 0, 0, 7, 2]),
]


@pytest.mark.parametrize(("parts", "scored"), PARTS)
def test_parts_with_unequal_numbers_of_scored_labels_take_the_step_of_the_whole(
    tiny_config, parts, scored
):
    whole = trainer(tiny_config)
    divided = trainer(tiny_config, accumulation=parts)
    given = batch(0, scored)

    expected = update(whole, given)
    made = update(divided, given)

    assert made == pytest.approx(expected, rel=1e-5)
    assert_gradients_are_close(whole, divided)


def test_parts_share_the_random_positions_of_the_whole(tiny_config):
    whole = trainer(tiny_config, encoding="randomized")
    divided = trainer(tiny_config, accumulation=6, encoding="randomized")
    expected, _ = update(whole, batch())
    loss, _ = update(divided, batch())
    assert loss == pytest.approx(expected, rel=1e-5)


def with_torchs_optimizer(trainer: Trainer) -> Trainer:
    groups = trainer.optimizer.param_groups
    trainer.optimizer = torch.optim.AdamW(groups, fused=True)
    return trainer


def test_the_optimizer_takes_torchs_steps(tiny_config):
    ours = trainer(tiny_config, encoding="t5")  # whose table has its own rate
    theirs = with_torchs_optimizer(trainer(tiny_config, encoding="t5"))
    assert updates(ours) == updates(theirs)
    assert torch.equal(weights(ours), weights(theirs))
    state = ours.optimizer.state_dict()
    expected = theirs.optimizer.state_dict()
    assert_close(state, expected, rtol=0, atol=0)


def test_t5s_table_alone_moves_ten_times_as_fast(tiny_config):
    config = support.encoded(tiny_config, "temperature", inner="t5")
    model = build(config, V)
    fresh = Trainer(model, config, CPU, torch.float32)
    before = copy.deepcopy(model.state_dict())

    update(fresh, batch(), rate=1e-3)

    # AdamW's first update moves a number by the rate, whatever its gradient; what has
    # none stays.
    farthest = {}
    for name, p in model.named_parameters():
        moved = p.detach() - before[name]
        farthest[name] = float(moved.abs().max())
    of_table = farthest.pop("encoding.inners.0.table")
    assert of_table == pytest.approx(1e-2, rel=0.01)
    # weight decay adds a little
    of_others = max(farthest.values())
    assert of_others == pytest.approx(1e-3, rel=0.1)


def test_weight_decay_spares_norms_and_the_encodings_parameters(tiny_config):
    fresh = trainer(tiny_config, encoding="learned")
    decayed = set()
    n_parameters = 0
    for group in fresh.optimizer.param_groups:
        n_parameters += len(group["params"])
        if group["weight_decay"]:
            decayed.update(id(p) for p in group["params"])

    parameters = dict(fresh.model.named_parameters())
    for name, p in parameters.items():
        is_matrix = p.dim() == 2 and not name.startswith("encoding.")
        assert (id(p) in decayed) == is_matrix, name
    assert n_parameters == len(parameters)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_that_is_not_finite_and_all_after_it_change_nothing(
    tiny_config, optimizer
):
    fresh = trainer(tiny_config, optimizer=optimizer)
    update(fresh, batch(0))
    before = weights(fresh)
    state = copy.deepcopy(fresh.optimizer.state_dict())

    fresh.world = support.ActingWorld(0, support.spoil_update)
    lost = begin_update(fresh, batch(1), 1, 1e-2)
    after = begin_update(fresh, batch(2), 2, 1e-2)

    assert fresh.failed == 1
    loss, _ = after.read()
    assert loss > 0  # itself it was finite
    with pytest.raises(RunFailed, match="loss is nan at step 2: a lower training"):
        lost.read()
    assert torch.equal(weights(fresh), before)
    now = fresh.optimizer.state_dict()
    assert_close(now["state"], state["state"], rtol=0, atol=0)


def test_a_first_update_that_is_not_finite_fails_when_it_is_read(tiny_config):
    fresh = trainer(tiny_config)
    fresh.world = support.ActingWorld(0, support.spoil_update)
    lost = begin_update(fresh, batch(), 0, 1e-2)
    with pytest.raises(RunFailed, match="at step 1: check the encoding's hooks"):
        lost.read()


@pytest.mark.parametrize("encoding", ["rope", "t5", "fox"])
def test_blocks_that_are_computed_again_have_the_same_gradients_to_the_bit(
    tiny_config, encoding
):
    kept = trainer(tiny_config, encoding=encoding, checkpointing=False)
    again = trainer(tiny_config, encoding=encoding, checkpointing=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # zeros would hide errors
        for parameter in kept.model.encoding.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * drawn)
    again.model.load_state_dict(kept.model.state_dict())

    loss, norm = update(kept, batch())
    loss_again, norm_again = update(again, batch())

    assert loss_again == loss
    assert norm_again == pytest.approx(norm, rel=1e-6)
    expected = [p.grad for p in kept.model.parameters()]
    gradients = [p.grad for p in again.model.parameters()]
    assert_close(gradients, expected, atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "block"), [("rope", SWIGLU), ("fire", {})])
def test_compiled_steps_are_those_of_plain_ones_in_graphs_that_depth_adds_nothing_to(
    tiny_config, block, encoding
):
    counters = torch._dynamo.utils.counters
    runtime = {"compile": True, "checkpointing": encoding == "fire"}
    graphs = []
    for n_layers in (2, 5):
        model = {"n_layers": n_layers, **block}
        config = support.changed(tiny_config, model=model)
        torch._dynamo.reset()
        counters.clear()
        with torch.compiler.set_stance(force_backend="aot_eager"):
            plain = trainer(config, encoding=encoding)
            compiled = trainer(config, encoding=encoding, **runtime)
            expected = update(plain, batch())
            made = update(compiled, batch())
            assert made == pytest.approx(expected, rel=1e-5)
            assert_gradients_are_close(plain, compiled)
        graphs.append(counters["stats"]["unique_graphs"])
    of_two_layers, of_five_layers = graphs
    assert of_two_layers == of_five_layers
    assert 2 <= of_two_layers <= 5  # before and after attention


def test_a_validation_counts_right_tokens(tiny_config):
    trained = trainer(tiny_config)
    ids = batch().ids
    model = trained.model.eval()
    with torch.no_grad():
        hidden = model.hidden(ids)
        labels = model.logits(hidden).argmax(-1)
    labels[:, : T // 2] = IGNORED
    wrong = (labels[0, -1] + 1) % V
    labels[0, -1] = wrong
    given = Batch.of(ids, labels)

    numbers = validation_losses(trained, [given], answers=True)

    n_scored = B * T / 2
    assert numbers["val/accuracy"] == 1 - 1 / n_scored


def test_a_clock_counts_all_attempts_and_tokens_since_the_last_row(
    tiny_config, monkeypatch
):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "process_time", lambda: now / 2)
    per_step = tiny_config.training.tokens_per_step
    trained = trainer(tiny_config)
    trained.world = World(0, 2)
    before = {"train_seconds": 5.0, "cpu_seconds": 1.0}
    clock = Clock(trained, 10 * per_step, before)

    now = 4.0
    first = clock.speed(20)
    with clock.paused():
        now = 50.0
    now = 51.0
    second = clock.speed(30)

    assert first == {"train/tokens_per_second": 10 * per_step / 4, "seconds": 9.0}
    assert second["train/tokens_per_second"] == 10 * per_step
    totals = clock.totals()
    of_a_process = (4 + 1) / 2
    assert totals["train_seconds"] == 10
    assert totals["cpu_seconds"] == 1 + 2 * of_a_process
