"""What the documents say exists, exists: commands, files, numbers, and the
contributors' example.
"""

import collections
import functools
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
import support
import torch
import yaml
from test_frozen import cells as cells_of

from posbench import reports
from posbench.cli import app
from posbench.encodings.base import Shape
from posbench.encodings.own import class_of
from posbench.estimate import estimate
from posbench.launch import compose
from posbench.results import compare as comparisons
from posbench.results.compare import Losses, compare, main_rows
from posbench.results.frame import read
from posbench.rope.command import Read, compare_ropes
from posbench.rope.engines import NOTES
from posbench.rope.reading import configuration, ropes
from posbench.run import checkpoint
from posbench.run.rows import read_rows
from posbench.show import flips, panels
from posbench.typed import Typed

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
CONSOLE = r"```(?:console|bash|sh)\n(.*?)```"


def text_of(name: str | pathlib.Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lines_of_consoles() -> list[str]:
    """Return the lines of the pages' console blocks."""
    lines = []
    for page in PAGES:
        for block in re.findall(CONSOLE, text_of(page), flags=re.S):
            joined = re.sub(r"\\\n\s*", "", block)
            lines += joined.splitlines()
    return lines


def words_of(lines: list[str], program: str) -> list[list[str]]:
    """Return what follows the program in each of its commands."""
    commands = []
    for line in lines:
        command, _, _ = line.partition("  #")
        words = shlex.split(command.removeprefix("$ "))
        if len(words) > 1 and words[0] == program:
            commands.append(words[1:])
    return commands


def all_commands(program: str) -> list[list[str]]:
    lines = lines_of_consoles()
    for page in PAGES:
        lines += re.findall(rf"`({program} [^`]+)`", text_of(page))
    return words_of(lines, program)


def test_targets_of_make_exist():
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), flags=re.M)
    for words in all_commands("make"):
        for word in words:
            is_target = word[0] != "-" and "=" not in word
            if is_target:
                assert word in targets


def test_commands_exist():
    commands = app.registered_commands
    known = {command.name or command.callback.__name__ for command in commands}
    for first, *_ in all_commands("posbench"):
        is_command = first[0] != "-" and "=" not in first
        if is_command:
            assert first in known


def test_choices_exist():
    for words in all_commands("posbench"):
        for word in words:
            group, _, value = word.partition("=")
            folder = ROOT / "configs" / group
            is_example = value == "log_bias" or not re.fullmatch(r"[a-z0-9_,]+", value)
            if folder.is_dir() and not is_example:
                for choice in value.split(","):
                    assert (folder / f"{choice}.yaml").exists(), word


OTHERS = ("sweep=", "start=", "--cfg")
LEFT_OUT = ("-", "seed=")


@pytest.mark.slow
def test_every_run_and_sweep_that_a_page_shows_composes():
    composed = set()
    for command, *words in words_of(lines_of_consoles(), "posbench"):
        # files of sweeps are composed by test_sweep; a start needs a run
        others = [word for word in words if word.startswith(OTHERS)]
        if command in ("train", "sweep", "prepare") and not others:
            settings = [word for word in words if "=" in word]
            settings = [word for word in settings if not word.startswith(LEFT_OUT)]
            composed.add(tuple(settings))
    assert len(composed) > 20
    for settings in composed:
        assert compose.configs(list(settings))


def test_links_and_paths_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", text_of(page)):
            is_there = "://" in target or (page.parent / target).exists()
            assert is_there, f"{page.name} points to {target}"


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of all rows of the text's tables, without emphasis."""
    plain = text.replace("**", "")
    plain = plain.replace("\\[", "[").replace("\\]", "]")
    rows = []
    for line in plain.splitlines():
        if line.startswith("|"):
            cells = line.split("|")[1:-1]
            rows.append([cell.strip() for cell in cells])
    return rows


