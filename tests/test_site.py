"""The documentation site: every command on it runs, what it says of keys is there, and it asks for no network."""

import dataclasses
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemes
import support
import torch
import yaml

from posbench.bench import speed
from posbench.config import compose, schema
from posbench.config.shipped import choices
from posbench.launch import plans
from posbench.ledger import claim, reproduce

ROOT = Path(__file__).parents[1]
CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
# What a documented training run is cut down to. A key of the command itself gives way to the one here.
SMALL = [*support.TINY, "data.path=text.txt", "training.tokens=128", "runtime.cache=cache"]
# And one on a task, which has a size of its own.
ON_TASKS = ["tracking=none", "training.tokens=5376", "training.warmup_tokens=0", "training.batch_size=2",
            "evaluation.ratios=[1]", "evaluation.blocks=8", "runtime.threads=1", "runtime.device=cpu"]  # fmt: skip
# Commands that are not run here, and why.
NOT_RUN = {
    "make ": "the targets are checked by name; what they call is run by other tests",
    "pip install": "takes packages from the network; test_package.py installs the wheel",
    "uvx ": "takes packages from the network",
    "pipx ": "takes packages from the network",
    "scripts/slurm_local.sh": "needs root and a machine of its own; tests/slow/test_slurm.py starts and stops it",
    "torchrun": "starts several processes; tests/slow/test_launch.py does",
    "python -m pytest": "tests do not run tests",
    "python scripts/catalogue.py": "reads runs of hours; the test of its tables has two runs of milliseconds",
    "python scripts/claims.py": "writes into a page of the repository; test_ledger.py compares that page",
    "mkdir -p outputs && tar xf": "unpacks the rows of a study, of which test_docs.py holds what the pages say",
    "posbench sweep sweep=catalogue": "composes every encoding, as a test of test_sweep.py does",
    "lm_eval": "another project's harness, which is not installed here",
    "posbench evaluate my_model": "a model of a reader's own; test_huggingface.py evaluates models of every kind",
    "posbench evaluate EleutherAI/": "takes a model from the network; test_huggingface.py has models of every kind",
    "posbench reproduce NAME": "a claim of a reader's own; test_ledger.py reads the page's",
    "posbench train start=my_model": "a model of a reader's own; test_train_on.py trains models of every kind on",
    "posbench train start=folder": "a folder that the page makes before; test_train_on.py trains such ones on",
    "posbench sync": "sends runs to W&B; its own tests have a server on this machine",
}


@pytest.fixture(scope="session")
def site() -> Any:
    """The script that writes the pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield importlib.import_module("docs")


@pytest.fixture(scope="session")
def written(site: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, without pictures."""
    folder = tmp_path_factory.mktemp("docs")
    site.write(folder, pictures=False)
    return folder


def commands_of(text: str) -> Iterator[str]:
    """Lines of console blocks, and of indented ones that begin with a command, continued lines joined."""
    for _, block in re.findall(r"^( *)```(?:console|bash|sh)\n(.*?)^\1```", text, flags=re.S | re.M):
        yield from _joined(textwrap.dedent(block))
    for block in re.findall(r"(?:^ {4,}(?:posbench|make) .*\n(?: {5,}.*\n)*)", text, flags=re.M):
        yield from _joined(textwrap.dedent(block))


