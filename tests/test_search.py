"""`extension=search`: the ranks of candidates, and what is said of the chosen one."""

import re
from pathlib import Path

import hf_models
import pandas as pd
import pytest
from support import posbench

from posbench.huggingface.search import ranked

pytest.importorskip("transformers")


@pytest.mark.slow
def test_a_search_ranks_by_the_worse_of_loss_and_retrieval_and_reports_test_text(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    hf_models.save("llama", Path("llama"))
    hf_models.write_text(Path("text.txt"))
    words = [
        "data=text",
        "data.path=text.txt",
        "targets=16",
        "blocks=16",
        "device=cpu",
        "threads=1",
    ]
    assert (
        posbench("evaluate", "./llama", "extension=search", "length=192", *words) == 0
    )
    shown = capsys.readouterr().out
    table = [
        line.split()
        for line in shown.splitlines()
        if ":factor=" in line or line.startswith(("none", "dynamic"))
    ]
    # no token of this tokenizer is a digit
    losses = [float(line[1]) for line in table[:12]]
    assert losses == sorted(losses)
    assert "trained at 48 tokens" in shown
    assert "by loss: in passkey none" in shown
    assert re.search(
        rf"\n{table[0][0]} less {table[1][0]} at 192 tokens of validation text: [-+].*"
        r" segments.\n",
        shown,
    )
    assert (
        ("none at 48 tokens of test" in shown)
        == ("None of these" not in shown)
        == (table[0][0] != "none")
    )
    frame = pd.DataFrame(
        {"extension": [None, "pi", "yarn"] * 2, "variant": "plain", "length": 192}
    )
    frame = frame.assign(
        length_ratio=4.0,
        unit_nll=None,
        unit_tokens=None,
        ci_over="",
        chance=0.1,
        newest=True,
    )
    frame["protocol"] = ["fixed_target"] * 3 + ["task"] * 3
    frame["task"] = [None] * 3 + ["passkey"] * 3
    frame["nll"] = [1.0, 1.1, 1.2, *[None] * 3]
    frame["accuracy"] = [*[None] * 3, 0.1, 0.5, 0.4]
    # on other targets
    others = (
        frame.assign(variant="sinks", extension="sinks"),
        frame.assign(newest=False, nll=9.0),
    )
    frame = pd.concat([frame, *others], ignore_index=True)
    # of 5 none beats chance
    for blocks, best_first in (
        (100, ["pi", "none", "yarn"]),
        (5, ["none", "pi", "yarn"]),
    ):
        assert (
            list(ranked(frame.assign(n_blocks=blocks), 192)["extension"]) == best_first
        )
