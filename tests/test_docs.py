"""What the documents say exists, exists: commands, files, numbers, and the
contributors' example.
"""

import collections
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

import pandas as pd
import pytest
import support
import torch
import yaml
from test_frozen import cells as cells_of

from posbench.cli import app
from posbench.config import compose
from posbench.encodings.base import Shape
from posbench.encodings.own import from_file
from posbench.results.compare import compare
from posbench.results.frame import read
from posbench.run import checkpoint
from posbench.run.rows import read_rows

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
CONSOLE = r"```(?:console|bash|sh)\n(.*?)```"


def text_of(name: str | pathlib.Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lines_of_consoles() -> list[str]:
    """Return the lines of the pages' console blocks."""
    lines = []
    for page in PAGES:
        for block in re.findall(CONSOLE, text_of(page), flags=re.S):
            lines += re.sub(r"\\\n\s*", "", block).splitlines()
    return lines


def words_of(lines: list[str], program: str) -> list[list[str]]:
    """Return what follows the program in each of its commands."""
    commands = []
    for line in lines:
        first, *words = shlex.split(line.partition("  #")[0].removeprefix("$ ")) or [""]
        if first == program and words:
            commands.append(words)
    return commands


def all_commands(program: str) -> list[list[str]]:
    lines = lines_of_consoles()
    for page in PAGES:
        lines += re.findall(rf"`({program} [^`]+)`", text_of(page))
    return words_of(lines, program)


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), flags=re.M))
    for words in all_commands("make"):
        asked = {word for word in words if word[0] != "-" and "=" not in word}
        assert asked <= targets


def test_commands_exist():
    commands = app.registered_commands
    known = {command.name or command.callback.__name__ for command in commands}
    for first, *_ in all_commands("posbench"):
        assert first in known or first[0] == "-" or "=" in first, first


def test_choices_exist():
    for words in all_commands("posbench"):
        for word in words:
            group, _, value = word.partition("=")
            folder = ROOT / "configs" / group
            is_example = value == "log_bias" or not re.fullmatch(r"[a-z0-9_,]+", value)
            if folder.is_dir() and not is_example:
                for choice in value.split(","):
                    assert (folder / f"{choice}.yaml").exists(), word


@pytest.mark.slow
def test_every_run_and_sweep_that_a_page_shows_composes():
    composed = set()
    for command, *words in words_of(lines_of_consoles(), "posbench"):
        # files of sweeps are composed by test_sweep; a start needs a run
        is_other = any(word.startswith(("sweep=", "start=", "--cfg")) for word in words)
        if command in ("train", "sweep", "prepare") and not is_other:
            settings = [word for word in words if "=" in word and word[0] != "-"]
            composed.add(tuple(each for each in settings if each[:5] != "seed="))
    assert len(composed) > 20
    for words in composed:
        assert compose.configs([*words])


