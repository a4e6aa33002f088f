"""One update: what is scored, how parts of a batch add up, what is computed again, and what is compiled."""

import copy
import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import schemes
import torch

from posbench import machine
from posbench.config.schema import Config, EncodingConfig
from posbench.data.batches import Batch
from posbench.errors import RunFailed
from posbench.model.gpt import GPT, build
from posbench.model.loss import IGNORED
from posbench.processes import World
from posbench.training.step import Learner, begin_update, is_compiled

V, B, T = 50, 6, 16
CPU = torch.device("cpu")
SWIGLU = {"norm": "rmsnorm", "mlp": "swiglu"}


def batch(step: int = 0, scored: list[int] | None = None) -> Batch:
    """Random tokens; `scored` says how many labels of each sequence are."""
    draw = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(V, (2, B, T), generator=draw)
    for row, count in enumerate(scored or []):
        labels[row, torch.randperm(T, generator=draw)[count:]] = IGNORED
    return Batch.of(ids, labels)


def learner(
    config: Config, accumulation: int = 1, dtype: torch.dtype = torch.float32, encoding: str = "", **runtime: Any
) -> Learner:
    training = dataclasses.replace(config.training, accumulation=accumulation)
    config = dataclasses.replace(config, training=training, runtime=dataclasses.replace(config.runtime, **runtime))
    config = dataclasses.replace(config, encoding=EncodingConfig(encoding) if encoding else config.encoding)
    return Learner(build(config, V), config, CPU, dtype)


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


def update(learner: Learner, batch: Batch, step: int = 0, rate: float = 1e-2) -> tuple[float, float]:
    return begin_update(learner, batch, step, rate).read()


def trained(learner: Learner, steps: int = 3) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """What updates return, and the weights after them."""
    return [update(learner, batch(step), step) for step in range(steps)], weights(learner)


def assert_gradients_are_close(one: Learner, other: Learner, relative: float = 1e-4) -> None:
    for (name, p), q in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-6, rtol=relative, msg=lambda t, n=name: f"{n}: {t}")


# -- parts of a batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scored", [[16, 3, 1, 0, 9, 16], [0, 0, 5, 1, 0, 0], [0, 0, 0, 0, 7, 2]])
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_parts_with_unequal_numbers_of_scored_labels_take_the_step_of_the_whole(
    tiny_config: Config, parts: int, scored: list[int]
) -> None:
    whole, divided = learner(tiny_config), learner(tiny_config, accumulation=parts)
    assert update(divided, batch(0, scored)) == pytest.approx(update(whole, batch(0, scored)), rel=1e-5)
    assert_gradients_are_close(whole, divided)


@pytest.mark.parametrize("name", ["randomized", "cape", "shape"])
def test_parts_share_the_random_positions_of_the_whole(tiny_config: Config, name: str) -> None:
    losses = [update(learner(tiny_config, parts, encoding=name), batch(0))[0] for parts in (1, 2, 6)]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_equal_parts_are_divided_by_their_number_to_the_bit(tiny_config: Config, parts: int) -> None:
    one, other = learner(tiny_config, accumulation=parts), learner(tiny_config)
    text, total = batch(), 0.0
    for ids, labels in zip(text.ids.chunk(parts), text.labels.chunk(parts), strict=True):
        loss = other.model.loss(other.model.hidden(ids), labels) / parts
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(other.model.parameters(), other.training.clip)
    other.optimizer.step()
    (rate,) = {group["lr"] for group in other.optimizer.param_groups}
    assert update(one, text, rate=rate) == (float(total), float(norm)) and torch.equal(weights(one), weights(other))


def test_a_batch_counts_its_scored_labels_and_without_one_it_is_refused(tiny_config: Config) -> None:
    whole = batch(0, [16, 3, 1, 0, 9, 16])
    assert whole.n_scored == 45 == whole.to(CPU).n_scored and batch().n_scored == B * T
    assert [part.n_scored for part in whole.parts(3)] == [19, 1, 25]
    assert torch.equal(torch.cat([part.labels for part in whole.parts(3)]), whole.labels)
    with pytest.raises(ValueError, match="the batch of step 4 has no label that is scored"):
        update(learner(tiny_config), batch(0, [0] * B), 3)


# -- the optimizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["rope", "t5"])  # t5's table has a rate of its own
def test_the_optimizer_takes_torchs_steps_and_goes_on_from_its_state(tiny_config: Config, encoding: str) -> None:
    ours, theirs, resumed = (learner(tiny_config, encoding=encoding) for _ in range(3))
    theirs.optimizer = torch.optim.AdamW(theirs.optimizer.param_groups, fused=True)
    assert trained(ours)[0] == trained(theirs)[0]
    state = copy.deepcopy(theirs.optimizer.state_dict())
    torch.testing.assert_close(ours.optimizer.state_dict(), state, rtol=0, atol=0)
    resumed.model.load_state_dict(theirs.model.state_dict())
    resumed.optimizer.load_state_dict(state)
    for one in (ours, theirs, resumed):
        trained(one)
    assert torch.equal(weights(ours), weights(theirs)) and torch.equal(weights(resumed), weights(theirs))


