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
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from fake_study import comparison_of_study, rows_of_study
from schemes import cases, label, untrained

from posbench import encodings
from posbench.claims import claim, reproduce
from posbench.config.schema import to_container
from posbench.config.shipped import configs_dir
from posbench.data import tokens
from posbench.encodings.base import Shape
from posbench.errors import Undefined
from posbench.launch.compose import single
from posbench.model.gpt import build
from posbench.results.comparison import Comparison
from posbench.results.words import NOT_RESOLVED

HERE = Path(__file__).parent
ROWS = HERE.parent / "docs" / "rows"
FROZEN = json.loads((HERE / "data" / "frozen.json").read_text(encoding="utf-8"))
LAYERED = configs_dir() / "encoding" / "layered"
PATTERNS = sorted(f"layered/{path.stem}" for path in LAYERED.glob("*.yaml"))


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Write a finished run with only the files that `start=source` reads, and a
    text.
    """
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts", "a.txt").write_text("a text", encoding="utf-8")

    adamw = ["training.optimizer=adamw", "training.tokens=1000000"]
    config = single(["data.tokenizer=bytes", "tracking=none", *adamw])
    checkpoint = Path("source", "checkpoint", "step-000489")
    checkpoint.mkdir(parents=True)
    words = yaml.safe_dump(to_container(config))
    Path("source", "config.yaml").write_text(words, encoding="utf-8")
    record = {"schema": 3, "id": config.id, "status": "done"}
    record["tokenizer_sha256"] = "b" * 64
    record["data"] = {"sha256": "c" * 64}
    write_json(Path("source", "run.json"), record)
    files = {"model.safetensors": {"sha256": "a" * 64}}
    manifest = {"run": config.id, "step": config.training.steps, "files": files}
    write_json(checkpoint / "manifest.json", manifest)


def test_many_configurations_are_frozen():
    assert len(FROZEN["ids"]) >= 200


@pytest.mark.sample(16)
@pytest.mark.parametrize("part", range(16))
def test_configurations_name_the_runs_of_old(part, source):
    every_16th = list(FROZEN["ids"])[part::16]
    for words in every_16th:
        config = single(words.split())
        assert config.id == FROZEN["ids"][words], words


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("name", ["train", "validation", "test"])
def test_the_built_in_text_gives_the_same_splits_and_tokens(tokenizer, name, tmp_path):
    config = single([f"data.tokenizer={tokenizer}", "tracking=none"])
    made = tokens.prepare(config.data, tmp_path)
    frozen = FROZEN["tokens"].get(made.meta["sha256"])
    if frozen is None:
        pytest.skip("this Python's library is another text than those that are frozen")

    split = getattr(made, name)
    ids = np.asarray(split.ids, np.uint32)
    starts = np.asarray(split.starts, np.int64)
    digest = hashlib.sha256(ids.tobytes())
    digest.update(starts.tobytes())
    assert digest.hexdigest() == frozen[f"{tokenizer} {name}"]


def test_every_frozen_scheme_is_there():
    there = {*encodings.names(), *PATTERNS}
    # an encoding that is added has no frozen loss yet
    assert FROZEN["losses"].keys() <= there


def test_every_frozen_scheme_begins_with_its_frozen_parameters():
    sums = {}  # of absolute values
    shape = Shape(32, 4, 2, 32)
    for case in cases():
        name, options = case
        torch.manual_seed(0)
        encoding = untrained(name, options, shape)
        total = 0.0
        for parameter in encoding.parameters():
            values = parameter.detach().double()
            total += values.abs().sum().item()
        if total > 0 and name in FROZEN["losses"]:
            sums[label(case)] = total
    assert sums == pytest.approx(FROZEN["start"], rel=1e-5)


SMALL = [
    "model.n_layers=4",
    "model.d_model=32",
    "model.n_heads=2",
    "training.train_length=32",
    "tracking=none",
]


# These two enlarge the rounding of products, which is not that of every CPU: with and
# without AVX-512 they differ by 0.0005 and 0.02, the others by less than 0.0001.
BY_CPU = {"entmax": 2e-3, "tapa": 5e-2}


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", sorted(FROZEN["losses"]))
def test_a_scheme_reaches_its_frozen_losses(name):
    """Losses at one and two times the training length after eight updates, or
    "undefined" where the encoding ends.

    The text repeats eleven symbols, so that a model gains by looking back.
    """
    config = single([f"encoding={name}", *SMALL])
    model = build(config, 16, tuple("0123456789abcdef"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream = torch.Generator().manual_seed(0)
    symbols = torch.randint(0, 16, (9, 8, 11), generator=stream)
    *batches, held_out = symbols.repeat(1, 1, 6)

    drawn = torch.Generator().manual_seed(1)
    model.train()
    for ids in batches:
        loss = model(ids[:, :32], ids[:, 1:33], generator=drawn)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()
    for length, frozen in zip((32, 64), FROZEN["losses"][name], strict=True):
        read = held_out[:, :length]
        labels = held_out[:, 1 : length + 1]
        if frozen == "undefined":
            with pytest.raises(Undefined):
                model(read, labels)
        else:
            with torch.no_grad():
                loss = model(read, labels)
            assert loss.item() == pytest.approx(frozen, abs=BY_CPU.get(name, 1e-4))


# Cells of six_reader that were printed with the range of their five seeds, which seemed
# to be two groups: today nothing is said of so few.
RANGES = {("sinusoidal", "rise_8x"), ("t5", "nll_difference")}


def cell(row, name, has_range=False):
    """Return a mean with its interval, or with its range, as tables printed it."""
    mean = row[name]
    if has_range:
        low = row[f"{name}_min"]
        high = row[f"{name}_max"]
        return f"{mean:+.3f} [{low:.3f}, {high:.3f}]"
    half = (row[f"{name}_high"] - row[f"{name}_low"]) / 2
    return f"{mean:+.3f} ±{half:.3f}"


def cells(
    comparison: Comparison, ranges: Collection[tuple[str, str]] = ()
) -> list[list[str]]:
    """Return the cells of the three main tables, without adjusted intervals, which have
    replaced joint ones.
    """

    def cell_of(row, name):
        return cell(row, name, (row["label"], name) in ranges)

    rows = []
    table = comparison.frame
    if "holds_to" not in table:  # no scheme has learned
        table = table.assign(holds_to=math.nan, uses=math.nan)
    for row in table.to_dict("records"):
        label = row["label"]
        seeds = str(row["seeds"])
        loss = f"{row['nll']:.3f}"
        learned = row["learned"]
        spread = [f"{row['nll_sd']:.3f}", f"{row['nll_text_error']:.3f}"]
        units = [f"{row['perplexity']:.2f}", f"{row['bits_per_byte']:.3f}"]
        rows.append([label, seeds, loss, learned, *spread, *units])

        rises = [cell_of(row, f"rise_{ratio:g}x") for ratio in comparison.ratios]
        rows.append([label, loss, *rises, learned, reach(row), context(row)])
        if label != "rope":
            nll = cell_of(row, "nll_difference")
            rise = cell_of(row, "rise_difference")
            rows.append([label, nll, rise])
    return rows


def reach(row):
    if math.isnan(row["holds_to"]):
        return ""
    further = "≥ " if row["holds_at_longest"] else ""
    return f"{further}{row['holds_to']:.0f}"


def context(row):
    if math.isnan(row["uses"]):
        return ""
    return f"{row['uses']:.0f}"


def frozen_cells(study: str, table: pd.DataFrame) -> list[list[str]]:
    """Return the frozen cells, but for the context used, of which the rule is another
    today.
    """
    today = table.set_index("label").get("uses", pd.Series(dtype=float))
    rows = []
    for row in FROZEN["tables"][study]:
        label, second, *between, last = row
        is_loss = second.isdigit()  # the number of seeds
        is_curve = last == "" or last.isdigit()
        if is_loss:
            rows.append(row[:8])
        elif is_curve:
            used = today.get(label, math.nan)
            shown = "" if math.isnan(used) else f"{used:.0f}"
            rows.append([label, second, *between, shown])
        else:
            rise = row[3] if len(row) > 4 else row[2]
            rows.append([label, second, rise])
    return rows


@pytest.mark.parametrize(
    "study", ["six_reader", pytest.param("six_demo", marks=pytest.mark.slow)]
)
def test_the_main_tables_have_their_frozen_numbers(study):
    comparison = comparison_of_study(study)
    ranges = RANGES if study == "six_reader" else ()
    printed = cells(comparison, ranges)
    frozen = frozen_cells(study, comparison.frame)
    assert sorted(printed) == sorted(frozen)


def test_the_main_table_of_six_has_its_frozen_order():
    table = comparison_of_study("six_reader").frame
    by_loss = ["fox", "rope", "t5", "alibi", "sinusoidal", "none"]
    assert list(table["label"]) == by_loss


def test_the_main_tables_of_six_have_their_frozen_words():
    table = comparison_of_study("six_reader").frame.set_index("label")
    for name, *_, frozen in FROZEN["tables"]["six_reader"]:
        if ";" in frozen:
            words = set(table.loc[name, ["nll_word", "rise_word"]])
            without_lengths = re.sub(" at [14]x", "", frozen)
            assert words == set(without_lengths.split("; "))


@pytest.mark.slow
def test_the_main_tables_of_six_demo_have_their_words():
    """Differences at the training length need no gate; rises do, which rope of six_demo
    has not passed.
    """
    table = comparison_of_study("six_demo").frame.set_index("label")
    table = table.drop("rope")
    words = table["nll_word"].to_dict()
    assert words == {
        "fox": "better",
        "t5": "better",
        "alibi": NOT_RESOLVED,
        "none": "worse",
        "sinusoidal": "worse",
    }
    assert set(table["rise_word"]) == {""}
    reasons = table["rise_why"]
    assert reasons["fox"] == "whether fox has learned is not resolved"
    assert reasons["none"] == "none has not learned"


@pytest.mark.slow
def test_claims_have_their_frozen_outcomes():
    """Every claim has its frozen outcome, and its p-value before adjustment."""
    entries = claim.read(list(FROZEN["claims"]))
    plans = reproduce.plans_of_claims(entries, [])
    judged = reproduce.judge_claims(entries, plans, rows_of_study("ledger"))
    outcomes = {}
    for row in judged.itertuples():
        p = None
        if not math.isnan(row.p):
            p = float(f"{row.p:.3g}")
        outcomes[row.claim] = [row.outcome, p]
    assert outcomes == FROZEN["claims"]


def rows_at_the_end() -> pd.DataFrame:
    """Return the rows of plain curves at each run's last step."""
    files = [
        ROWS / f"{study}.parquet" for study in ("six_demo", "six_reader", "ladder")
    ]
    rows = pd.concat([pd.read_parquet(file) for file in files])
    steps = rows.groupby(["study", "run"])["checkpoint_step"]
    rows = rows[rows["checkpoint_step"] == steps.transform("max")]
    rows = rows[rows["split"] == "test"]
    rows = rows[rows["protocol"] == "fixed_target"]
    rows = rows[rows["window"].isna()]
    rows = rows[rows["extension"].isna()]
    return rows[rows["task"].isna()]