def test_links_and_paths_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", text_of(page)):
            is_there = "://" in target or (page.parent / target).exists()
            assert is_there, f"{page.name} points to {target}"


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of all rows of the text's tables, without emphasis."""
    plain = text.replace("**", "").replace("\\[", "[").replace("\\]", "]")
    lines = [line for line in plain.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_results_of_a_front_page_are_those_of_the_page_of_results(page):
    results = re.split(r"^## ", text_of("docs/results.md"), flags=re.M)[1]
    printed = collections.defaultdict(lambda: {"", "the reference"})
    for name, *cells in rows_of(results):
        printed[name].update(cells)

    rows = [row for row in rows_of(text_of(page)) if "±0." in "".join(row)]

    assert len(rows) == 6
    for name, *cells in rows:
        assert set(cells) <= printed[name]


def share_of_cache(settings: str) -> str:
    """Return how many of 1,024 keys a scheme keeps, in per cent."""
    layers = json.loads(settings).get("encoding.layers", [{}])
    keys = [min(layer.get("window", 1024), 1024) for layer in layers]
    return f"{100 * sum(keys) / len(keys) / 1024:.0f}"


def cells_of_rows(rows: pd.DataFrame) -> dict[str, set[str]]:
    """Return what a page may print of each scheme of a setting: losses, rises, reach,
    uses, differences, adjusted intervals, the share of the cache, and passkeys.
    """
    table = compare(rows)
    known = collections.defaultdict(set)
    for label, *cells in cells_of(table):
        known[label].update(cells)
    for row in table.to_dict("records"):
        of_label = known[row["label"]]
        half = (row["nll_high"] - row["nll_low"]) / 2
        of_label.add(f"{row['nll']:.3f} ±{half:.3f}")
        for name in ("nll_difference_adjusted", "rise_difference_adjusted"):
            low = row[f"{name}_low"]
            high = row[f"{name}_high"]
            of_label.add(f"{low:+.3f} to {high:+.3f}")
    for label, settings in rows.groupby("label")["settings"].first().items():
        known[label].add(share_of_cache(settings))
    passkeys = rows[(rows["task"] == "passkey") & (rows["variant"] == "plain")]
    for label, of_label in passkeys.groupby("label"):
        right = 100 * of_label.groupby("length_ratio")["accuracy"].mean()
        known[label].add(f"{right[1]:.0f}, {right[8]:.0f}")
    return known


@pytest.mark.parametrize(
    ("study", "page", "title"),
    [
        ("six", "results", "### Beyond the"),
        ("six", "results", "### Against"),
        ("patterns", "longer", "## Which"),
    ],
)
def test_a_table_is_that_of_the_rows_beside_the_page(study, page, title):
    text = text_of(f"docs/{page}.md")
    section = text[text.index(title) :]
    table = next(part for part in section.split("\n\n") if part.startswith("|"))
    lines = rows_of(table)[2:]

    frame = read([ROOT / "docs" / "rows" / f"{study}.parquet"])
    by_setting = [cells_of_rows(rows) for _, rows in frame.groupby("setting")]

    assert len(lines) > 4
    for name, *cells in lines:
        shown = re.sub(r"^.*?`(.*?)`.*$", r"\1", name)
        labels = [f"layered layers={shown}", "layered" if "+" in shown else shown]
        numbers = {cell for cell in cells if re.match(r"[-+\d≥]", cell)}
        assert len(numbers) > 3
        known = [cells[label] for cells in by_setting for label in labels]
        assert any(numbers <= of_label for of_label in known), numbers


def table_of_catalogue(study: str) -> pd.DataFrame:
    rows = read([ROOT / "docs" / "rows" / f"{study}.parquet"])
    parts = [compare(part) for _, part in rows.groupby("dtype")]
    return pd.concat(parts).set_index("label")


@pytest.mark.slow
def test_the_catalogue_is_that_of_the_rows_of_both_seeds():
    first = table_of_catalogue("catalogue")
    second = table_of_catalogue("catalogue_again")
    lines = rows_of(text_of("docs/catalogue.md"))[2:]

    assert len(lines) == len(first) == 75
    for name, _, nll, rise_2x, rise_8x, reach in lines:
        label = name.split("`")[1]
        cells = {"nll": nll, "rise_2x": rise_2x, "rise_8x": rise_8x}
        for column, cell in cells.items():
            both = cell.replace("undefined", "nan, nan").split(", ")
            numbers = [float(number) for number in both]
            expected = [first.loc[label, column], second.loc[label, column]]
            assert numbers == pytest.approx(expected, abs=0.00051, nan_ok=True)
        holds = first.loc[[label], "holds_to"].dropna()
        assert re.findall(r"\d+", reach.replace(",", "")) == [f"{n:.0f}" for n in holds]


def blocks_of_the_contributors_guide(section: str) -> list[str]:
    _, found, text = text_of("CONTRIBUTING.md").partition(f"## {section}\n")
    assert found
    pattern = r"^( *)```(?:python|yaml)\n(.*?)^\1```$"
    blocks = re.finditer(pattern, text.partition("\n## ")[0], re.S | re.M)
    return [textwrap.dedent(block[2]) for block in blocks]


def test_the_class_of_the_contributors_guide_equals_its_plain_loops(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blocks = blocks_of_the_contributors_guide("Add an encoding in three files")
    source, settings, loops = blocks
    file = tmp_path / "log_bias.py"
    file.write_text(source, encoding="utf-8")
    cls, _ = from_file(f"{file}:LogBias")
    oracle = {}
    exec(loops, oracle)
    shape = Shape(d_model=32, n_heads=4, n_layers=2, train_length=16)
    positions = torch.arange(23)
    options = {"strength": 0.3}
    unused = [None] * 4

    encoding = cls(shape, **options)
    bias = encoding.distance_bias(positions[:, None] - positions, None)
    terms = oracle["reference"]({}, shape, options, *unused, positions[None], 0, True)
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
    path = copy / first.removeprefix("# ").partition(",")[0]
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if ", in " in first:
        before, last_field, after = text.partition("    units: dict")
        text = before + code + last_field + after
    else:
        text += f"\n\n{code}"
    path.write_text(text, encoding="utf-8")


ON_TEXT = [
    *[word for word in support.TINY if word != "tracking=none"],
    "study=text",
    "data.path=text.txt",
    "training.tokens=512",
    "training.optimizer=lion",
    "tracking.backend=lines",
]
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
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "posbench", copy / "posbench", ignore=ignored)
    shutil.copytree(ROOT / "configs", copy / "configs")
    section = "Add a metric, an optimizer, a tracker or a task"
    for block in blocks_of_the_contributors_guide(section):
        add_block(copy, block)
    support.write_text(copy)

    path = os.pathsep.join([str(copy), os.environ["PYTHONPATH"]])
    code = f"import posbench; posbench.train({ON_TEXT}); posbench.train({ON_A_TASK})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return copy / "outputs"


@pytest.fixture
def on_text(outputs):
    (folder,) = outputs.glob("text/[!.]*")
    return folder


def test_a_metric_is_added_as_the_guide_says(on_text):
    rows = [row for row in read_rows(on_text) if "protocol" in row]
    assert len(rows) > 1
    for row in rows:
        assert row["status"] == "ok"
        assert 0 < row["top1"] < 1


def test_an_optimizer_is_added_as_the_guide_says(on_text):
    state = checkpoint.trained(on_text).optimizer()["state"]
    assert set(state[0]) == {"mean"}
    assert "optimizer: lion" in (on_text / "config.yaml").read_text(encoding="utf-8")


def test_a_tracker_is_added_as_the_guide_says(on_text):
    lines = (on_text / "lines.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(read_rows(on_text)) + 1
    assert lines[-1].startswith("done ")


def test_a_task_is_added_as_the_guide_says(outputs):
    (folder,) = outputs.glob("task/[!.]*")
    rows = [row for row in read_rows(folder) if "protocol" in row]
    assert {row["task"] for row in rows} == {"last"}
    assert {row["n_tokens"] for row in rows} == {8}