def test_the_results_of_the_front_page_are_those_of_the_page_of_results():
    _, results, *_ = re.split(r"^## ", text_of("docs/results.md"), flags=re.M)
    printed = collections.defaultdict(lambda: {"", "the reference"})
    for name, *cells in rows_of(results):
        printed[name].update(cells)

    rows = rows_of(text_of("README.md"))

    with_intervals = [row for row in rows if "±0." in "".join(row)]
    assert len(with_intervals) == 6
    for name, *cells in with_intervals:
        assert set(cells) <= printed[name]


def share_of_cache(settings: str) -> str:
    """Return how many of 1,024 keys a scheme keeps, in per cent."""
    layers = json.loads(settings).get("encoding.layers", [{}])
    kept = 0
    for layer in layers:
        kept += min(layer.get("window", 1024), 1024)
    share = kept / (len(layers) * 1024)
    return f"{100 * share:.0f}"


def cells_of_rows(rows: pd.DataFrame) -> dict[str, set[str]]:
    """Return what a page may print of each scheme of a setting: losses, rises, reach,
    uses, differences, adjusted intervals, the share of the cache, and passkeys.
    """
    comparison = compare(rows)
    known = collections.defaultdict(set)
    for label, *cells in cells_of(comparison):
        known[label].update(cells)
    for row in comparison.frame.to_dict("records"):
        of_label = known[row["label"]]
        half = (row["nll_high"] - row["nll_low"]) / 2
        of_label.add(f"{row['nll']:.3f} ±{half:.3f}")
        for name in ("nll_difference_adjusted", "rise_difference_adjusted"):
            low = row[f"{name}_low"]
            high = row[f"{name}_high"]
            of_label.add(f"{low:+.3f} to {high:+.3f}")
    settings_of = rows.groupby("label")["settings"].first()
    for label, settings in settings_of.items():
        known[label].add(share_of_cache(settings))
    plain = rows[rows["variant"] == "plain"]
    passkeys = plain[plain["task"] == "passkey"]
    for label, of_label in passkeys.groupby("label"):
        by_length = of_label.groupby("length_ratio")
        right = 100 * by_length["accuracy"].mean()
        shares = [f"{share:.0f}" for share in right]
        known[label].add(f"{shares[0]}, {shares[-1]}")
        known[label].add(", ".join(shares))
    return known


@pytest.mark.parametrize(
    ("study", "page", "title"),
    [
        ("six", "results", "### Beyond the"),
        ("six", "results", "### Against"),
        ("six_django", "results", "## The same six on a second text"),
        ("six_wide", "results", "### The larger"),
        ("patterns", "longer", "## Which"),
    ],
)
def test_a_table_is_that_of_the_rows_beside_the_page(study, page, title):
    text = text_of(f"docs/{page}.md")
    section = text[text.index(title) :]
    tables = [part for part in section.split("\n\n") if part.startswith("|")]
    _head, _rule, *lines = rows_of(tables[0])

    frame = read([ROOT / "docs" / "rows" / f"{study}.parquet"])
    by_setting = [cells_of_rows(rows) for _, rows in frame.groupby("setting")]

    assert len(lines) > 4
    for name, *cells in lines:
        shown = re.sub(r"^.*?`(.*?)`.*$", r"\1", name)
        short = "layered" if "+" in shown else shown
        numbers = {cell for cell in cells if re.match(r"[-+\d≥]", cell)}
        assert len(numbers) > 3
        known = []
        for of_setting in by_setting:
            known += [of_setting[f"layered layers={shown}"], of_setting[short]]
        has_all = [numbers <= of_label for of_label in known]
        assert any(has_all), numbers


def losses_of(study: str) -> Losses:
    return Losses.of(read([ROOT / "docs" / "rows" / f"{study}.parquet"]))


def words_of_results() -> str:
    """Return the page of results, its lines joined and without escapes."""
    return " ".join(text_of("docs/results.md").replace("\\", "").split())


CUT_TO = [
    ("fox", 32, "(FoX)"),
    ("rope", 32, "(RoPE)"),
    ("t5", 32, "(T5)"),
    ("alibi", 32, "(ALiBi)"),
    ("sinusoidal", 32, "(sinusoids)"),
    ("none", 16, "(NoPE)"),
]


