"""The benchmark: its arithmetic and its output. Never how fast anything is."""

import json
from functools import partial

import pandas as pd
import pytest
import torch
from support import posbench

from posbench import bench
from posbench.model.gpt import build, train_flops_per_token

SMALL = ["--rounds", "1", "threads=1", "training.train_length=16"]
SMALL += ["training.batch_size=2", "training.precision=fp32"]


def test_half_the_speed_of_none_is_one_half():
    # in three rounds it takes 2, 1 and 4 times as long as none
    seconds = pd.DataFrame({"none": [1.0, 2.0, 4.0], "rope": [2.0, 2.0, 16.0]})

    frame = bench.compared(seconds, tokens=100)

    none = frame.loc["none"]
    rope = frame.loc["rope"]
    assert none["tokens_per_second"] == 50
    assert rope["tokens_per_second"] == 50
    assert none["of_none"] == 1
    assert rope["of_none"] == 0.5
    assert rope["of_none_low"] == 0.375
    assert rope["of_none_high"] == 0.75
    assert len(frame) == 2


def test_contenders_take_turns_and_each_round_reverses_their_order():
    calls = []
    none = partial(calls.append, "none")
    rope = partial(calls.append, "rope")

    contenders = {"none": none, "rope": rope}
    a_call_a_turn = 1e-12
    bench.take_turns(contenders, 2, torch.device("cpu"), a_call_a_turn)

    assert calls[-4:] == ["none", "rope", "rope", "none"]


@pytest.fixture
def short_turns(monkeypatch):
    monkeypatch.setattr(bench, "TURN_SECONDS", 1e-3)


def test_each_scheme_is_compared_with_none(short_turns, capsys):
    code = posbench("bench", "rope", "none", "--json", *SMALL)

    assert code == 0
    rope, none = json.loads(capsys.readouterr().out)
    assert rope["encoding"] == "rope"
    assert rope["tokens_per_second"] > 0
    assert none["encoding"] == "none"
    assert none["of_none"] == 1
    assert none["of_none_low"] == 1
    assert none["of_none_high"] == 1
    assert none["peak_bytes"] is None
    assert none["of_peak"] is None


def test_the_share_of_a_known_peak_is_shown(short_turns, monkeypatch, capsys):
    monkeypatch.setattr(bench.machine, "peak_flops", lambda device, dtype: 1e9)

    assert posbench("bench", "none", "--json", *SMALL) == 0
    (none,) = json.loads(capsys.readouterr().out)
    assert posbench("bench", "none", *SMALL) == 0

    sizes = bench.sizes_of("demo")
    config = bench.configurations(["none"], sizes, [])["none"]
    flops = train_flops_per_token(build(config, sizes.vocab_size), 16)
    share = none["tokens_per_second"] * flops / 1e9
    assert none["of_peak"] == pytest.approx(share)
    assert "of peak" in capsys.readouterr().out


def test_the_table_says_how_it_was_measured(short_turns, capsys):
    code = posbench("bench", "none", *SMALL)

    assert code == 0
    assert "2 x 16 tokens, fp32, cpu, 1 thread," in capsys.readouterr().out


def test_flops_agree_with_torchs_own_counter(monkeypatch):
    # which it does not count
    monkeypatch.setattr("posbench.model.attention.fused_is_fast", lambda *_: False)
    from torch.utils.flop_counter import FlopCounterMode

    # one token sees one key: nothing is masked, so that both count the same
    sizes = bench.sizes_of("demo")
    words = ["training.train_length=2"]
    config = bench.configurations(["none"], sizes, words)["none"]
    model = build(config, sizes.vocab_size)
    ids = torch.zeros(3, 1, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        logits = model(ids)
        logits.sum().backward()
    assert counter.get_total_flops() == 3 * train_flops_per_token(model, 1)
