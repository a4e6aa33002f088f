"""The benchmark: its arithmetic, its fairness and its output. Never how fast anything is."""

import contextlib
import io
import json
import os
from typing import Any

import numpy as np
import pytest
import torch
from support import posbench

from posbench import encodings
from posbench.bench import speed, timing
from posbench.bench.timing import Timings, load_average, step_memory, take_turns
from posbench.model.gpt import build, train_flops_per_token

CPU = torch.device("cpu")
SMALL = ["--length", "16", "--rounds", "1", "--threads", "1", "training.batch_size=2", "training.precision=fp32"]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(timing, "TURN_SECONDS", 1e-2)
        assert posbench("bench", "rope", "none", "learned", "--json", *SMALL) == 0
    found: list[dict[str, Any]] = json.loads(out.getvalue())
    assert [row["encoding"] for row in found] == ["rope", "none", "learned"]
    return {row["encoding"]: row for row in found}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURN_SECONDS", 1e-3)


@pytest.mark.full
def test_the_command_reports_every_scheme_asked_for(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        assert (row["shape"], row["train_length"], row["batch_size"]) == ("demo", 16, 2)
        assert (row["device"], row["dtype"], row["threads"], row["rounds"]) == ("cpu", "fp32", 1, 1)
        assert row["train_tokens_per_second"] > 0
        assert row["ratio_to_none_low"] <= row["ratio_to_none"] <= row["ratio_to_none_high"]
        assert [one["length"] for one in row["evaluation"]] == [16, 64, 256]


@pytest.mark.full
def test_none_is_exactly_as_fast_as_itself(rows: dict[str, dict[str, Any]]) -> None:
    keys = ("ratio_to_none", "ratio_to_none_low", "ratio_to_none_high")
    assert [rows["none"][key] for key in keys] == [1, 1, 1]
    assert all(one["ratio_to_none"] == 1 for one in rows["none"]["evaluation"])


@pytest.mark.full
def test_beyond_the_end_of_a_table_there_is_no_speed(rows: dict[str, dict[str, Any]]) -> None:
    speeds = [one["tokens_per_second"] for one in rows["learned"]["evaluation"]]
    assert speeds[0] > 0 and speeds[1:] == [None, None]
    assert all(one["tokens_per_second"] > 0 for one in rows["rope"]["evaluation"])


@pytest.mark.full
def test_peak_memory_holds_weights_gradients_and_optimizer_state(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        least = 4 * 4 * row["parameters"]  # fp32 weights, gradients and AdamW's two averages
        assert least < row["peak_memory_bytes"] < 3 * least  # two sequences of 16 tokens add little


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["ropee"], "error: unknown encoding 'ropee': did you mean 'rope'? ('posbench list' shows all)"),
        (["rope", "length=512"], "error: bench scores 1, 4 and 16 training lengths: --length sets the training length"),
        (["precision=fp32"], "error: bench trains and evaluates in one precision: training.precision sets it"),
        (["rope", "--shape", "3n"], "error: unknown shape '3n': did you mean '3m'? (there are demo, 3m, 12m, 124m)"),
    ],
)
def test_an_unknown_name_is_one_line_before_any_work(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert posbench("bench", *arguments) == 2
    assert capsys.readouterr() == ("", f"{line}\n")


@pytest.mark.full
def test_the_table_has_a_row_for_each_encoding(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    speed.main(["rope", "training.batch_size=2"], length=16, rounds=2, threads=1)
    shown = " ".join(capsys.readouterr().out.split())
    assert "rope" in shown and "2 x 16 tokens per step" in shown


@pytest.mark.full
def test_without_names_all_schemes_are_measured_that_need_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "names", lambda: ["alibi", "needs_an_option", "none", "rope"])
    found = speed.configurations([], speed.find_shape("demo"), threads=1, overrides=[])
    assert list(found) == ["none", "alibi", "rope"]


def test_flops_agree_with_a_count_by_hand() -> None:
    """Demo: 4 blocks of 12 x 128^2 weights and a head of 2048 x 128; 64 tokens see 32.5 keys each on average."""
    sizes = speed.find_shape("demo")
    model = build(speed.configuration("none", sizes, threads=1, overrides=[]), sizes.vocab_size)
    weights = 4 * 12 * 128**2 + 2048 * 128
    forward = 2 * weights + 4 * 32.5 * (2 * 128 + 2 * 128)
    assert train_flops_per_token(model, 64) == 3 * forward == 6_491_136


def test_flops_agree_with_torchs_own_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    sizes = speed.find_shape("demo", 1)  # one token sees one key: nothing is masked, so that both count the same
    model = build(speed.configuration("none", sizes, 1, ["training.train_length=2"]), sizes.vocab_size)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(3, 1, dtype=torch.long)).sum().backward()
    assert counter.get_total_flops() == 3 * train_flops_per_token(model, 1)


def test_another_length_keeps_the_tokens_of_a_batch() -> None:
    assert speed.find_shape("12m", 1024).batch_size == 4
    assert speed.find_shape("demo", 4096).batch_size == 1


def test_ratios_are_paired_within_rounds() -> None:
    """The machine slows down threefold, the scheme takes twice as long as none in every round."""
    wall = {"none": np.array([1.0, 2.0, 3.0]), "slow": np.array([2.0, 4.0, 6.0])}
    timings = Timings(wall)
    assert [timings.ratio("slow", "none", quantile) for quantile in (0.25, 0.5, 0.75)] == [0.5] * 3


def test_contenders_take_equally_many_turns_in_alternating_order(quick: None) -> None:
    turns: list[str] = []
    timings = take_turns({name: lambda n=name: turns.append(n) for name in "abc"}, 4, CPU)  # type: ignore[misc]
    assert turns.count("a") == turns.count("b") == turns.count("c")
    order = [name for name, before in zip(turns[9:], ["", *turns[9:]], strict=False) if name != before]
    assert "".join(order) == "abcbabcba"  # abc cba abc cba, where equal neighbours are one
    assert all(len(seconds) == 4 for seconds in timings.seconds.values())


def test_memory_of_a_step_is_its_fullest_moment() -> None:
    model = torch.nn.Linear(10, 100, bias=False)

    def step() -> None:
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        torch.zeros(700)
        del second

    assert step_memory(model, torch.optim.SGD(model.parameters()), step, CPU) == 4 * (1000 + 1000 + 500)


def test_a_busy_machine_is_pointed_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.2, 0, 0))
    assert load_average(2) == 2.2
    assert capsys.readouterr().err == ""
    assert load_average(3) == 2.2
    assert "busy (load average 2.2, 4 cores, 3 wanted here)" in capsys.readouterr().err