def half_of(row: pd.Series, name: str) -> str:
    """Return a difference or rise as a page prints it; "" for none."""
    if pd.isna(row[name]):
        return ""
    half = (row[f"{name}_high"] - row[f"{name}_low"]) / 2
    return f"{row[name]:+.3f} ±{half:.3f}"


def test_what_muon_changes_is_that_of_the_rows():
    section = text_of("docs/results.md").partition("### What Muon changes")[2]
    _head, _rule, *lines = rows_of(section)[:8]
    frames = []
    for study in ("six_reader", "six"):
        rows = read([ROOT / "docs" / "rows" / f"{study}.parquet"])
        frames.append(compare(rows).frame.set_index("label"))

    expected = []
    for name in frames[1]["nll"].sort_values().index:
        of_name = [frame.loc[name] for frame in frames]
        cells = [name, *[f"{row['nll']:.3f}" for row in of_name]]
        for column in ("nll_difference", "rise_4x"):
            cells += [half_of(row, column) for row in of_name]
        expected.append(cells)
    assert lines == expected

    lower = frames[0]["nll"] - frames[1]["nll"]
    assert f"{lower.min():.2f} to {lower.max():.2f} nats lower" in words_of_results()


def test_what_less_context_costs_is_that_of_the_rows():
    losses = losses_of("six")
    for label, length, name in CUT_TO:
        cost = losses.estimate(losses.rise(label, length))
        printed = f"{cost.mean:.3f} ±{cost.half():.3f} {name}"
        assert printed in words_of_results()


GAINS = {
    "t5": "T5",
    "rope": "RoPE",
    "fox": "FoX",
    "alibi": "ALiBi",
    "sinusoidal": "sinusoids",
}


def test_what_the_last_doubling_of_context_gains_is_that_of_the_rows():
    losses = losses_of("six")
    for label, name in GAINS.items():
        gain = losses.estimate(losses.rise(label, 64))
        assert f"{name} {gain.mean:.3f} ±{gain.half():.3f}" in words_of_results()
        assert gain.mean - gain.half() > 0
    none = losses.estimate(losses.rise("none", 64))
    assert f"For NoPE, {none.mean:+.3f} ±{none.half():.3f}" in words_of_results()


def test_what_narrowed_attention_gains_is_that_of_the_rows():
    losses = losses_of("six")
    above = {}
    for label in ("fox", "rope"):
        plain = losses.level(label, 1024)
        narrowed = losses.level(label, 1024, "windowed")
        above[label] = losses.estimate(comparisons.difference(plain, narrowed))
    fox = above["fox"]
    rope = above["rope"]

    words = words_of_results()

    assert f"FoX is {-fox.mean:.3f} ±{fox.half():.3f}" in words
    assert f"(±{fox.half(0.05 / 6):.3f} for all six schemes at once)" in words
    assert f"RoPE is {rope.mean:.3f} ±{rope.half():.3f} above" in words


def by_seed_at_each_size() -> dict[tuple[int, int], dict[str, pd.DataFrame]]:
    """Return the ladder's losses by seed (rows) and multiple of the training length, by
    size (layers' width, training length, millions of tokens) and scheme.
    """
    studies = ("ladder", "six_reader", "six_demo")
    frame = read([ROOT / "docs" / "rows" / f"{study}.parquet" for study in studies])
    sizes = collections.defaultdict(dict)
    for _, setting in frame.groupby("setting"):
        rows = main_rows(setting)
        rows = rows[(rows["variant"] == "plain") & (rows["status"] == "ok")]
        first = rows.iloc[0]
        width = 256 if first["parameters"] > 2e6 else 128
        tokens = round(first["trained_tokens"] / 1e6)
        size = (width, int(first["train_length"]), tokens)
        for label, of_label in rows.groupby("label"):
            by_seed = of_label.pivot_table("nll", "seed", "length_ratio")
            sizes[size][label] = by_seed
    return sizes


def endpoints(by_seed: pd.DataFrame) -> list[float]:
    """Return the mean loss at 1x, its rise at 4x and the gain from a quarter to 1x."""
    at_one = by_seed[1.0]
    rise = by_seed[4.0] - at_one
    gain = by_seed[0.25] - at_one
    return [at_one.mean(), rise.mean(), gain.mean()]


