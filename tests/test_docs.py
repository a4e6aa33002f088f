"""What the documents say exists, exists: commands, files, numbers, and the
contributors' example.
"""

import collections
import json
import math
import pathlib
import re
import shlex
import textwrap
from collections.abc import Iterator

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

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def text_of(name: str | pathlib.Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands(console: bool = False) -> Iterator[list[str]]:
    """Yield the words of the pages' posbench and make commands: in console blocks, and
    unless `console` in text.
    """
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = "\n".join(
            re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, flags=re.S)
        )
        lines = re.sub(r"\\\n\s*", "", blocks).splitlines()
        lines += [] if console else re.findall(r"`((?:posbench|make) [^`]+)`", text)
        for words in (
            shlex.split(line.partition("  #")[0].removeprefix("$ ")) for line in lines
        ):
            if len(words) > 1 and words[0] in ("posbench", "make"):
                yield words


def test_commands_and_choices_of_the_documents_exist():
    known = {
        command.name or command.callback.__name__ for command in app.registered_commands
    }
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), flags=re.M))
    for program, first, *rest in commands():
        if program == "make":
            assert {
                first,
                *(word for word in rest if word[0] != "-" and "=" not in word),
            } <= targets, first
            continue
        assert first in known or first[0] == "-" or "=" in first, first
        for group, _, value in (word.partition("=") for word in rest):
            if (
                (ROOT / "configs" / group).is_dir()
                and "{" not in value
                and value.islower()
                and value != "log_bias"
            ):
                assert all(
                    (ROOT / "configs" / group / f"{choice}.yaml").exists()
                    for choice in value.split(",")
                ), value


@pytest.mark.slow
def test_every_run_and_sweep_that_a_page_shows_composes():
    composed = set()
    for _, command, *words in commands(console=True):
        # files of sweeps are composed by test_sweep; a start needs a run
        beside = ("sweep=", "start=", "--cfg")
        if command in ("train", "sweep", "prepare") and not any(
            word.startswith(beside) for word in words
        ):
            composed.add(
                tuple(
                    word
                    for word in words
                    if "=" in word and word[0] != "-" and word[:5] != "seed="
                )
            )
    assert len(composed) > 20
    assert all(compose.configs([*words]) for words in composed)


def test_links_and_paths_in_the_documents_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), (
                f"{page.name} points to {target}"
            )


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of all rows of the text's tables, without emphasis."""
    lines = [
        line.replace("**", "") for line in text.splitlines() if line.startswith("|")
    ]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_results_of_the_readme_and_of_the_front_page_are_those_of_the_page_of_results():
    pages = (
        text_of(name) for name in ("docs/results.md", "README.md", "docs/index.md")
    )
    results, *others = (page.replace("\\[", "[").replace("\\]", "]") for page in pages)
    printed: dict[str, set[str]] = {}
    for name, *cells in rows_of(re.split(r"^## ", results, flags=re.M)[1]):
        printed.setdefault(name, {"", "the reference"}).update(cells)
    for page in others:
        rows = [row for row in rows_of(page) if "±0." in "".join(row)]
        assert len(rows) == 6
        assert all({*cells} <= printed[name] for name, *cells in rows)


@pytest.mark.parametrize(
    "place",
    [
        "six results ### Beyond the",
        "six results ### Against",
        "patterns longer ## Which",
    ],
)
def test_a_table_is_that_of_the_rows_beside_the_page(place):
    """Losses, rises, reach, uses, differences and adjusted intervals of schemes; of
    patterns also cache and passkey.
    """
    study, page, title = place.split(" ", 2)
    frame = read([ROOT / f"docs/rows/{study}.parquet"])
    text = text_of(f"docs/{page}.md")
    known: dict[tuple[object, str], set[str]] = collections.defaultdict(set)
    for setting, part in frame.groupby("setting"):
        settings = part.groupby("label")["settings"].first().map(json.loads)
        for label, *cells in cells_of(table := compare(part)):
            known[setting, label] |= {
                cell.replace("[", r"\[").replace("]", r"\]") for cell in cells
            }
        for label, row in table.set_index("label").to_dict("index").items():
            keys = [
                min(layer.get("window", 1024), 1024)
                for layer in settings[label].get("encoding.layers", [{}])
            ]
            interval = f"{row['nll']:.3f} ±{(row['nll_high'] - row['nll_low']) / 2:.3f}"
            known[setting, label] |= {
                interval,
                f"{100 * sum(keys) / len(keys) / 1024:.0f}",
            }
            for name in ("nll_difference_adjusted", "rise_difference_adjusted"):
                known[setting, label].add(
                    f"{row[f'{name}_low']:+.3f} to {row[f'{name}_high']:+.3f}"
                )
        for label, rows in part.query(
            "task == 'passkey' and variant == 'plain'"
        ).groupby("label"):
            right = 100 * rows.groupby("length_ratio")["accuracy"].mean()
            known[setting, label].add(f"{right[1]:.0f}, {right[8]:.0f}")
    lines = rows_of(
        next(
            part
            for part in text[text.index(title) :].split("\n\n")
            if part.startswith("|")
        )
    )[2:]
    for name, *cells in lines:
        shown = [*name.split("`"), name][1]
        names = f"layered layers={shown}", "layered" if "+" in shown else shown
        numbers = {cell for cell in cells if re.match(r"[-+\d≥]", cell)}
        assert (
            len(lines) > 4
            and len(numbers) > 3
            and any(numbers <= known[k] for k in known if k[1] in names)
        ), numbers


@pytest.mark.slow
def test_the_catalogue_is_that_of_the_rows_of_both_seeds():
    seeds = [
        read([ROOT / "docs" / "rows" / f"{study}.parquet"])
        for study in ("catalogue", "catalogue_again")
    ]
    tables = [
        pd.concat(compare(part) for _, part in rows.groupby("dtype")).set_index("label")
        for rows in seeds
    ]
    lines = rows_of(text_of("docs/catalogue.md"))[2:]
    assert len(lines) == len(tables[0]) == 75
    for name, _, *cells, reach in lines:
        label = name.split("`")[1]
        for column, cell in zip(("nll", "rise_2x", "rise_8x"), cells, strict=True):
            numbers = (
                [float(number) for number in cell.split(", ")]
                if cell != "undefined"
                else [math.nan, math.nan]
            )
            assert [table.loc[label, column] for table in tables] == pytest.approx(
                numbers, abs=0.00051, nan_ok=True
            )
        holds = tables[0].loc[[label], "holds_to"].dropna()
        assert re.sub(r"\D", "", reach) == "".join(f"{tokens:.0f}" for tokens in holds)


def test_the_readmes_table_of_encodings_is_the_generated_one():
    readme = text_of("README.md")
    assert support.script("readme").written(readme) == readme, (
        "README's encodings are out of date: run `make readme`"
    )


def blocks_of_the_contributors_guide() -> list[str]:
    pattern = r"^( *)```(?:python|yaml)\n(.*?)^\1```$"
    found = re.finditer(pattern, text_of("CONTRIBUTING.md"), re.S | re.M)
    return [textwrap.dedent(block[2]) for block in found]


def test_the_class_of_the_contributors_guide_equals_its_plain_loops(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, settings, loops = blocks_of_the_contributors_guide()
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
