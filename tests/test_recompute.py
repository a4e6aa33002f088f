"""A run's rows, recomputed without posbench."""

import json

import numpy as np
import pytest
import recompute
from support import TINY, posbench, write_text

from posbench.data import tokens
from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols
from posbench.run.run import load_config


@pytest.mark.parametrize(
    "protocol", ["fixed_target", pytest.param("nonoverlap", marks=pytest.mark.slow)]
)
def test_it_places_targets_where_posbench_does_whatever_the_documents(protocol):
    """Placements are compared over documents of all lengths, among them documents that
    are too short.
    """
    draw = np.random.default_rng(0)
    trained = 24
    lengths = [3, 16, 24, 40, 100]
    possible = set()
    for _ in range(40):
        ends = np.cumsum(
            draw.integers(1, draw.choice([30, 300, 3000]), draw.integers(1, 40))
        )
        starts = np.concatenate([[0], ends])
        ids = draw.integers(0, 50, ends[-1])
        settings = {
            "targets": int(draw.integers(1, 17)),
            "blocks": int(draw.integers(8, 200)),
            "documents": "auto",
        }
        longest = int(draw.choice([16, 100, 256]))
        split = TokenSplit(ids.astype(np.uint16), starts.astype(np.int64))
        plan = protocols.plan(
            protocol, split, lengths, **settings, longest=longest, train_length=trained
        )
        possible.add(len(plan))
        halvings = {longest >> times for times in range(longest.bit_length())}
        reaches = {length for length in {*lengths, *halvings} if length >= trained}
        for length in plan:
            placed = recompute.placement(
                protocol, recompute.Stream(ids, starts.tolist()), reaches, settings
            )
            blocks = recompute.blocks_of(
                protocol, placed, length, settings["targets"], trained
            )
            theirs = protocols.targets_of(plan[length]).sha256(split)
            assert recompute.targets_sha256(blocks, ids) == theirs, (
                starts,
                settings,
                length,
                longest,
            )
    # some texts are too short for all, some for the longest only
    assert {0, 5} < possible


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "words",
    [
        "rope encoding.base=300 evaluation.split=validation",
        "alibi evaluation.documents=concat",
        (
            "alibi encoding.slopes=[0.1,0.7] evaluation.ratios=[1,1.5,4]"
            " evaluation.protocols=[fixed_target,nonoverlap]"
        ),
    ],
)
def test_it_agrees_with_a_run_and_sees_a_number_that_was_changed(
    words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_text()
    small = [
        *TINY,
        "data.path=text.txt",
        "training.tokens=512",
        "training.precision=fp32",
        "runtime.cache=cache",
    ]
    assert posbench("train", *small, *f"encoding={words}".split()) == 0
    (folder,) = tmp_path.glob("outputs/*/[!.]*")
    config = load_config(folder)
    split = getattr(
        tokens.prepare(config.data, tmp_path / "cache"), config.evaluation.split
    )
    sources = None if split.sources is None else split.sources.tolist()
    run = recompute.Run(
        folder,
        recompute.Stream(split.ids.astype(np.int64), split.starts.tolist(), sources),
    )
    assert len({row["length"] for row in run.rows}) > 1
    for row in run.rows:
        assert run.agrees(row), json.dumps(row)
    for column, value in {
        "nll": row["nll"] + 1e-3,
        "targets_sha256": "0" * 64,
        "n_bytes": 7,
    }.items():
        assert not run.agrees(row | {column: value}), column