@pytest.mark.slow
def test_the_ladder_is_that_of_the_rows():
    sizes = by_seed_at_each_size()
    section = text_of("docs/results.md").partition("## From small to large")[2]
    _head, _rule, *lines, _largest = rows_of(section.partition("## Claims")[0])
    largest = sizes[256, 256, 8]

    assert len(lines) == 5
    for name, setting, *counts in lines:
        width = int(name.split()[0].removeprefix("4x"))
        length, tokens = setting.removesuffix("M").split(", ")
        smaller = sizes[width, int(length), int(tokens)]
        for endpoint, printed in enumerate(counts):
            alike = []
            for one, other in itertools.combinations(largest, 2):
                signs = []
                for of_label in (largest, smaller):
                    first = endpoints(of_label[one])[endpoint]
                    second = endpoints(of_label[other])[endpoint]
                    signs.append(first - second)
                if abs(signs[0]) >= 0.02:
                    alike.append(signs[0] * signs[1] > 0)
            assert printed == f"{sum(alike)} of {len(alike)}"


def test_training_on_is_that_of_the_rows():
    section = text_of("docs/longer.md").partition("| against 512 from")[2]
    lines = rows_of(section.partition("\n\n")[0])[1:-1]
    comparison = compare(read([ROOT / "docs" / "rows" / "extend.parquet"]))

    known = []
    for scheme in comparison.schemes:
        if scheme.nll_difference:
            intervals = (scheme.nll_difference.interval, scheme.numbers.rises[2.0])
            known.append([f"{each:+.3f} ±{each.half:.3f}" for each in intervals])

    printed = [line[-2:] for line in lines]
    assert len(printed) == 10
    assert sorted(printed) == sorted(known)


@pytest.mark.parametrize(
    ("script", "function", "page", "count"),
    [
        ("extended_patterns", "table_lines", "docs/longer.md", 15),
        ("optimizers", "agreement_lines", "docs/results.md", 6),
    ],
)
def test_tables_of_scripts_are_those_of_the_rows(
    script, function, page, count, monkeypatch
):
    monkeypatch.syspath_prepend(str(support.SCRIPTS))
    lines = getattr(support.script(script), function)()
    assert len(lines) == count
    for line in lines:
        assert line in text_of(page)


def test_other_encodings_with_muon_are_those_of_the_rows():
    losses = table_of_catalogue("catalogue_muon")["nll"]
    assert losses.idxmin() == "fox_pro"
    gap = losses["rope"] - losses["fox_pro"]
    sentence = f"({losses['fox_pro']:.3f} with Muon, {gap:.2f} below RoPE)"
    assert sentence in words_of_results()

    six = read([ROOT / "docs" / "rows" / "six.parquet"])
    in_fp32 = compare(six[six["seed"] == 1]).frame.set_index("label")["nll"]
    largest = (in_fp32 - losses).abs().max()
    assert f"by at most {largest:.3f} from the same seed in fp32" in words_of_results()


def test_the_rates_of_training_on_with_muon_are_those_of_the_rows():
    section = text_of("docs/longer.md").partition("| share | AdamW: YaRN |")[2]
    rows = read([ROOT / "docs" / "rows" / "extend_rates.parquet"])
    at_512 = rows[(rows["length"] == 512) & (rows["tokens"] > 0)]
    losses = at_512.sort_values("learning_rate", ascending=False).groupby("encoding")
    lines = rows_of(section.partition("\n\n")[0])[1:]
    for place, name in {3: "yarn", 4: "rope"}.items():
        printed = [line[place].strip("*") for line in lines]
        assert printed == [f"{loss:.3f}" for loss in losses.get_group(name)["nll"]]


