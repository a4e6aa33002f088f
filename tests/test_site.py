"""The documentation site: its commands compose, its Python runs, it builds, and it asks for no network."""

import dataclasses
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support

from posbench.config import compose, schema
from posbench.launch import plans

ROOT = Path(__file__).parents[1]
SMALL = [*support.TINY, "data.path=text.txt", "training.tokens=128", "runtime.cache=cache"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, without pictures."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        importlib.import_module("docs").write(folder, pictures=False)
    return folder


def shown() -> Iterator[list[str]]:
    """The words of every command in the console blocks of the pages, continued lines joined."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for block in re.findall(r"```(?:console|bash|sh)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                yield shlex.split(line.partition("  #")[0].strip().removeprefix("$ "))


@pytest.mark.full  # half a minute
def test_every_run_and_sweep_that_a_page_shows_composes() -> None:
    composed = 0
    for program, command, *words in (words for words in shown() if len(words) > 1):
        if program != "posbench" or command not in ("train", "sweep", "prepare") or "--cfg" in words:
            continue
        own = dict(word.partition("=")[::2] for word in words if word.startswith(("sweep=", "tune=")))
        typed = [word for word in words if "=" in word and word.partition("=")[0] not in own and word[0] != "-"]
        sets = plans.read_sets(own.get("sweep"), typed)
        if not any(word.startswith("start=") for one in sets for word in one):  # else it needs a run
            assert all(compose.configs(each) for each in sets), words
            composed += 1
    assert composed > 50


@pytest.mark.full
def test_the_python_of_its_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, on tiny runs in place of those that the page trains and of the one that it loads."""
    monkeypatch.chdir(tmp_path)
    support.write_text()
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", text, flags=re.S))
    code = code.replace('"training.tokens=500000"', ", ".join(map(repr, SMALL)))
    code = code.replace('train(encoding="alibi", training={"tokens": 500_000})', f'train({SMALL}, encoding="alibi")')
    code = code.replace("posbench.sweep(", f"posbench.sweep({SMALL}, ")
    code = code.replace('"outputs/demo/FOLDER"', "run.folder")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["output"].shape == (2, 8, 16, 64) and names["run"].status == "done"


def test_the_modules_of_the_page_on_models_of_others_run() -> None:
    text = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec("".join(re.findall(r"```python\n(.*?)```", text, flags=re.S)), names)
    assert names["x"].shape == (2, 64, 128) and names["generated"].shape == (1, 16)


def test_the_configuration_page_explains_every_key(written: Path) -> None:
    text = (written / "pages" / "reference" / "configuration.md").read_text(encoding="utf-8")
    rows = {row[0].strip("| `"): row for row in (line.strip("| ").split(" | ") for line in text.splitlines()) if row}

    def keys(cls: Any, prefix: str = "") -> Iterator[str]:
        for field in dataclasses.fields(cls):
            section = {f"{kind.__name__}": kind for kind in vars(schema).values() if dataclasses.is_dataclass(kind)}
            inner = section.get(str(getattr(field.type, "__name__", field.type)))
            yield from keys(inner, f"{prefix}{field.name}.") if inner else [f"{prefix}{field.name}"]

    for key in keys(schema.Config):
        if not key.startswith("encoding."):
            assert key in rows, f"no row for {key}"
            assert len(rows[key]) == 4 and rows[key][3].strip(), f"no meaning beside {key} in configs/"


@pytest.mark.full
def test_the_site_builds_with_all_pages_and_asks_for_nothing_from_the_network(written: Path) -> None:
    """Nothing that a page loads has an address elsewhere; links that a reader may follow are another matter."""
    if os.environ.get("POSBENCH_REQUIRE_ORACLES") != "1":  # `make test` has it
        pytest.importorskip("zensical")
    config = written / "mkdocs.yml"
    config.write_text(config.read_text(encoding="utf-8").replace("../..", str(ROOT)), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(config)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = written / "site"
    pages = {path.relative_to(written / "pages").with_suffix("") for path in (written / "pages").rglob("*.md")}
    assert pages <= {path.relative_to(built).with_suffix("") for path in built.rglob("*.html")}
    for page in built.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|data)=\S+", text)
        loaded += re.findall(r"<link\b[^>]*>", text)
        assert [tag for tag in loaded if re.search(r"""=["']?(?:https?:)?//""", tag)] == [], page
        assert re.findall(r"@import|url\(\s*[\"']?(?:https?:)?//", text) == [], page
    for sheet in built.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"@import[^;]*//|url\(\s*[\"']?(?:https?:)?//[^)]*", text) == [], sheet
