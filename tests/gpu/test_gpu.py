"""What only a GPU can say: `make gpu` runs these, and prints speed; without CUDA they
are skipped.
"""

import math
import pathlib
from typing import Any

import numpy as np
import pytest
import support
import torch
import torch.nn.functional as F

from posbench import encodings, machine
from posbench.config.schema import AttentionConfig, Config
from posbench.data.batches import Batch
from posbench.errors import Stopped, UserError
from posbench.evaluation.models import TrainedGPT, nll_of
from posbench.model.gpt import GPT, build
from posbench.model.loss import linear_cross_entropy
from posbench.run.checkpoint import newest
from posbench.training.step import Trainer, begin_update
from posbench.training.train import train

DEVICE, CPU = machine.current(machine.resolve("auto")), torch.device("cpu")
LENGTH, V = 300, 64  # more than two blocks of FlexAttention's, the last a part of one
# its gradients jump where a position is whole: on a CPU, weights off by 1e-6 change
# them by 3 %
ROUGH = {"cope": 0.05}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def configured(config: Config, name: str, window: int | None = None) -> Config:
    attention = AttentionConfig(window)
    return support.changed(
        support.encoded(config, name),
        model={"d_model": 64, "n_heads": 2, "attention": attention},
        training={"train_length": LENGTH, "tokens": 10**6},
    )


def model_for(config: Config, device: torch.device) -> GPT:
    """With parameters of its encoding that are not as it starts: zeros would hide
    errors.
    """
    model, draw = build(config, V), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.encoding.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model.to(device)


def batch(step: int = 0) -> Batch:
    ids, labels = torch.randint(
        V, (2, 4, LENGTH), generator=torch.Generator().manual_seed(step)
    )
    return Batch.of(ids, labels)


def trainer(config: Config, dtype: torch.dtype) -> Trainer:
    return Trainer(model_for(config, DEVICE), config, DEVICE, dtype)


def update(*given: Any) -> tuple[float, float]:
    return begin_update(*given).read()


def with_gradients(config: Config, device: torch.device) -> dict[str, torch.Tensor]:
    model, given = model_for(config, device), batch().to(device)
    loss = model(given.ids, given.labels, n_scored=given.n_scored)
    loss.backward()
    gradients = {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    return {
        name: value.detach().cpu()
        for name, value in {"loss": loss, **gradients}.items()
    }


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", encodings.names())
def test_loss_and_gradients_are_those_of_the_cpu(
    tiny_config: Config, name: str, window: int | None
) -> None:
    config = configured(tiny_config, name, window)
    if name in ("randomized", "shape", "cape"):
        pytest.skip("draws other positions on another device")
    computed, expected = with_gradients(config, DEVICE), with_gradients(config, CPU)
    assert computed.keys() == expected.keys()
    scale = max(float(one.norm()) for key, one in expected.items() if key != "loss")
    for key, one in expected.items():
        assert float((computed[key] - one).norm()) < ROUGH.get(name, 2e-3) * max(
            float(one.norm()), 1e-2 * scale
        ), key


@pytest.mark.parametrize("name", encodings.names())
def test_every_scheme_trains_in_half_precision(tiny_config: Config, name: str) -> None:
    trained = trainer(configured(tiny_config, name), torch.bfloat16)
    losses = [update(trained, batch(), step, 3e-3)[0] for step in range(12)]
    assert losses[-1] < losses[0] and all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    "changes", [["compile"], ["checkpointing"], ["compile", "checkpointing"]]
)
@pytest.mark.parametrize("name", ["rope", "alibi", "t5", "fox", "fire", "cope"])
def test_compiled_and_recomputed_training_is_the_eager_one(
    tiny_config: Config, name: str, changes: list[str]
) -> None:
    eager = configured(tiny_config, name)
    other = support.changed(eager, runtime=dict.fromkeys(changes, True))
    trainers = [trainer(config, torch.float32) for config in (eager, other)]
    for step in range(3):
        expected, computed = (
            update(each, batch(step), step, 1e-3) for each in trainers
        )
        assert computed == pytest.approx(expected, rel=ROUGH.get(name, 1e-3))
    assert trainers[1].model.recomputes is ("checkpointing" in changes)