@pytest.mark.slow
def test_faults_of_engines_differ_as_posbench_rope_says():
    pytest.importorskip("transformers")
    faults = yaml.safe_load(text_of("docs/faults.yaml"))
    _head, _rule, *lines = rows_of(text_of("docs/faults.md"))

    for fault, (report, name, difference, kind) in zip(faults, lines, strict=False):
        right = {"model_type": "llama", "num_hidden_layers": 2, **fault["right"]}
        wrong = {**right, **fault["wrong"]}
        both = []
        for settings in (right, wrong):
            both.append(Read("", ropes(configuration(settings)), [], []))
        _, _, line, *_ = compare_ropes(*both)
        said = re.findall(r"position \d+|pair \d+|q and k[^;]*|in \d of[^;]*", line)
        assert difference == ", ".join(said)
        assert name == fault["fault"]
        assert kind == fault.get("kind", "")
        assert report.startswith(str(fault["date"]))
        for thread in fault["threads"]:
            assert f"{thread})" in report


def test_notes_on_engines_are_those_of_posbench_rope():
    section = text_of("docs/models.md").partition("Engines read other keys")[2]
    _head, _rule, *lines = rows_of(section)
    expected = []
    for note in NOTES:
        keys = [f"`{word}`" for word in [*note.types.split(), *note.keys.split()]]
        expected.append([note.engines, " ".join(keys), note.does])
    assert lines == expected


def test_what_faults_cost_is_that_of_the_rows_beside_the_page():
    section = text_of("docs/faults.md").partition("## What it costs")[2]
    _head, _rule, *lines = rows_of(section)
    rows = read([ROOT / "docs" / "rows" / "faults.parquet"]).sort_values("seed")

    assert len(lines) == 10
    for _, tokens, *readings, printed in lines:
        of_length = rows[rows["length"] == int(tokens.replace(",", ""))]
        losses = []
        for reading in readings:
            pattern = re.escape(reading.strip("`")).replace(r"\.\.\.", ".*")
            of_seeds = of_length[of_length["variant"].str.fullmatch(pattern)]
            assert of_seeds["seed"].tolist() == [0, 1, 2, 3, 4]
            losses.append(np.stack(of_seeds["unit_nll"].tolist()))
        right, wrong = losses
        cost = estimate(wrong - right, np.array(of_seeds["unit_tokens"].iloc[0]))
        assert printed == f"{cost.mean:+.3f} ±{cost.half():.3f}"


def test_a_report_prints_what_faults_cost(tmp_path, capsys):
    section = text_of("docs/faults.md").partition("## What it costs")[2]
    _head, _rule, *lines = rows_of(section)
    study = ROOT / "docs" / "rows" / "faults.parquet"

    reports.main([study], tmp_path)
    beside_plain = capsys.readouterr().out
    reports.main([study], tmp_path, reference="yarn:factor=4")
    beside_yarn = capsys.readouterr().out

    for line in lines[:7]:
        assert line[-1] in beside_plain
    for line in lines[7:]:
        # what is right there may be what is wrong here
        assert line[-1].lstrip("+") in beside_yarn


def table_of_catalogue(study: str) -> pd.DataFrame:
    rows = read([ROOT / "docs" / "rows" / f"{study}.parquet"])
    tables = [compare(part).frame for _, part in rows.groupby("dtype")]
    table = pd.concat(tables)
    return table.set_index("label")


@pytest.mark.slow
def test_the_catalogue_is_that_of_the_rows_of_both_seeds():
    first = table_of_catalogue("catalogue")
    second = table_of_catalogue("catalogue_again")
    lines = rows_of(text_of("docs/catalogue.md"))[2:]

    assert len(lines) == 75
    assert len(first) == 75
    for name, _, nll, rise_2x, rise_8x, reach, _, share in lines:
        label = name.split("`")[1]
        assert ("→" in share) != label.startswith("layered/")
        cells = {"nll": nll, "rise_2x": rise_2x, "rise_8x": rise_8x}
        for column, cell in cells.items():
            both = cell.replace("undefined", "nan, nan").split(", ")
            numbers = [float(number) for number in both]
            expected = [first.loc[label, column], second.loc[label, column]]
            assert numbers == pytest.approx(expected, abs=0.00051, nan_ok=True)
        printed = re.findall(r"\d+", reach.replace(",", ""))
        holds = first.loc[[label], "holds_to"].dropna()
        assert [float(number) for number in printed] == holds.round().tolist()