@pytest.mark.parametrize("inside", [False, True])
def test_t5s_table_alone_moves_ten_times_as_fast(tiny_config: Config, inside: bool) -> None:
    encoding = EncodingConfig("temperature", {"inner": "t5"}) if inside else EncodingConfig("t5")
    one = learner(dataclasses.replace(tiny_config, encoding=encoding))
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    update(one, batch(), rate=1e-3)
    # AdamW's first update moves a number by the rate, whatever its gradient; what has none stays.
    farthest = {name: float((p.detach() - before[name]).abs().max()) for name, p in one.model.named_parameters()}
    assert farthest.pop("encoding.inners.0.table" if inside else "encoding.table") == pytest.approx(1e-2, rel=0.01)
    assert max(farthest.values()) == pytest.approx(1e-3, rel=0.1)  # weight decay adds a little


def test_weight_decay_spares_norms_and_the_encodings_parameters(tiny_config: Config) -> None:
    one = learner(tiny_config, encoding="learned")
    decayed = {id(p) for group in one.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in one.model.named_parameters() if id(p) in decayed}
    named = one.model.named_parameters()
    assert names == {name for name, p in named if p.dim() == 2 and not name.startswith("encoding.")}
    assert sum(len(group["params"]) for group in one.optimizer.param_groups) == len(list(one.model.parameters()))


# -- what is not finite ------------------------------------------------------------------------------------------------


