"""A run's rows, recomputed without posbench."""

import json

import numpy as np
import pytest
import recompute
from support import TINY, posbench, write_text

from posbench.data import tokens
from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols
from posbench.run.folder import load_config

TRAINED = 24
LENGTHS = [3, 16, 24, 40, 100]


@pytest.mark.parametrize(
    "protocol", ["fixed_target", pytest.param("nonoverlap", marks=pytest.mark.slow)]
)
def test_it_places_targets_where_posbench_does_whatever_the_documents(protocol):
    """Placements are compared over documents of all lengths, among them documents that
    are too short.
    """
    draw = np.random.default_rng(0)
    possible = set()
    for _ in range(40):
        longest_document = draw.choice([30, 300, 3000])
        n_documents = draw.integers(1, 40)
        sizes = draw.integers(1, longest_document, n_documents)
        starts = np.append(0, np.cumsum(sizes))
        ids = draw.integers(0, 50, starts[-1])
        settings = {
            "targets": int(draw.integers(1, 17)),
            "blocks": int(draw.integers(8, 200)),
            "documents": "auto",
        }
        longest = int(draw.choice([16, 100, 256]))

        stored = ids.astype(np.uint16)
        split = TokenSplit(stored, starts.astype(np.int64))
        reach = {"longest": longest, "train_length": TRAINED}
        plan = protocols.place_windows(protocol, split, LENGTHS, **settings, **reach)

        text = recompute.Stream(ids, starts.tolist())
        n_halvings = longest.bit_length()
        halvings = {longest >> times for times in range(n_halvings)}
        reaches = {length for length in halvings.union(LENGTHS) if length >= TRAINED}
        for length, windows in plan.items():
            placed = recompute.placement(protocol, text, reaches, settings)
            blocks = recompute.blocks_of(
                protocol, placed, length, settings["targets"], TRAINED
            )
            theirs = recompute.targets_sha256(blocks, ids)
            ours = protocols.targets_of(windows).sha256(split)
            assert theirs == ours, (starts, settings)
        possible.add(len(plan))
    # some texts are too short for all, some for the longest only
    assert {0, 5} < possible


SMALL = [
    *TINY,
    "data.path=text.txt",
    "training.tokens=512",
    "training.precision=fp32",
    "runtime.cache=cache",
]


RUNS = [
    "encoding=rope encoding.base=300 evaluation.split=validation",
    "encoding=alibi evaluation.documents=concat",
    "encoding=alibi encoding.slopes=[0.1,0.7] evaluation.ratios=[1,1.5,4]"
    " evaluation.protocols=[fixed_target,nonoverlap]",
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("words", RUNS)
def test_it_agrees_with_a_run_and_sees_a_number_that_was_changed(
    words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_text()
    assert posbench("train", *SMALL, *words.split()) == 0
    (folder,) = tmp_path.glob("outputs/*/[!.]*")
    config = load_config(folder)
    data = tokens.prepare(config.data, tmp_path / "cache")
    split = getattr(data, config.evaluation.split)

    ids = split.ids.astype(np.int64)
    text = recompute.Stream(ids, split.starts.tolist())
    if split.sources is not None:
        text = text._replace(sources=split.sources.tolist())
    run = recompute.Run(folder, text)

    lengths = {row["length"] for row in run.rows}
    assert len(lengths) > 1
    for row in run.rows:
        assert run.agrees(row), json.dumps(row)
    nll = row["nll"] + 1e-3
    assert not run.agrees({**row, "nll": nll})
    assert not run.agrees({**row, "targets_sha256": "0" * 64})
    assert not run.agrees({**row, "n_bytes": 7})
