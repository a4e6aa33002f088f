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
    "training.tokens=128",
    "runtime.cache=cache",
]


@pytest.mark.slow
def test_the_python_of_its_page_runs(tmp_path, monkeypatch):
    """The page's blocks run one after the other, on tiny runs in place of those that it
    trains or loads.
    """
    monkeypatch.chdir(tmp_path)
    support.write_text()
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", text, flags=re.S))
    code = code.replace('"training.tokens=500000"', ", ".join(map(repr, SMALL)))
    code = code.replace(
        'train(encoding="alibi", training={"tokens": 500_000})',
        f'train({SMALL}, encoding="alibi")',
    )
    code = code.replace("posbench.sweep(", f"posbench.sweep({SMALL}, ")
    code = code.replace('"outputs/demo/FOLDER"', "run.folder")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["run"].status == "done"
    assert names["logits"].dim() == 3
    assert names["output"].shape == (2, 8, 16, 64)
    torch.testing.assert_close(names["last"], names["whole"][:, :, -1:])
    # by a cache transformers generates what is likeliest without one
    generated = names["generated"]
    likeliest = names["model"](generated).logits.argmax(-1)
    assert torch.equal(generated[:, 8:], likeliest[:, 7:-1])


@pytest.mark.slow
def test_the_site_builds_with_all_pages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    support.script("docs").write(tmp_path, pictures=False)
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        config.read_text(encoding="utf-8").replace("../..", str(ROOT)), encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--clean",
        "--config-file",
        str(config),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / "site"
    pages = {
        path.relative_to(tmp_path / "pages").with_suffix("")
        for path in (tmp_path / "pages").rglob("*.md")
    }
    assert pages <= {
        path.relative_to(built).with_suffix("") for path in built.rglob("*.html")
    }
