"""What only a GPU can say: `make gpu` runs these, and prints speed; without CUDA they
are skipped.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import support
import torch
import torch.nn.functional as F

from posbench import encodings, machine
from posbench.config.schema import AttentionConfig, Config
from posbench.data.batches import Batch
from posbench.data.tokens import TokenSplit
from posbench.errors import Stopped, UserError
from posbench.evaluation.protocols import Windows
from posbench.evaluation.subjects import TrainedGPT, score
from posbench.model import attention
from posbench.model.gpt import GPT, build
from posbench.model.loss import linear_cross_entropy
from posbench.run.checkpoint import newest
from posbench.training.step import Trainer, begin_update
from posbench.training.train import train
from posbench.training.validation import validation_losses

DEVICE = machine.current(machine.resolve("auto"))
CPU = torch.device("cpu")
LENGTH = 300  # more than two blocks of FlexAttention's, the last a part of one
V = 64
# its gradients jump where a position is whole: on a CPU, weights off by 1e-6 change
# them by 3 %
ROUGH = {"cope": 0.05}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def configured(config: Config, name: str, window: int | None = None) -> Config:
    attention = AttentionConfig(window, sinks=0)
    return support.changed(
        support.encoded(config, name),
        model={"d_model": 64, "n_heads": 2, "attention": attention},
        training={"train_length": LENGTH, "tokens": 10**6},
    )


def model_for(config: Config, device: torch.device) -> GPT:
    """With parameters of its encoding that are not as it starts: zeros would hide
    errors.
    """
    model = build(config, V)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.encoding.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * drawn)
    return model.to(device)


def batch(step: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(V, (2, 4, LENGTH), generator=generator)
    return Batch.of(ids, labels)


def trainer(config: Config, dtype: torch.dtype) -> Trainer:
    model = model_for(config, DEVICE)
    return Trainer(model, config, DEVICE, dtype)


def model_of(trainer: Trainer) -> GPT:
    assert isinstance(trainer.model, GPT)
    return trainer.model


def update(
    trainer: Trainer, batch: Batch, step: int, rate: float = 1e-3
) -> tuple[float, float]:
    return begin_update(trainer, batch, step, rate).read()


def loss_and_gradients(config: Config, device: torch.device) -> dict[str, torch.Tensor]:
    model = model_for(config, device)
    model.compiles = config.runtime.compile
    given = batch().to(device)
    loss = model(given.ids, given.labels, n_scored=given.n_scored)
    loss.backward()
    results = {"loss": loss.detach().cpu()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            results[name] = p.grad.cpu()
    return results


def all_but(*left_out: str) -> list[str]:
    return [name for name in encodings.names() if name not in left_out]


# the three draw other positions on another device
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", all_but("randomized", "shape", "cape"))
def test_loss_and_gradients_are_those_of_the_cpu(tiny_config, name, window):
    config = configured(tiny_config, name, window)
    computed = loss_and_gradients(config, DEVICE)
    expected = loss_and_gradients(config, CPU)

    assert computed.keys() == expected.keys()
    sizes = {key: float(one.norm()) for key, one in expected.items()}
    largest = max(size for key, size in sizes.items() if key != "loss")
    tolerance = ROUGH.get(name, 2e-3)
    for key, one in expected.items():
        difference = computed[key] - one
        size = max(sizes[key], 1e-2 * largest)
        assert float(difference.norm()) < tolerance * size, key


CHANGES = [["compile"], ["checkpointing"], ["compile", "checkpointing"]]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "fox", "fire", "cope"])
def test_compiled_and_recomputed_training_is_the_eager_one(tiny_config, name, changes):
    config = configured(tiny_config, name)
    runtime = dict.fromkeys(changes, True)
    changed = support.changed(config, runtime=runtime)
    eager = trainer(config, torch.float32)
    other = trainer(changed, torch.float32)
    tolerance = ROUGH.get(name, 1e-3)
    for step in range(3):
        expected = update(eager, batch(step), step)
        computed = update(other, batch(step), step)
        assert computed == pytest.approx(expected, rel=tolerance)
    assert other.model.recomputes is ("checkpointing" in changes)


@pytest.mark.parametrize("changes", [[], ["checkpointing"], ["compile"]])
@pytest.mark.parametrize("name", ["fire", "cope", "path"])
def test_free_memory_changes_rounding_only(tiny_config, name, changes, monkeypatch):
    runtime = dict.fromkeys(changes, True)
    config = support.changed(configured(tiny_config, name), runtime=runtime)
    monkeypatch.setattr(attention, "KEPT_BYTES", 0)
    monkeypatch.setattr(attention, "KEPT_SHARE_ACCELERATOR", 0)
    monkeypatch.setattr(attention, "AT_ONCE_ACCELERATOR", 1)
    results = []
    for free in (0, 2**34):  # blocks of 64 rows, and of 128
        monkeypatch.setattr(attention, "free_memory", lambda device, free=free: free)
        results.append(loss_and_gradients(config, DEVICE))
    of_64_rows, of_128_rows = results
    for key, expected in of_64_rows.items():
        error = float((of_128_rows[key] - expected).norm())
        size = max(float(expected.norm()), 1e-2)
        assert error < ROUGH.get(name, 1e-4) * size, key


@pytest.mark.parametrize("name", encodings.names())
def test_losses_of_every_scheme_fall_in_half_precision(tiny_config, name):
    config = configured(tiny_config, name)
    trained = trainer(config, torch.bfloat16)

    losses = []
    for step in range(12):
        loss, _ = update(trained, batch(), step, 3e-3)
        losses.append(loss)

    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def head_inputs(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return last states (N, D), the head's weights (V, D) and labels (N,)."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 256, generator=draw)
    weight = 0.05 * torch.randn(vocabulary, 256, generator=draw)
    labels = torch.randint(vocabulary, (4096,), generator=draw)
    hidden = hidden.to(DEVICE)
    weight = weight.to(DEVICE)
    labels = labels.to(DEVICE)
    return hidden, weight, labels


TOLERANCES = [
    (torch.float32, 1e-4),
    (torch.bfloat16, 2e-2),
]


# on a GPU the first is padded to the second
@pytest.mark.parametrize("vocabulary", [50257, 50304])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_the_loss_from_the_head_on_and_its_gradients_are_torchs(
    vocabulary, dtype, tolerance
):
    hidden, weight, labels = head_inputs(vocabulary)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    is_half = dtype != torch.float32
    with torch.autocast(DEVICE.type, dtype=dtype, enabled=is_half):
        loss = linear_cross_entropy(hidden, weight, labels)
    gradients = torch.autograd.grad(loss, leaves)
    computed = [loss.detach(), *gradients]

    logits = F.linear(hidden, weight)
    exact_loss = F.cross_entropy(logits, labels)
    exact_gradients = torch.autograd.grad(exact_loss, leaves)
    exact = [exact_loss.detach(), *exact_gradients]
    for one, expected in zip(computed, exact, strict=True):
        error = float((one - expected).norm())
        size = float(expected.norm())
        assert error < tolerance * size


# the two use matrix_exp, which reads a norm
@pytest.mark.parametrize("name", all_but("liere", "algebraic"))
def test_a_step_never_makes_the_host_wait(tiny_config, name):
    config = configured(tiny_config, name)
    one = trainer(config, torch.bfloat16)
    for step in range(2):  # compiles, and makes the optimizer's state
        update(one, batch(step), step)
    outcomes = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(2, 5):
            given = batch(step)
            outcomes.append(begin_update(one, given, step, 1e-3))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for outcome in outcomes:
        results = outcome.read()
        assert np.isfinite(results).all()


@pytest.mark.parametrize("name", ["rope", "fire", "cope"])
def test_a_row_and_a_validation_make_the_host_wait_once(tiny_config, name, monkeypatch):
    config = configured(tiny_config, name)
    one = trainer(config, torch.bfloat16)
    model = model_of(one).eval()
    subject = TrainedGPT(model, LENGTH, DEVICE, torch.bfloat16)
    rng = np.random.default_rng(0)
    ids = rng.integers(V, size=21 * LENGTH)
    borders = np.array([0, len(ids)])
    split = TokenSplit(ids, borders)
    starts = np.arange(0, 20 * LENGTH, LENGTH)
    blocks = starts // LENGTH
    windows = Windows(LENGTH, 50, starts, blocks, "concat")
    batches = [batch(number) for number in range(3)]

    def measure() -> None:
        nll = score(subject, split, windows, 4 * LENGTH)
        numbers = validation_losses(one, batches, answers=True)
        assert np.isfinite(nll).all()
        assert np.isfinite(numbers["val/loss"])

    measure()  # compiles, and makes the masks
    to_host = machine.to_host
    read: list[int] = []

    def counted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        torch.cuda.set_sync_debug_mode("default")
        on_host = to_host(tensors)
        torch.cuda.set_sync_debug_mode("error")
        read.append(len(tensors))
        return on_host

    monkeypatch.setattr(machine, "to_host", counted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        measure()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read == [5, 3]  # batches


def assert_two_trainings_are_the_same(config: Config) -> None:
    first = trainer(config, torch.bfloat16)
    second = trainer(config, torch.bfloat16)
    for step in range(5):
        given = batch(step)
        first_loss, _ = update(first, given, step)
        second_loss, _ = update(second, given, step)
        assert first_loss == second_loss
    first_weights = first.model.parameters()
    second_weights = second.model.parameters()
    for p, q in zip(first_weights, second_weights, strict=True):
        assert torch.equal(p, q)


def test_two_trainings_of_alibi_are_the_same_to_the_bit(tiny_config):
    """Nothing in it is summed by atomic additions, in no fixed order."""
    config = configured(tiny_config, "alibi")
    assert_two_trainings_are_the_same(config)


@pytest.mark.parametrize("name", encodings.names())
def test_two_trainings_are_the_same_to_the_bit_where_that_is_asked_for(
    tiny_config, name
):
    config = configured(tiny_config, name)
    machine.be_deterministic(DEVICE, True)
    try:
        assert_two_trainings_are_the_same(config)
    finally:
        machine.be_deterministic(DEVICE, False)


def stopping(trainer: Trainer, batch: Batch, step: int, rate: float) -> Any:
    """Begin an update, but stop the run at update 6."""
    if step == 6:
        raise Stopped(15, "the test stopped it")
    return begin_update(trainer, batch, step, rate)


def test_a_run_goes_on_where_it_stopped(tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    support.write_text()
    config = support.changed(
        tiny_config,
        training={"precision": "bf16"},
        runtime={"device": "cuda", "cache": str(tmp_path / "cache")},
        data={"path": "text.txt"},
    )

    train(config, tmp_path / "whole", [])
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("posbench.training.train.begin_update", stopping)
        train(config, tmp_path / "parts", [])
    train(config, tmp_path / "parts", [])

    computed = newest(tmp_path / "parts")
    expected = newest(tmp_path / "whole")
    assert computed is not None
    assert expected is not None
    assert computed.step == expected.step
    torch.testing.assert_close(
        computed.weights(), expected.weights(), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["none", "rope", "alibi", "t5", "fox", "fire", "shaw"])
def test_memory_of_scoring_grows_with_the_length_not_with_its_square(tiny_config, name):
    config = configured(tiny_config, name)
    model = model_for(config, DEVICE).eval()
    peaks = {}  # MiB
    for length in (1024, 4096, 16384, 65536):
        subject = TrainedGPT(model, length, DEVICE, torch.bfloat16)
        ids = np.zeros((1, length + 1), dtype=np.int64)
        torch.cuda.reset_peak_memory_stats()
        try:
            nll = support.nll_of(subject, ids, length, 0)
        except UserError:
            break
        assert np.isfinite(nll).all()
        peaks[length] = torch.cuda.max_memory_allocated() / 2**20
    before = max(peaks[4096], 64)
    # as the square it would be 256 times
    assert peaks[65536] < 16 * before, peaks