@pytest.mark.parametrize("vocabulary", [50257, 50304])
def test_the_loss_from_the_head_on_is_torchs(vocabulary: int) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [
        torch.randn(size, generator=draw) * scale
        for size, scale in (((4096, 256), 1), ((vocabulary, 256), 0.05))
    ]
    labels = torch.randint(vocabulary, (4096,), generator=draw).to(DEVICE)

    def results(loss_of: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        hidden, weight = (tensor.to(DEVICE).requires_grad_() for tensor in given)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = loss_of(hidden, weight, labels)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    exact = results(
        lambda hidden, weight, labels: F.cross_entropy(
            F.linear(hidden, weight), labels
        ),
        torch.float32,
    )
    for dtype, close in (
        (torch.float32, 1e-4),
        (torch.bfloat16, 2e-2),
    ):
        for made, expected in zip(
            results(linear_cross_entropy, dtype), exact, strict=True
        ):
            assert float((made - expected).norm()) < close * float(expected.norm()), (
                dtype
            )


# matrix_exp reads a norm
@pytest.mark.parametrize("name", sorted({*encodings.names()} - {"liere", "algebraic"}))
def test_a_step_never_makes_the_host_wait(tiny_config: Config, name: str) -> None:
    one = trainer(configured(tiny_config, name), torch.bfloat16)
    for step in range(2):  # compiles, and makes the optimizer's state
        update(one, batch(step), step, 1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = [begin_update(one, batch(step), step, 1e-3) for step in range(2, 5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(
        math.isfinite(number) for outcome in outcomes for number in outcome.read()
    )


@pytest.mark.parametrize(
    ("name", "asked"), [("alibi", False), *((name, True) for name in encodings.names())]
)
def test_two_trainings_are_the_same_to_the_bit(
    tiny_config: Config, name: str, asked: bool
) -> None:
    """ALiBi in any case: nothing in it is summed by atomic additions, in no fixed
    order.
    """
    machine.be_deterministic(DEVICE, asked)
    try:
        runs = [
            trainer(configured(tiny_config, name), torch.bfloat16) for _ in range(2)
        ]
        first, second = (
            [update(each, batch(step), step, 1e-3)[0] for step in range(5)]
            for each in runs
        )
    finally:
        machine.be_deterministic(DEVICE, False)
    assert first == second
    assert all(map(torch.equal, *(each.model.parameters() for each in runs)))


def test_a_run_goes_on_where_it_stopped(
    tiny_config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    support.write_text()
    config = support.changed(
        tiny_config,
        training={"precision": "bf16"},
        runtime={"device": "cuda", "cache": str(tmp_path / "cache")},
        data={"path": "text.txt"},
    )
    train(config, tmp_path / "whole", [])
    plain = begin_update

    def stopping(trainer: Trainer, batch: Batch, at: int, rate: float) -> Any:
        if at == 6:
            raise Stopped(15, "the test stopped it")
        return plain(trainer, batch, at, rate)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("posbench.training.train.begin_update", stopping)
        train(config, tmp_path / "parts", [])
    train(config, tmp_path / "parts", [])
    computed, expected = (newest(tmp_path / name) for name in ("parts", "whole"))
    assert (
        computed is not None and expected is not None and computed.step == expected.step
    )
    weights = computed.weights()
    for name, weight in expected.weights().items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["none", "rope", "alibi", "t5", "fox", "fire", "shaw"])
def test_memory_of_scoring_grows_with_the_length_not_with_its_square(
    tiny_config: Config, name: str
) -> None:
    config, peaks = configured(tiny_config, name), {}
    model = model_for(config, DEVICE).eval()
    for length in (1024, 4096, 16384, 65536):
        subject = TrainedGPT(model, length, DEVICE, torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        try:
            nll = nll_of(subject, np.zeros((1, length + 1), dtype=np.int64), length, 0)
        except UserError:
            break
        assert np.isfinite(nll).all()
        peaks[length] = torch.cuda.max_memory_allocated() / 2**20
    # MiB; as the square it would be 256 times
    assert peaks[65536] < 16 * max(peaks[4096], 64), peaks