@pytest.mark.slow
def test_retrieval_and_its_correlation_are_those_of_the_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(support.SCRIPTS))
    retrieval = support.script("retrieval")
    schemes = retrieval.both()
    correlation = "{:.2f} [{:.2f}, {:.2f}]".format(*retrieval.correlation(schemes))

    printed = {}
    for name, *_, finds, _ in rows_of(text_of("docs/catalogue.md"))[2:]:
        label = name.split("`")[1]
        if not label.startswith("layered/"):
            printed[label] = finds
    assert printed == schemes.apply(retrieval.cell, axis=1).to_dict()
    within = "{:.2f} [{:.2f}, {:.2f}]".format(*retrieval.correlation_within(schemes))
    page = text_of("docs/longer.md").replace("\\", "")
    assert f"rank correlation of {correlation}" in page
    assert f"(../posbench/encodings) it is {within}" in page


FLIPS = re.findall(
    r"^\| \[`(\w+)`.* (\S+)→(\S+) \|$", text_of("docs/catalogue.md"), re.M
)


@pytest.mark.sample(75)
@pytest.mark.parametrize(("name", "near", "far"), FLIPS)
def test_the_catalogue_says_how_often_distance_flips_an_order(name, near, far):
    printed = [float(near), float(far.replace("n/a", "nan"))]
    shares = flips.shares(functools.partial(panels.build, name, {}))
    assert printed == pytest.approx(shares, abs=0.0051, nan_ok=True)


def blocks_of_the_contributors_guide(section: str) -> list[str]:
    _, found, text = text_of("CONTRIBUTING.md").partition(f"## {section}\n")
    assert found
    text, _, _ = text.partition("\n## ")
    blocks = re.findall(r"^( *)```(?:python|yaml)\n(.*?)^\1```$", text, re.S | re.M)
    return [textwrap.dedent(code) for _, code in blocks]


