"""What is promised to stay: names of runs, texts and tokens, losses, and every number
that README and docs print.

The literals in tests/data/frozen.json were written before the code was made smaller.
How a test reads posbench may change with its code. The literals never do, unless a page
of docs/ says which number changed and why.
"""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from fake_study import rows_of_study
from schemes import cases, label, untrained

from posbench import encodings
from posbench.claims import claim, reproduce
from posbench.config.compose import single
from posbench.config.schema import to_container
from posbench.config.shipped import configs_dir
from posbench.data import tokens
from posbench.encodings.base import Shape
from posbench.errors import Undefined
from posbench.model.gpt import build
from posbench.results.compare import NOT_RESOLVED, compare

ROWS = Path(__file__).parents[1] / "docs" / "rows"
FROZEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "frozen.json").read_text(encoding="utf-8")
)
PATTERNS = sorted(
    f"layered/{path.stem}"
    for path in (configs_dir() / "encoding" / "layered").glob("*.yaml")
)


@pytest.mark.sample(16)
@pytest.mark.parametrize("part", range(16))
def test_configurations_name_the_runs_of_old(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text", encoding="utf-8")
    # A finished run with only the files that `start=source` reads.
    config = single(["data.tokenizer=bytes", "tracking=none"])
    place = tmp_path / "source" / "checkpoint" / "step-000489"
    place.mkdir(parents=True)
    (tmp_path / "source" / "config.yaml").write_text(
        yaml.safe_dump(to_container(config)), encoding="utf-8"
    )
    run = {"status": "done", "tokenizer_sha256": "b" * 64, "data": {"sha256": "c" * 64}}
    (tmp_path / "source" / "run.json").write_text(json.dumps(run), encoding="utf-8")
    manifest = {
        "step": config.training.steps,
        "files": {"model.safetensors": {"sha256": "a" * 64}},
    }
    (place / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert len(FROZEN["ids"]) >= 200
    chosen = dict(list(FROZEN["ids"].items())[part::16])
    assert {words: single(words.split()).id for words in chosen} == chosen


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_built_in_text_gives_the_same_splits_and_tokens(
    tokenizer: str, tmp_path: Path
) -> None:
    made = tokens.prepare(
        single([f"data.tokenizer={tokenizer}", "tracking=none"]).data, tmp_path
    )
    if made.record["sha256"] not in FROZEN["tokens"]:
        pytest.skip(
            "this Python's library is another text than those whose tokens are frozen"
        )
    for name in ("train", "validation", "test"):
        split = getattr(made, name)
        stream = (
            np.asarray(split.ids, np.uint32).tobytes()
            + np.asarray(split.starts, np.int64).tobytes()
        )
        assert (
            hashlib.sha256(stream).hexdigest()
            == FROZEN["tokens"][made.record["sha256"]][f"{tokenizer} {name}"]
        )


def test_every_frozen_scheme_is_there_and_begins_with_its_frozen_parameters() -> None:
    # an encoding that is added has no frozen loss yet
    assert {*FROZEN["losses"]} <= {*encodings.names(), *PATTERNS}
    sums = {}  # of absolute values
    for case in cases():
        if case[0] not in FROZEN["losses"]:
            continue
        torch.manual_seed(0)
        parameters = untrained(*case, Shape(32, 4, 2, 32)).parameters()
        sums[label(case)] = float(
            sum(each.detach().double().abs().sum() for each in parameters)
        )
    assert {name: total for name, total in sums.items() if total} == pytest.approx(
        FROZEN["start"], rel=1e-5
    )


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", sorted(FROZEN["losses"]))
def test_a_scheme_reaches_its_frozen_losses(name: str) -> None:
    """Losses at one and two times the training length after eight updates, or
    "undefined" where the encoding ends.

    The text repeats eleven symbols, so that a model gains by looking back.
    """
    shape = [
        "model.n_layers=4",
        "model.d_model=32",
        "model.n_heads=2",
        "training.train_length=32",
    ]
    model = build(
        single([f"encoding={name}", *shape, "tracking=none"]),
        16,
        (*"0123456789", *"abcdef"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(
        0, 16, (9, 8, 11), generator=torch.Generator().manual_seed(0)
    ).repeat(1, 1, 6)
    drawn = torch.Generator().manual_seed(1)
    model.train()
    for step in range(8):
        loss = model(ids[step, :, :32], ids[step, :, 1:33], generator=drawn)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    for length, frozen in zip((32, 64), FROZEN["losses"][name], strict=True):
        with pytest.raises(Undefined) if frozen == "undefined" else torch.no_grad():
            assert float(
                model(ids[8, :, :length], ids[8, :, 1 : length + 1])
            ) == pytest.approx(frozen, abs=1e-4)


def cell(row: Any, name: str) -> str:
    """Return a mean with its interval, or with its range if seeds are in two groups, as
    tables printed it.
    """
    if row[f"{name}_groups"]:
        return f"{row[name]:+.3f} [{row[f'{name}_min']:.3f}, {row[f'{name}_max']:.3f}]"
    return f"{row[name]:+.3f} ±{(row[f'{name}_high'] - row[f'{name}_low']) / 2:.3f}"


def cells(table: pd.DataFrame) -> list[list[str]]:
    """Return the cells of the three main tables, without adjusted intervals, which have
    replaced joint ones.
    """
    ratios, rows = [f"rise_{ratio:g}x" for ratio in table.attrs["ratios"]], []
    if "holds_to" not in table:  # no scheme has learned
        table = table.assign(holds_to=math.nan, uses=math.nan)
    for row in table.to_dict("records"):
        label, loss = row["label"], f"{row['nll']:.3f}"
        numbers = "{nll_sd:.3f} {nll_text_error:.3f} {perplexity:.2f} {bits_per_byte:.3f}".format(
            **row
        ).split()
        rows.append([label, str(row["seeds"]), loss, row["learned"], *numbers])
        reach = (
            ""
            if math.isnan(row["holds_to"])
            else f"{'≥ ' * row['holds_further']}{row['holds_to']:.0f}"
        )
        context = "" if math.isnan(row["uses"]) else f"{row['uses']:.0f}"
        rows.append(
            [
                label,
                loss,
                *(cell(row, name) for name in ratios),
                row["learned"],
                reach,
                context,
            ]
        )
        if label != "rope":
            rows.append(
                [label, cell(row, "nll_difference"), cell(row, "rise_difference")]
            )
    return rows


def frozen_cells(study: str, table: pd.DataFrame) -> list[list[str]]:
    """Return the frozen cells, with the context used only for schemes that beat the
    cached n-gram model, as today.
    """
    rows, silent = [], set(table.loc[table["uses_context"] != "yes", "label"])
    for row in FROZEN["tables"][study]:
        if row[1].isdigit():
            rows.append(row[:8])
        elif row[-1] == "" or row[-1].isdigit():
            rows.append([*row[:-1], "" if row[0] in silent else row[-1]])
        else:
            rows.append([row[0], row[1], row[3] if len(row) > 4 else row[2]])
    return rows


@pytest.mark.parametrize(
    "study", ["six", pytest.param("six_demo", marks=pytest.mark.slow)]
)
def test_the_main_tables_have_their_frozen_numbers_and_words(study: str) -> None:
    """Differences at the training length need no gate; rises do, which rope of six_demo
    has not passed.
    """
    table = compare(rows_of_study(study))
    assert sorted(cells(table)) == sorted(frozen_cells(study, table))
    words = table.set_index("label")[["nll_word", "rise_word"]].drop("rope")
    if study == "six":
        # by loss
        assert list(table["label"]) == [
            "fox",
            "rope",
            "t5",
            "alibi",
            "sinusoidal",
            "none",
        ]
        for label, *_, frozen in (
            row for row in FROZEN["tables"]["six"] if ";" in row[-1]
        ):
            assert set(words.loc[label]) == set(
                re.sub(" at [14]x", "", frozen).split("; ")
            )
    else:
        better, resolved = (
            dict.fromkeys(["fox", "t5"], "better"),
            {"alibi": NOT_RESOLVED},
        )
        assert words["nll_word"].to_dict() == better | resolved | dict.fromkeys(
            ["none", "sinusoidal"], "worse"
        )
        assert set(words["rise_word"]) == {""}
        reasons = table.set_index("label")["rise_why"]
        assert (
            reasons["fox"] == "whether fox has learned is not resolved"
            and reasons["none"] == "none has not learned"
        )


@pytest.mark.slow
def test_claims_have_their_frozen_outcomes() -> None:
    """Every claim has its frozen outcome, and its p-value before adjustment."""
    entries = claim.read([*FROZEN["claims"]])
    judged = reproduce.judge_claims(
        entries, reproduce.plans_of_claims(entries, []), rows_of_study("ledger")
    )
    rows = judged[["claim", "outcome", "p"]].itertuples(index=False)
    outcomes = {
        name: [outcome, None if math.isnan(p) else float(f"{p:.3g}")]
        for name, outcome, p in rows
    }
    assert outcomes == FROZEN["claims"]


def ladder() -> dict[str, dict[str, dict[str, float]]]:
    """Return means over seeds of nll, its rise at 4x and the gain from context beyond
    L/4, without posbench's code.
    """
    rows = pd.concat(
        [
            pd.read_parquet(ROWS / f"{name}.parquet")
            for name in ("six_demo", "six", "ladder")
        ]
    )
    last = rows["checkpoint_step"] == rows.groupby(["study", "run"])[
        "checkpoint_step"
    ].transform("max")
    plain = rows[["window", "extension", "task"]].isna().all(axis=1) & (
        rows["split"] == "test"
    )
    rows = rows[last & plain & (rows["protocol"] == "fixed_target")]
    sizes = [
        f"{s['model.n_layers']}x{s['model.d_model']}, L {s['training.train_length']},"
        f" {s['training.tokens'] / 1e6:g}M"
        for s in map(json.loads, rows["settings"])
    ]
    curves = rows.assign(rung=sizes).pivot(
        index=["rung", "encoding", "seed"], columns="length_ratio", values="nll"
    )
    gains = pd.DataFrame(
        {
            "nll": curves[1],
            "rise": curves[4] - curves[1],
            "uses": curves[1] - curves[0.25],
        }
    )
    means: dict[str, dict[str, dict[str, float]]] = {}
    for (size, name), values in gains.groupby(["rung", "encoding"]).mean().iterrows():
        means.setdefault(size, {})[name] = values.to_dict()
    return means


def test_the_ladder_has_its_frozen_shares_and_regrets() -> None:
    """Compare, of the pairs resolved at the target, the share that a rung orders alike,
    and what its best one costs.
    """
    means = ladder()
    target = means["4x256, L 256, 8M"]
    for size, endpoint, schemes, share, regret in FROZEN["ladder"]["rungs"]:
        pairs = [
            pair
            for pair in FROZEN["ladder"]["resolved"][endpoint]
            if set(pair) <= set(schemes)
        ]
        value = {name: means[size][name][endpoint] for name in schemes}
        right = [
            (value[a] < value[b]) == (target[a][endpoint] < target[b][endpoint])
            for a, b in pairs
        ]
        cost = target[min(value, key=value.__getitem__)][endpoint] - min(
            each[endpoint] for each in target.values()
        )
        assert (round(float(np.mean(right)), 2), round(cost, 3)) == (
            share,
            pytest.approx(regret),
        ), (size, endpoint)
