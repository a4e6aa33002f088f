"""Muon: its steps are torch's, each part of a matrix takes its own, and AdamW has all
that is no matrix of a block.
"""

import math

import pytest
import support
import torch
from torch.testing import assert_close

from posbench.model.gpt import build
from posbench.training.optimizers.muon import ITERATIONS, A, B, C, Muon, orthogonal
from posbench.training.step import Trainer, optimizer_for

V = 50  # size of the vocabulary
RATE = 1e-2
SHAPES = [(24, 24), (16, 40), (40, 16)]
# as `posbench train model=llama model.n_kv_heads=1` has it, with heads of 8 channels
GROUPED = {
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "d_model": 16,
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "tie_embeddings": False,
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_muon(config, precision="fp32", **training):
    training |= {"optimizer": "muon", "precision": precision}
    return support.changed(config, training=training)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_takes_the_steps_of_torchs_muon(tiny_config, shape):
    config = with_muon(tiny_config, precision="bf16", muon_ratio=3.0, momentum=0.9)
    weight = normal(*shape).requires_grad_()
    groups = [{"params": [weight], "parts": [[shape[0]]], "weight_decay": 0.1}]
    ours = Muon(groups, config.training)
    ours.param_groups[0]["lr"] = 3 * RATE
    copy = weight.detach().clone().requires_grad_()
    theirs = torch.optim.Muon(
        [copy],
        lr=3 * RATE,
        weight_decay=0.1,
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )

    for step in range(3):
        weight.grad = normal(*shape, seed=step)
        copy.grad = weight.grad.clone()
        ours.step()
        theirs.step()

    moved = (copy.detach() - normal(*shape)).abs().max()
    # both compute with the 8 bits of bf16, in another order
    assert_close(weight, copy, atol=float(moved) * 2**-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_is_made_orthogonal_as_its_singular_values_say(shape):
    stack = normal(3, *shape)

    u, values, v = torch.linalg.svd(stack.double(), full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True)
    for _ in range(ITERATIONS):
        values = A * values + B * values**3 + C * values**5
    expected = u @ torch.diag_embed(values) @ v

    assert_close(orthogonal(stack).double(), expected, atol=1e-4, rtol=0)


def test_queries_keys_values_and_gates_are_orthogonal_each_by_itself(tiny_config):
    config = support.changed(tiny_config, model=GROUPED)
    config = with_muon(config, weight_decay=0.0)
    model = build(config, V)
    optimizer = optimizer_for(model, config.training)
    before = {}
    for seed, (name, weight) in enumerate(model.named_parameters()):
        before[name] = weight.detach().clone()
        weight.grad = normal(*weight.shape, seed=seed)
        if name.endswith("qkv.weight"):
            weight.grad[:16] *= 100  # queries do not drown keys and values
    for group in optimizer.param_groups:
        group["lr"] = RATE

    optimizer.step()

    moved = {}
    for name, weight in model.named_parameters():
        moved[name] = (before[name] - weight.detach()) / RATE
    for index in range(2):
        block = f"blocks.{index}"
        q, k, v = moved[f"{block}.attention.qkv.weight"].split([16, 8, 8])
        matrices = [q, k, v, moved[f"{block}.attention.out.weight"]]
        for name in ("gate", "up", "down"):
            matrices.append(moved[f"{block}.mlp.{name}.weight"])
        for matrix in matrices:
            size = 0.2 * math.sqrt(max(matrix.shape))
            values = torch.linalg.svdvals(matrix / size)
            assert values.min() > 0.3  # in one part, those of keys were 0.01
            assert values.max() < 1.3


@pytest.mark.parametrize("encoding", ["t5", "cape", "fox", "gated_delta"])
def test_adamw_has_all_but_the_matrices_of_the_blocks(tiny_config, encoding):
    config = with_muon(support.encoded(tiny_config, encoding), muon_ratio=2.0)
    model = build(config, V)
    optimizer = optimizer_for(model, config.training)
    of_muon = set()
    of_adamw = set()
    for group in optimizer.param_groups:
        names = of_muon if "parts" in group else of_adamw
        names.update(id(weight) for weight in group["params"])

    for name, weight in model.named_parameters():
        is_ours = name.startswith("blocks.") and weight.dim() == 2
        assert (id(weight) in of_muon) == is_ours, name
        assert (id(weight) in of_adamw) != is_ours, name


def test_muon_keeps_its_ratio_and_an_encoding_its_rate(tiny_config):
    config = with_muon(support.encoded(tiny_config, "t5"), muon_ratio=2.0)
    trainer = Trainer(build(config, V), config, torch.device("cpu"), torch.float32)
    factors = [group.get("times", 1.0) for group in trainer.optimizer.param_groups]
    assert factors == [2, 1, 1, 10]