def test_the_class_of_the_contributors_guide_equals_its_plain_loops(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blocks = blocks_of_the_contributors_guide("Add an encoding in three files")
    source, settings, loops = blocks
    file = tmp_path / "log_bias.py"
    file.write_text(source, encoding="utf-8")
    cls, _ = class_of(Typed(f"{file}:LogBias"))
    oracle = {}
    exec(loops, oracle)
    reference = oracle["reference"]
    shape = Shape(d_model=32, n_heads=4, n_layers=2, train_length=16)
    positions = torch.arange(23)
    options = {"strength": 0.3}

    encoding = cls(shape, **options)
    distance = positions[:, None] - positions
    bias = encoding.distance_bias(distance, None)

    q, k, v, x = [None] * 4
    terms = reference({}, shape, options, q, k, v, x, positions[None], 0, True)
    expected = terms["bias"][0].expand_as(bias)
    torch.testing.assert_close(bias, expected)

    defaults = yaml.safe_load(settings)
    assert defaults.pop("name") == file.stem
    assert defaults == {"strength": cls(shape).strength}


def add_block(copy: pathlib.Path, block: str) -> None:
    """Write a block into the file that its first line names, at its end, or as a field
    of the class that it names.
    """
    first, code = block.split("\n", 1)
    name, _, _ = first.removeprefix("# ").partition(",")
    path = copy / name
    text = ""
    if path.exists():
        text = path.read_text(encoding="utf-8")
    if ", in " in first:
        before, last_field, after = text.partition("    units: dict")
        text = before + code + last_field + after
    else:
        text += f"\n\n{code}"
    path.write_text(text, encoding="utf-8")


PARTS = "Add a metric, an optimizer, a tracker or a task"
ON_TEXT = [
    *support.TINY,
    "study=text",
    "data.path=text.txt",
    "training.tokens=512",
    "training.optimizer=lion",
    "tracking.backend=lines",
]
ON_TEXT.remove("tracking=none")
ON_A_TASK = [
    "study=task",
    "experiment=tasks",
    "data=task/last",
    "tracking=none",
    "training.tokens=8192",
    "evaluation.ratios=[1]",
    "evaluation.blocks=8",
    "runtime.device=cpu",
    "runtime.threads=1",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Train with a copy of the package that has what the contributors' guide adds."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "posbench", copy / "posbench")  # with its bytecode
    shutil.copytree(ROOT / "configs", copy / "configs")
    for block in blocks_of_the_contributors_guide(PARTS):
        add_block(copy, block)
    support.write_text(copy)

    path = os.pathsep.join([str(copy), os.environ["PYTHONPATH"]])
    environment = os.environ | {"PYTHONPATH": path}
    code = f"import posbench; posbench.train({ON_TEXT}); posbench.train({ON_A_TASK})"
    command = [sys.executable, "-c", code]
    streams = {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=copy, env=environment, **streams)
    assert done.returncode == 0, done.stderr
    return copy / "outputs"


@pytest.fixture
def on_text(outputs):
    (folder,) = outputs.glob("text/[!.]*")
    return folder


@pytest.mark.slow
def test_a_metric_is_added_as_the_guide_says(on_text):
    rows = [row for row in read_rows(on_text) if "protocol" in row]
    assert len(rows) > 1
    for row in rows:
        assert row["status"] == "ok"
        assert 0 < row["top1"] < 1


@pytest.mark.slow
def test_an_optimizer_is_added_as_the_guide_says(on_text):
    config = (on_text / "config.yaml").read_text(encoding="utf-8")
    state = checkpoint.trained(on_text).optimizer()["state"]
    assert "optimizer: lion" in config
    assert state[0].keys() == {"mean"}


def test_the_guides_optimizer_skips_weights_that_nothing_reads_and_lost_updates(
    tiny_config,
):
    blocks = blocks_of_the_contributors_guide(PARTS)
    (code,) = [block for block in blocks if "class Lion" in block]
    names = {}
    exec(code, names)
    read, unread = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    group = {"params": [read, unread], "weight_decay": 0.1, "lr": 0.5}
    optimizer = names["Lion"]([group], tiny_config.training)

    read.grad = torch.ones(3)
    optimizer.step()  # as on MPS, which has no `found_inf`
    moved = read.detach().clone()
    mean = optimizer.state[read]["mean"].clone()
    read.grad = torch.tensor([1.0, torch.nan, torch.inf])
    optimizer.found_inf = torch.ones(())
    optimizer.step()

    torch.testing.assert_close(moved, torch.full((3,), 1 - 0.5 * 1.1))
    assert mean.min() > 0
    assert torch.equal(read, moved)
    assert torch.equal(optimizer.state[read]["mean"], mean)
    assert torch.equal(unread, torch.ones(3))


@pytest.mark.slow
def test_a_tracker_is_added_as_the_guide_says(on_text):
    lines = (on_text / "lines.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(read_rows(on_text)) + 1
    assert lines[-1].startswith("done ")


def test_a_task_is_added_as_the_guide_says(outputs):
    (folder,) = outputs.glob("task/[!.]*")
    rows = [row for row in read_rows(folder) if "protocol" in row]
    assert rows
    for row in rows:
        assert row["task"] == "last"
        assert row["n_tokens"] == 8


def test_the_rates_of_reader_are_those_of_its_rows():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| nll at 128 tokens |")
    head, _, *lines = table.splitlines()[:8]
    rates = [cell.strip() for cell in head.split("|")[:5]]
    rows = read([ROOT / "docs" / "rows" / "reader_rates.parquet"])
    batches = rows["settings"].str.extract('"training.batch_size": (\\d+)')[0]
    nll = rows[batches == "16"].pivot(
        index=["encoding", "learning_rate"], columns="length", values="nll"
    )
    for line in lines:
        name, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
        of_scheme = nll.loc[name]
        best = of_scheme[128].idxmin()
        for rate, cell in zip(rates, cells[:5], strict=True):
            expected = ""
            if float(rate) in of_scheme.index:
                expected = f"{of_scheme.loc[float(rate), 128]:.3f}"
            assert cell == (f"**{expected}**" if float(rate) == best else expected)
        gain = of_scheme.loc[best, 64] - of_scheme.loc[best, 128]
        rise = of_scheme.loc[best, 512] - of_scheme.loc[best, 128]
        assert cells[5:] == [f"{gain:.3f}", f"{rise:+.3f}"]

        config = compose.single([f"encoding={name}", "experiment=reader"])
        assert config.training.learning_rate == best
    assert len(lines) == len(nll.index.unique(0)) == 6
    again = read([ROOT / "docs" / "rows" / "reader_rates_again.parquet"])
    at_128 = again[again["length"] == 128].sort_values("learning_rate")
    for title, name in {
        "RoPE": "rope",
        "FoX": "fox",
        "T5": "t5",
        "ALiBi": "alibi",
        "NoPE": "none",
        "sinusoids": "sinusoidal",
    }.items():
        of_rates = at_128.loc[at_128["encoding"] == name, "nll"]
        cells = [f"{loss:.3f}" for loss in of_rates]
        best = of_rates.reset_index(drop=True).idxmin()
        cells[best] = f"**{cells[best]}**"
        assert f"{title} {', '.join(cells)}" in words_of_results()
    assert "RoPE in batches of 1,024 tokens has 2.646" in page
    of_batches = rows[(batches == "8") & (rows["length"] == 128)]
    assert of_batches["nll"].round(3).tolist() == [2.646]


def losses_at_three_rates(losses: "pd.Series[float]") -> str:
    """Return the losses of Muon's rates as the page has them."""
    return (
        f"{losses[0.0055]:.3f} at the rate 0.0055, **{losses[0.008]:.3f}** at 0.008"
        f" and {losses[0.012]:.3f} at 0.012"
    )


def test_the_rates_of_reader_wide_are_those_of_its_rows():
    rows = read([ROOT / "docs" / "rows" / "wide_rates.parquet"])
    losses = rows[rows["length"] == 256].set_index("learning_rate")["nll"]
    assert losses_at_three_rates(losses) in words_of_results()
    assert losses.idxmin() == 0.008
    config = compose.single(["experiment=reader_wide"])
    assert config.training.learning_rate == 0.008


def test_the_rates_of_small_are_those_of_its_rows():
    rows = read([ROOT / "docs" / "rows" / "small_rates.parquet"])
    losses = rows[rows["length"] == 128].set_index("learning_rate")["nll"]
    of_muon = losses_at_three_rates(losses)
    of_adamw = f"AdamW has {losses[0.0015]:.3f} after 8.0M tokens"
    printed = f"{of_adamw}, Muon after 3.0M has {of_muon}"
    assert printed in words_of_results()
    config = compose.single(["experiment=small"])
    assert config.training.learning_rate == 0.008


def test_the_table_of_tasks_is_that_of_its_rows():
    _, _, table = text_of("docs/results.md").partition("| task | | rope |")
    rows = read([ROOT / "docs" / "rows" / "tasks_rates.parquet"])
    is_muon = rows["settings"].str.contains('"training.optimizer": "muon"')
    rows["optimizer"] = is_muon.map({True: "Muon", False: "AdamW"})
    rows = rows[(rows["offset"] == 0) & (rows["task"] == rows["trained_task"])]
    at_default = ~is_muon | (rows["learning_rate"] == 0.006)
    at_4x = rows[at_default & (rows["length_ratio"] == 4)]
    runs = at_4x.set_index(["trained_task", "encoding", "optimizer"])
    schemes = ("rope", "none", "alibi", "t5", "fox")
    printed = rows_of(table)[1:9]
    for task, measure, *cells in printed:
        for scheme, cell in zip(schemes, cells, strict=True):
            expected = []
            for optimizer in ("AdamW", "Muon"):
                run = runs.loc[task, scheme, optimizer]
                gate = run["steps_to_gate"]
                text = "-" if pd.isna(gate) else str(gate)
                if measure == "right at 4x":
                    text = f"{run['accuracy']:.3f}"
                expected.append(text)
            assert cell == ", ".join(expected)
    assert len(printed) == 8
    config = compose.single(["experiment=tasks"])
    assert config.training.learning_rate == 0.006
