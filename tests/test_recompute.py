"""A run's rows, recomputed without posbench."""

import ast
import json
import pathlib
import sys

import numpy as np
import pytest
import recompute
from support import TINY, posbench, write_text

from posbench.data import tokens
from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols
from posbench.run.run import load_config


def test_it_imports_nothing_of_posbench() -> None:
    nodes = list(ast.walk(ast.parse(pathlib.Path(recompute.__file__).read_text(encoding="utf-8"))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in imported}
    assert packages - sys.stdlib_module_names == {"numpy", "safetensors", "tokenizers", "torch", "yaml"}
    assert "importlib" not in packages


@pytest.mark.sample(3)
@pytest.mark.parametrize("protocol", ["fixed_target", "nonoverlap"])
def test_it_places_targets_where_posbench_does_whatever_the_documents(protocol: str) -> None:
    """Compared over documents of all lengths, too short ones among them."""
    draw = np.random.default_rng(0)
    seen = []
    for _ in range(60):
        ends = np.cumsum(draw.integers(1, draw.choice([30, 300, 3000]), draw.integers(1, 40)))
        starts = np.concatenate([[0], ends])
        ids = draw.integers(0, 50, ends[-1])
        settings = {"targets": int(draw.integers(1, 17)), "blocks": int(draw.integers(8, 200)), "documents": "auto"}
        lengths, longest = [3, 16, 24, 40, 100], int(draw.choice([16, 100, 256]))
        trained = 24  # at shorter lengths windows score a part of a block
        split = TokenSplit(ids.astype(np.uint16), starts.astype(np.int64))
        plan = protocols.plan(protocol, split, lengths, **settings, longest=longest, train_length=trained)
        possible = list(plan)
        seen.append((len(possible), {plan[length].documents for length in possible}))
        halvings = {longest >> times for times in range(longest.bit_length())}
        reaches = {length for length in {*lengths, *halvings} if length >= trained}
        for length in possible:
            placed = recompute.placement(protocol, recompute.Stream(ids, starts.tolist()), reaches, settings)
            blocks = recompute.blocks_of(protocol, placed, length, settings["targets"], trained)
            theirs = protocols.targets_of(plan[length]).sha256(split)
            assert recompute.targets_sha256(blocks, ids) == theirs, (starts, settings, length, longest)
    assert {"doc", "concat"} <= set().union(*(documents for _, documents in seen))
    assert {0, 5} < {possible for possible, _ in seen}  # some texts are too short for all, some for the longest only


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "encoding",
    [
        ["rope", "evaluation.protocols=[fixed_target,nonoverlap]"],
        ["rope", "encoding.base=300", "evaluation.split=validation"],
        ["alibi", "evaluation.documents=concat"],
        ["alibi", "encoding.slopes=[0.1,0.7]", "evaluation.ratios=[1,1.5,4]", "evaluation.tasks=[shuffle]"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_it_agrees_with_a_run_and_sees_a_number_that_was_changed(
    encoding: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    words = [*TINY, "data.path=text.txt", "training.tokens=512", "training.precision=fp32", "runtime.cache=cache"]
    name, *options = encoding
    assert posbench("train", f"encoding={name}", *words, *options) == 0
    (folder,) = tmp_path.glob("outputs/*/[!.]*")
    config = load_config(folder)
    split = getattr(tokens.prepare(config.data, tmp_path / "cache"), config.evaluation.split)
    sources = None if split.sources is None else split.sources.tolist()
    run = recompute.Run(folder, recompute.Stream(split.ids.astype(np.int64), split.starts.tolist(), sources))
    assert len({row["length"] for row in run.rows}) > 1
    for row in run.rows:
        assert run.agrees(row), json.dumps(row)
    for column, value in {"nll": row["nll"] + 1e-3, "targets_sha256": "0" * 64, "n_bytes": 7}.items():
        assert not run.agrees(row | {column: value}), column
