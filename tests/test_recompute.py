"""The script that recomputes a run without posbench, where it can be asked in milliseconds; slow/ has whole runs."""

import ast
import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest
import yaml
from support import SCRIPTS, TINY, posbench, script, write_text

from posbench.config.schema import DataConfig
from posbench.data import text
from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols

CONFIGS = SCRIPTS.parent / "configs" / "data"
RUN = [*TINY, "data.path=text.txt", "training.tokens=512", "training.precision=fp32", "runtime.outputs=out"]


@pytest.fixture(scope="module")
def recompute() -> Any:
    return script("recompute")


def test_it_imports_nothing_of_posbench_and_runs_none_of_it() -> None:
    tree = ast.parse((SCRIPTS / "recompute.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in imported}
    others = {"numpy", "safetensors", "tokenizers", "torch", "yaml"}
    assert packages - sys.stdlib_module_names == others
    assert packages.isdisjoint({"importlib", "runpy", "subprocess"})
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called.isdisjoint({"__import__", "exec", "eval"})


@pytest.mark.sample(3)
@pytest.mark.parametrize("protocol", ["fixed_target", "nonoverlap"])
def test_it_places_targets_where_posbench_does_whatever_the_documents(protocol: str, recompute: Any) -> None:
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


@pytest.mark.parametrize(("count", "wanted"), [(60, None), (60, 30), (30, None), (30, 30), (9, 30)])
def test_it_splits_text_as_posbench_does(
    count: int, wanted: int | None, recompute: Any, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "text"
    (folder / "b").mkdir(parents=True)
    for i in range(count):
        (folder / ("b" if i % 3 else ".") / f"{i}.txt").write_bytes(f"Text {i // 4}, é\r\n".encode() * (i // 4 + 1))
    (folder / "0.txt").write_bytes(b"\xef\xbb\xbfa mark before it")
    (folder / "blank.txt").write_text(" \n", encoding="utf-8")
    (folder / ".hidden.txt").write_text("hidden", encoding="utf-8")
    data = yaml.safe_load((CONFIGS / "_base.yaml").read_text(encoding="utf-8"))
    data = {key: value for key, value in data.items() if key != "defaults"}
    data |= {"name": "text", "source": "text", "path": str(folder), "test_pieces": wanted}
    config = DataConfig(**data)
    splits, record = text.load(config, text.locate(config, tmp_path), tmp_path)
    for split in ("validation", "test"):
        mine = recompute.split_documents(data, record["split"], split, None)
        assert mine == list(splits[split])
        assert any(mine)


def rows_of(folder: pathlib.Path) -> list[str]:
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if '"protocol"' in line]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "encoding",
    [
        ["rope", "evaluation.protocols=[fixed_target,nonoverlap]"],
        ["rope", "encoding.layout=half", "encoding.base=300", "evaluation.split=validation"],
        ["alibi", "model.d_model=18", "model.n_heads=3", "evaluation.documents=concat"],
        ["alibi", "encoding.slopes=[0.1,0.7]", "evaluation.ratios=[1,1.5,4]", "evaluation.tasks=[shuffle]"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_it_finds_what_a_run_on_text_printed_and_sees_a_number_that_was_changed(
    encoding: list[str],
    recompute: Any,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    name, *options = encoding
    assert posbench("train", f"encoding={name}", *RUN, *options, "runtime.cache=cache") == 0
    (folder,) = tmp_path.glob("out/demo/[!.]*")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["recompute.py", str(folder)])
    assert recompute.main() == 0, capsys.readouterr().out
    *table, summary = capsys.readouterr().out.splitlines()[1:]
    covered = [row for row in map(json.loads, rows_of(folder)) if row["task"] is None]
    assert len(table) == len(covered) and summary.startswith(f"{len(covered)} of {len(covered)} rows agree")

    first, *others = rows_of(folder)
    for column, value in {"nll": json.loads(first)["nll"] + 1e-3, "targets_sha256": "0" * 64, "n_bytes": 7}.items():
        changed = json.dumps({**json.loads(first), column: value}) + "\n"
        (folder / "rows.jsonl").write_text("".join([changed, *others]), encoding="utf-8")
        assert recompute.main() == 1, column
        assert [line.endswith("<-") for line in capsys.readouterr().out.splitlines()[1:-1]] == [True] + [False] * (
            len(table) - 1
        )