def _joined(block: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        command = line.partition("  #")[0].strip().removeprefix("$ ")
        if command and not command.startswith("#"):
            yield command


HAND_WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = sorted({line for page in HAND_WRITTEN for line in commands_of(page.read_text(encoding="utf-8"))})


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the documents speak of, and a finished run to make their studies of."""
    folder = tmp_path_factory.mktemp("work")
    support.write_text(folder)
    (folder / "novels").mkdir()
    shutil.copy(folder / "text.txt", folder / "novels" / "one.txt")
    shutil.copy(folder / "text.txt", folder / "my.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert support.posbench("train", "encoding=rope", *SMALL) == 0
    (folder / "outputs").rename(folder / "finished")
    return folder


def small(arguments: list[str]) -> list[str]:
    """A command's arguments with the sizes and the text of a tiny run, in one process."""
    given = dict(word.partition("=")[::2] for word in arguments)
    if given.get("data", "").startswith("task/"):  # its size is that of its longest problem
        return [*arguments, *ON_TASKS]
    sized = {word.partition("=")[0] for word in SMALL} | {"experiment", "evaluation", "processes"}
    return [word for word in arguments if word.partition("=")[0] not in sized] + SMALL


def _train(arguments: list[str]) -> None:
    """It is composed as it stands and then run small. What needs the hub is composed only."""
    if "--cfg" in arguments:
        assert support.posbench("train", *arguments) == 0
        return
    overrides = [word for word in arguments if not word.startswith("-")]
    if compose.single(overrides).data.source != "hub":
        assert support.posbench("train", *small(arguments)) == 0


def _prepare(arguments: list[str]) -> None:
    """It is composed as it stands; test_prepare.py prepares texts that are here."""
    overrides = [word for word in arguments if "=" in word]
    assert "--n-jobs" not in arguments or arguments[-1].isdigit()
    assert compose.combinations([overrides])


def _sweep(arguments: list[str]) -> None:
    """Each run of a sweep is composed as it stands; tests of sweeps run them."""
    own = dict(word.partition("=")[::2] for word in arguments if word.startswith(("sweep=", "tune=")))
    named = [word for word in arguments if "=" in word and word.partition("=")[0] not in own]
    named = [word for word in named if not word.startswith("-")]
    assert compose.combinations(plans.read_sets(own.get("sweep"), named))


def _bench(arguments: list[str]) -> None:
    """What would be measured is composed as it stands; it takes minutes to measure."""
    names = [word for word in arguments if word.isidentifier() and word in choices("encoding")]
    flags = dict(itertools.pairwise(arguments))
    sizes = speed.find_shape(flags.get("--shape", "demo"), int(flags["--length"]) if "--length" in flags else None)
    assert speed.configurations(names, sizes, 1, [word for word in arguments if "=" in word])


def _of_a_study(word: str) -> list[str]:
    """What a shell makes of outputs/STUDY and of globs in it, where a study is a copy of the finished one."""
    path = Path(word)
    if path.parts[:1] != ("outputs",):
        return [word]
    shutil.copytree("finished/demo", Path(*path.parts[:2]), dirs_exist_ok=True)
    anyone = re.sub(r"-[0-9a-f]{8}$", "-*", word)  # a run's digest is that of the documents' own text
    return sorted(map(str, Path().glob(anyone))) or [word]


def _sync(arguments: list[str]) -> None:
    """It is run as it stands, with an offline W&B in the place of a server."""
    expanded = [part for word in arguments for part in _of_a_study(word)]
    assert support.posbench("sync", *expanded, "tracking.mode=offline") == 0


def _reproduce(arguments: list[str]) -> None:
    """Each of its runs is composed; tests of the ledger judge them."""
    names = [word for word in arguments if "=" not in word and not word.startswith("-")]
    overrides = [word for word in arguments if "=" in word and word != "fragility=true"]
    assert reproduce.needed(claim.read(names), overrides, seeds=[5])


def _report(arguments: list[str]) -> None:
    """It is run as it stands."""
    assert support.posbench("report", *(part for word in arguments for part in _of_a_study(word))) == 0


RUNNERS: dict[str, Callable[[list[str]], None]] = {
    "prepare": _prepare, "train": _train, "sweep": _sweep, "bench": _bench, "sync": _sync, "reproduce": _reproduce,
    "report": _report,
}  # fmt: skip


def carry_out(command: str, run: Path) -> None:
    """Run a documented command, on a run folder where it says RUN."""
    words = [str(run) if word == "RUN" else word for word in shlex.split(command)]
    words = [f"start={run}" if word.startswith("start=") else word for word in words]
    assert words[0] == "posbench", f"{command}: a page shows it, and nothing here runs it"
    if words[1] in RUNNERS:
        RUNNERS[words[1]](words[2:])
    else:
        expanded = [part for word in words[1:] for part in _of_a_study(word)]
        assert support.posbench(*expanded) == 0, command


@pytest.mark.sample(60)
@pytest.mark.parametrize("command", [line for line in SHOWN if not line.startswith(tuple(NOT_RUN))])
def test_every_command_of_the_pages_runs(command: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    (run,) = work.glob("finished/demo/rope-s0-*")
    carry_out(command, run)


@pytest.mark.full
def test_the_python_of_its_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, on a tiny run in place of the one that the page trains and of the one that it loads."""
    monkeypatch.chdir(tmp_path)
    support.write_text(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", text, flags=re.S))
    code = code.replace('"training.tokens=500000"', ", ".join(map(repr, SMALL)))
    code = code.replace('"outputs/demo/FOLDER"', "run.folder")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["output"].shape == (2, 8, 16, 64) and names["run"].status == "done"


def test_the_modules_of_the_page_on_models_of_others_run() -> None:
    text = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec("".join(re.findall(r"```python\n(.*?)```", text, flags=re.S)), names)
    assert names["x"].shape == (2, 64, 128) and names["generated"].shape == (1, 16)
    torch.testing.assert_close(names["last"], names["whole"][:, :, -1:])
    (except_with,) = re.findall(r"no graph break, except with (.*?)\.\n", text, flags=re.S)
    assert re.findall(r"`(\w+)`", except_with) == [n for n in schemes.NAMES if schemes.declared(n, "GRAPH_BREAKS", "")]


def test_nothing_is_left_out_without_a_command_of_its_kind() -> None:
    for prefix, reason in NOT_RUN.items():
        assert reason and any(line.startswith(prefix) for line in SHOWN), f"no page shows {prefix}"


@pytest.mark.full
def test_pages_made_from_code_show_commands_that_compose(written: Path) -> None:
    """One command for each encoding; test_config.py composes each choice."""
    made = [*(written / "pages" / "encodings").glob("*.md"), *(written / "pages" / "reference").glob("*.md")]
    shown = {line for page in made for line in commands_of(page.read_text(encoding="utf-8"))}
    assert shown == {f"posbench train encoding={name}" for name in choices("encoding")}


@pytest.mark.full
def test_every_encoding_has_a_page_with_its_facts(site: Any, written: Path) -> None:
    for name in choices("encoding"):
        text = (written / "pages" / "encodings" / site.encoding_pages.page_of(name)).read_text(encoding="utf-8")
        for part in ("Source: ", "Acts on: ", "Beyond the training length: ", "Checked against: ", "## Cost"):
            assert part in text, f"{name}: {part}"
        assert "None\n" not in text.replace("None.\n", ""), name


def test_rows_of_tables_made_from_code_are_whole(written: Path) -> None:
    """A default with a line break in it, as the separators of `bipe`, ended its row."""
    made = [*(written / "pages" / "encodings").glob("*.md"), *(written / "pages" / "reference").glob("*.md")]
    rows = [(page.name, line) for page in made for line in page.read_text(encoding="utf-8").splitlines()]
    rows = [(page, line) for page, line in rows if line.startswith("|")]
    assert len(rows) > 500 and [row for row in rows if not row[1].endswith("|")] == []
    assert [line for page, line in rows if page == "bipe.md" and '`[., "\\n"]`' in line]


@pytest.mark.full
def test_every_encoding_has_a_picture_of_posbenchs_own(site: Any, tmp_path: Path) -> None:
    site.encoding_pages.draw("alibi", tmp_path)
    assert (tmp_path / "alibi.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_the_catalogue_has_a_row_per_encoding_with_what_its_run_and_its_oracle_say(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = importlib.import_module("catalogue")
    monkeypatch.chdir(tmp_path)
    support.write_text()
    tiny = support.each_once(["study=catalogue", *SMALL, "evaluation.ratios=[1,2,8]"])
    sets = [[*tiny, f"encoding={name}"] for name in ("rope", "learned", "layered/smollm3", "fox")]
    for one in sets[:3]:
        assert support.posbench("train", *one) == 0
    assert support.posbench("train", *sets[0], "seed=1") == 0
    monkeypatch.setattr(plans, "read_sets", lambda name, overrides: [[*one, *overrides] for one in sets])
    found = catalogue.runs(Path("outputs/catalogue"))
    again = catalogue.runs(Path("outputs/catalogue"), "seed=1")
    assert [name for name, run in again.items() if run] == ["rope"]
    assert [name for name, run in found.items() if run] == ["rope", "learned", "layered/smollm3"]
    assert catalogue.not_finite(found) == []
    case = (
        '<testcase><property name="scheme" value="{}"/>'
        '<property name="values" value="{}"/><property name="gradients" value="{}"/></testcase>'
    )
    told = [("rope", 1e-6, 3e-6), ("rope", 2e-6, 1e-6), ("learned", 0.0, 0.0)]
    Path("oracles.xml").write_text(f"<suite>{''.join(case.format(*one) for one in told)}<testcase/></suite>")
    text = catalogue.page(found, again, catalogue.errors(Path("oracles.xml")), {"rope": 0.974})
    assert "3 of 4 rows have their run. Not run yet: `fox`." in text
    rows = {cells[1]: cells[2:-1] for line in text.splitlines() if len(cells := re.split(r" ?\| ?", line)) > 8}
    (rope,) = [cells for name, cells in rows.items() if name.startswith("[`rope`]")]
    base, rise, far = map(float, rope[1:4])
    levels = {
        level.row.length_ratio: level.nll for (kind, _), level in found["rope"].levels.at.items() if kind == "plain"
    }
    assert (base, rise, far) == pytest.approx([levels[1], levels[2] - levels[1], levels[8] - levels[1]], abs=6e-4)
    assert rope[0] == "0" and rope[4] == "0.97" and rope[6:] == ["2e-06", "3e-06"]
    assert f"| `rope` | {rope[1]} | {again['rope'].levels.at['plain', 16].nll:.3f} | {rope[2]} | " in text
    (learned,) = [cells for name, cells in rows.items() if name.startswith("[`learned`]")]
    assert learned[2:4] == ["undefined", "undefined"] and learned[6:] == ["0", "0"]
    (smollm3,) = [cells for name, cells in rows.items() if name.startswith("[`layered/smollm3`]")]
    assert smollm3[5:] == ["as `layered`", "", ""]


def test_properties_are_measured_for_the_pages(site: Any) -> None:
    (measured,) = site.encoding_pages.properties.measure(["none"])
    assert site.encoding_pages._verdicts(measured).count("|") > 2 * len(site.encoding_pages._PROPERTIES)


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


def test_links_to_code_lead_to_the_pages_made_from_it(site: Any) -> None:
    text = "[keys](../configs/train.yaml) [rope](../posbench/encodings/rope.py#x) [cite](../CITATION.cff) ![a](six.png)"
    mended = site.relinked(text, "docs/runs.md")
    assert mended == "[keys](reference/configuration.md) [rope](encodings/rope.md#x) cite ![a](six.png)"
    assert site.relinked("[p](docs/protocol.md#x)", "README.md") == "[p](protocol.md#x)"


def test_the_folder_of_encodings_opens_with_the_list_and_every_page_is_in_the_navigation(
    site: Any, written: Path
) -> None:
    listed = (written / "pages" / "encodings" / "index.md").read_text(encoding="utf-8")
    assert listed.startswith("# Encodings\n")
    linked = set(re.findall(r"\[`\w+`\]\(([\w-]+\.md)\)", listed))
    assert linked == {site.encoding_pages.page_of(name) for name in choices("encoding")}
    (nav,) = (entry["Encodings"] for entry in yaml.safe_load((written / "mkdocs.yml").read_text())["nav"]
              if "Encodings" in entry)  # fmt: skip
    first, *families = (page for entry in nav for page in entry.values())
    pages = [page for family in families for entry in family for page in entry.values()]
    assert first == "encodings/index.md" and sorted(pages) == sorted(f"encodings/{page}" for page in linked)
    assert site.relinked("[i](posbench/encodings/index.py)", "README.md") == "[i](encodings/index-encoding.md)"
    assert site.relinked("[all](posbench/encodings)", "README.md") == "[all](encodings/index.md)"


def test_the_drawing_of_the_code_is_a_list_on_the_site(written: Path) -> None:
    text = (written / "pages" / "contributing.md").read_text(encoding="utf-8")
    assert "mermaid" not in text and "\n12. report: `posbench/report/`\n" in text


def test_papers_are_links(site: Any, written: Path) -> None:
    link = "[arXiv:2104.09864](https://arxiv.org/abs/2104.09864)"
    assert link in (written / "pages" / "encodings" / "rope.md").read_text(encoding="utf-8")
    assert "[arXiv:2309.17453](" in (written / "pages" / "protocol.md").read_text(encoding="utf-8")


def test_the_errors_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|", text, flags=re.M)
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "posbench").rglob("*.py"))
    parts = [part for row in rows[1:] for part in re.split(r"'\w+'|the training | 3 | process|\.\.\.", row)]
    assert len(rows) == 10 and [part for part in parts if part.strip() not in code] == []


@pytest.fixture(scope="module")
def built(written: Path) -> Path:
    """The site as it would be published, but for pictures of encodings."""
    if os.environ.get("POSBENCH_REQUIRE_ORACLES") != "1":  # `make test` has it
        pytest.importorskip("zensical")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file"]
    config = written / "mkdocs.yml"
    config.write_text(config.read_text(encoding="utf-8").replace("../..", str(ROOT)), encoding="utf-8")
    done = subprocess.run([*command, str(config)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return written / "site"


@pytest.mark.full
def test_the_front_page_has_five_cards(built: Path) -> None:
    text = (built / "index.html").read_text(encoding="utf-8")
    (cards,) = re.findall(r'<div class="grid cards">(.*?)</div>', text, flags=re.S)
    assert re.findall(r'href="([^"]+)"', cards) == [
        f"{page}.html" for page in ("which_encoding", "how_far", "longer", "your_model", "contributing")
    ]


@pytest.mark.full
def test_the_site_is_complete(built: Path, written: Path) -> None:
    pages = {path.relative_to(written / "pages").with_suffix("") for path in (written / "pages").rglob("*.md")}
    html = {path.relative_to(built).with_suffix("") for path in built.rglob("*.html")}
    assert pages <= html
    assert 'id="posbench.build_encoding"' in (built / "reference" / "python.html").read_text(encoding="utf-8")
    assert "yarn" in (built / "search.json").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_site_asks_for_nothing_from_the_network(built: Path) -> None:
    """Nothing that a page loads has an address elsewhere; links that a reader may follow are another matter."""
    for page in built.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|data)=\S+", text)
        loaded += re.findall(r"<link\b[^>]*>", text)
        elsewhere = [tag for tag in loaded if re.search(r"""=["']?(?:https?:)?//""", tag)]
        assert elsewhere == [], page
        assert re.findall(r"@import|url\(\s*[\"']?(?:https?:)?//", text) == [], page
    for sheet in built.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"@import[^;]*//|url\(\s*[\"']?(?:https?:)?//[^)]*", text) == [], sheet


@pytest.mark.full
@pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and os.environ.get("POSBENCH_REQUIRE_CHROMIUM") != "1",
    reason="chromium and chromedriver are not installed (apt-get install chromium-driver)",
)
def test_a_page_opened_from_the_file_system_can_be_searched(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selenium import webdriver
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")  # the driver is asked on this machine
    monkeypatch.setenv("SE_OFFLINE", "true")
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        driver.get((built / "encodings" / "rope.html").as_uri())
        within = "return [...document.querySelectorAll('*')].map(e => e.shadowRoot?.textContent ?? '').join(' ')"
        ActionChains(driver).key_down(Keys.CONTROL).send_keys("k").key_up(Keys.CONTROL).pause(1).perform()
        ActionChains(driver).send_keys("dual_chunk").perform()
        deadline = time.monotonic() + 60
        while "Context extension" not in driver.execute_script(within):
            assert time.monotonic() < deadline, driver.execute_script(within)
            time.sleep(0.2)
        messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        asked = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        assert any(url.endswith("/search.js") for url in asked)
        assert [url for url in asked if url.startswith(("http:", "https:", "ws:", "wss:"))] == []
        assert driver.get_log("browser") == []
    finally:
        driver.quit()
