"""The documentation site: its Python runs, and it builds."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import support
import torch

ROOT = Path(__file__).parents[1]
SMALL = [
    *support.TINY,
    "data.path=text.txt",
    "study=demo",
    "training.tokens=128",
    "runtime.cache=cache",
]
# What the page's blocks train or load, and the tiny runs in their place.
REPLACED = {
    '"training.tokens=500000"': f"*{SMALL}",
    'train(encoding="alibi", training={"tokens": 500_000})': (
        f'train({SMALL}, encoding="alibi")'
    ),
    "posbench.sweep(": f"posbench.sweep({SMALL}, ",
    '"outputs/demo/FOLDER"': "run.folder",
}


def tiny_code() -> str:
    """Return the page's blocks, one after the other, on tiny runs."""
    page = ROOT / "docs" / "python.md"
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    code = "".join(blocks)
    for words, tiny in REPLACED.items():
        code = code.replace(words, tiny)
    return code


@pytest.mark.slow
def test_the_python_of_its_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    support.write_text()
    names: dict[str, Any] = {}

    exec(tiny_code(), names)

    assert names["run"].status == "done"
    assert names["logits"].dim() == 3
    assert names["output"].shape == (2, 8, 16, 64)
    torch.testing.assert_close(names["last"], names["whole"][:, :, -1:])
    # by a cache transformers generates what is likeliest without one
    generated = names["generated"]
    model = names["model"]
    likeliest = model(generated).logits.argmax(-1)
    assert torch.equal(generated[:, 8:], likeliest[:, 7:-1])


def page_names(folder: Path, ending: str) -> set[Path]:
    """Return the files of an ending below a folder, without their ending."""
    pages = folder.rglob(f"*.{ending}")
    return {page.relative_to(folder).with_suffix("") for page in pages}


@pytest.mark.slow
def test_the_site_builds_with_all_pages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    docs = support.script("docs")
    docs.write(tmp_path, pictures=False)
    config = tmp_path / "mkdocs.yml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("../..", str(ROOT)), encoding="utf-8")
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    command = [*build, "--config-file", str(config)]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    written = page_names(tmp_path / "pages", "md")
    built = page_names(tmp_path / "site", "html")
    assert written <= built