def rung_of(settings: str) -> str:
    values = json.loads(settings)
    size = f"{values['model.n_layers']}x{values['model.d_model']}"
    millions = values["training.tokens"] / 1e6
    return f"{size}, L {values['training.train_length']}, {millions:g}M"


def ladder() -> pd.DataFrame:
    """Return means over seeds of nll, its rise at 4x and the gain from context beyond
    L/4, by rung and encoding, without posbench's code.
    """
    rows = rows_at_the_end()
    rows["rung"] = rows["settings"].map(rung_of)
    runs = ["rung", "encoding", "seed"]
    curves = rows.pivot(index=runs, columns="length_ratio", values="nll")
    gains = pd.DataFrame({"nll": curves[1]})
    gains["rise"] = curves[4] - curves[1]
    gains["uses"] = curves[1] - curves[0.25]
    return gains.groupby(["rung", "encoding"]).mean()


def test_the_ladder_has_its_frozen_shares_and_regrets():
    """Compare, of the pairs resolved at the target, the share that a rung orders alike,
    and what its best one costs.
    """
    means = ladder()
    for rung, endpoint, schemes, share, regret in FROZEN["ladder"]["rungs"]:
        target = means.loc["4x256, L 256, 8M", endpoint]
        values = means.loc[rung, endpoint][schemes]
        alike = []
        for a, b in FROZEN["ladder"]["resolved"][endpoint]:
            if a in schemes and b in schemes:
                is_less = values[a] < values[b]
                is_less_at_target = target[a] < target[b]
                alike.append(is_less == is_less_at_target)
        found = round(float(np.mean(alike)), 2)
        best = values.idxmin()
        cost = round(target[best] - target.min(), 3)
        assert found == share, (rung, endpoint)
        assert cost == pytest.approx(regret), (rung, endpoint)