def test_an_update_that_is_not_finite_and_all_after_it_change_nothing_however_late_it_is_looked_at(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learner(tiny_config)
    update(one, batch(0))
    before, state = weights(one), copy.deepcopy(one.optimizer.state_dict()["state"])
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "loss", lambda self, hidden, *_: hidden.sum() * math.nan)
        lost = begin_update(one, batch(1), 1, 1e-2)
    after = begin_update(one, batch(2), 2, 1e-2)
    assert [outcome.numbers[2] for outcome in (lost, after)] == [1, 1]
    assert after.read()[0] > 0  # itself it was finite
    with pytest.raises(RunFailed, match="loss is nan at step 2: a lower training"):
        lost.read()
    assert torch.equal(weights(one), before)
    torch.testing.assert_close(one.optimizer.state_dict()["state"], state, rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_is_named_and_before_any_update_it_is_no_matter_of_the_rate(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learner(tiny_config)
    monkeypatch.setattr(GPT, "loss", lambda self, hidden, *_: hidden.sum() * 0 + (hidden * 0).sqrt().sum())
    with pytest.raises(RunFailed, match="gradient norm is nan at step 1: check the encoding's hooks"):
        update(one, batch(0))


# -- fp16 --------------------------------------------------------------------------------------------------------------


def test_fp16_trains_almost_as_fp32_does(tiny_config: Config) -> None:
    (found, ends), (expected, end) = (trained(learner(tiny_config, dtype=d), 8) for d in (torch.float16, torch.float32))
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-2)
    assert (ends - end).norm() < 0.05 * (end - weights(learner(tiny_config))).norm()


def test_a_gradient_that_overflows_fp16_halves_the_scale_and_one_that_no_scale_mends_ends_the_run(
    tiny_config: Config,
) -> None:
    one = learner(tiny_config, dtype=torch.float16)
    assert one.scale is not None
    one.scale.load_state_dict(one.scale.state_dict() | {"scale": 2.0**40})
    before = weights(one)
    loss, norm = update(one, batch(0))
    assert math.isfinite(loss) and not math.isfinite(norm) and torch.equal(weights(one), before)
    assert one.scale.get_scale() == 2.0**39 and not one.failed
    while not math.isfinite(update(one, batch(0))[1]):
        pass
    assert not torch.equal(weights(one), before) and 1 < one.scale.get_scale() < 2.0**39
    one.scale.load_state_dict(one.scale.state_dict() | {"scale": 1.0})
    one.model.tokens.weight.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[union-attr]
    with pytest.raises(RunFailed, match="gradient norm is"):
        update(one, batch(0), 1)


# -- blocks that are computed again, and compiled ones -----------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("encoding", schemes.NAMES)
def test_blocks_that_are_computed_again_have_the_same_gradients_to_the_bit(tiny_config: Config, encoding: str) -> None:
    kept, again = (learner(tiny_config, encoding=encoding, checkpointing=chosen) for chosen in (False, True))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():  # zeros would hide errors
        for one, other in zip(kept.model.encoding.parameters(), again.model.encoding.parameters(), strict=True):
            other.copy_(one.add_(0.1 * torch.randn(one.shape, generator=draw)))
    (loss, norm), (other_loss, other_norm) = (update(each, batch()) for each in (kept, again))
    assert loss == other_loss and norm == pytest.approx(other_norm, rel=1e-6)
    if encoding in ("algebraic", "lerope", "tupe"):  # whose table is made once for all layers
        return assert_gradients_are_close(kept, again, 1e-3)
    for (name, one), other in zip(kept.model.named_parameters(), again.model.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad), name


@pytest.mark.full
def test_blocks_that_are_computed_again_keep_their_inputs_alone(tiny_config: Config) -> None:
    def held(n_layers: int, again: bool) -> int:
        """Bytes that one update keeps for its backward pass."""
        model = dataclasses.replace(tiny_config.model, n_layers=n_layers, d_model=64, n_heads=2)
        one = learner(dataclasses.replace(tiny_config, model=model), checkpointing=again)
        weights = {parameter.untyped_storage().data_ptr() for parameter in one.model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept.setdefault(storage.data_ptr(), 0 if storage.data_ptr() in weights else storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            update(one, batch())
        return sum(kept.values())

    of_block = [held(12, again) - held(4, again) for again in (False, True)]
    assert of_block[1] <= 8 * 1.5 * B * T * 64 * 4  # an input each, which the gradient of the one above it joins
    assert of_block[0] > 5 * max(of_block[1], 1)


def assert_compiled_steps_are_plain_ones(config: Config, **runtime: Any) -> None:
    plain, compiled = learner(config), learner(config, compile=True, **runtime)
    assert update(compiled, batch()) == pytest.approx(update(plain, batch()), rel=1e-5)
    assert_gradients_are_close(plain, compiled)


@pytest.mark.full
@pytest.mark.parametrize(("encoding", "block"), [("rope", SWIGLU), ("t5", {}), ("cope", {}), ("fire", {})])
def test_compiled_steps_are_those_of_plain_ones_in_graphs_that_depth_adds_nothing_to(
    tiny_config: Config, block: dict[str, str], encoding: str
) -> None:
    graphs = []
    for n_layers in (2, 5):
        model = dataclasses.replace(tiny_config.model, n_layers=n_layers, **block)
        config = dataclasses.replace(tiny_config, model=model, encoding=EncodingConfig(encoding))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch.compiler.set_stance(force_backend="aot_eager"):
            assert_compiled_steps_are_plain_ones(config, checkpointing=encoding == "fire")
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 2 <= graphs[0] == graphs[1] <= 5  # before and after attention


@pytest.mark.slow
@pytest.mark.parametrize("block", [{}, SWIGLU], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("encoding", schemes.NAMES)
def test_what_the_compiler_makes_takes_the_same_step(tiny_config: Config, encoding: str, block: dict[str, str]) -> None:
    model = dataclasses.replace(tiny_config.model, **block)
    assert_compiled_steps_are_plain_ones(
        dataclasses.replace(tiny_config, model=model, encoding=EncodingConfig(encoding))
    )


# Block, tokens, device, `runtime.compile` | whether it is compiled.
COMPILED = """
swiglu 1e9 cpu auto | True
swiglu 1e6 cpu auto | False
gelu 1e9 cpu auto | False
swiglu 1e9 cuda auto | False
gelu 1e6 cuda True | True
swiglu 1e9 cpu False | False
"""


@pytest.mark.parametrize("line", COMPILED.split("\n")[1:-1])
def test_auto_compiles_where_it_pays(tiny_config: Config, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    block, tokens, device, asked, _, expected = line.split()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = dataclasses.replace(tiny_config.model, n_layers=4, d_model=256, n_heads=4)
    config = dataclasses.replace(
        tiny_config,
        model=dataclasses.replace(model, **(SWIGLU if block == "swiglu" else {})),
        training=dataclasses.replace(tiny_config.training, tokens=int(float(tokens))),
        runtime=dataclasses.replace(tiny_config.runtime, compile=asked if asked == "auto" else asked == "True"),
    )
    for size, compiler, serves in ((1, sys.executable, True), (200, sys.executable, False), (1, "no-such", False)):
        monkeypatch.setenv("CXX", compiler)  # a program that is there, or none
        compiled = is_compiled(config, torch.device(device), World(size=size))
        assert compiled == (expected == "True" and (serves or asked == "True"))


def test_subnormal_numbers_are_flushed_to_zero_in_every_thread_of_a_process() -> None:
    code = (
        "import torch; from posbench import machine; assert machine.set_threads(2) == 2;"
        "assert not (torch.full((2**21,), 1e-40) * 1).any()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_memory_names_what_may_fit() -> None:
    message = "out of memory: you tried to allocate 9 GB; a smaller model may fit"
    with pytest.raises(RunFailed, match=message) as caught, machine.out_of_memory_as_failure("a smaller model"):
        raise MemoryError("you tried to allocate 9 GB")
    assert caught.value.reason == "oom"
    with pytest.raises(RuntimeError, match="shapes"), machine.out_of_memory_as_failure("a smaller model"):
        raise RuntimeError("shapes differ")
