"""The page on which schemes are looked at: what it holds, and what it does in a real
browser.
"""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_study import Truth, rows_of_study, write_study
from support import posbench

from posbench.reports.explore import explore_html
from posbench.results.compare import Losses, compare, curves

# Bokeh's models by type, in the page's own words
MODELS = "const models = [...Bokeh.documents[0]._all_models.values()];"
STATE = f"""{MODELS}
const of = type => models.filter(model => model.type == type);
const source = of("ColumnDataSource").find(each => each.data.title);
const lines = of("MultiLine")[0] && of("GlyphRenderer").find(
  each => each.glyph.type == "MultiLine").data_source;
return {{
  labels: [...source.data.label],
  x: [...source.data.x],
  parameters: [...source.data.encoding_parameters],
  shown: [...of("CDSView")[0].filter.indices],
  laid_over: [...lines.data.label],
}};
"""
CHOOSE = f"""{MODELS}
models.find(m => m.type == "Select" && m.title == "across").value =
  "encoding_parameters";
models.find(m => m.type == "TextInput").value_input = "fox";
models.find(m => m.type == "ColumnDataSource" && m.data.title).selected.indices =
  [4, 5];
"""


def page(frame, title: str = "six") -> str:
    return explore_html(title, compare(frame), curves(Losses.of(frame)))


def test_the_page_has_each_scheme_and_needs_no_network():
    frame = rows_of_study("six_reader")
    html = page(frame)
    for label in frame["label"].unique():
        assert f'"{label}"' in html
    (policy,) = re.findall('Content-Security-Policy" content="(.+?)"', html)
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy


def imports_of_a_report(study: Path) -> list[str]:
    """Report a study in a process of its own; return the modules that it imported."""
    code = "import sys, posbench.cli as c; c.main(); print(*sys.modules)"
    command = [sys.executable, "-c", code, "report", study]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.slow
def test_a_report_of_two_schemes_has_no_page_and_does_not_import_bokeh(tmp_path):
    truths = dict.fromkeys(("rope", "alibi"), Truth(3.6, 0.1))
    study = write_study(tmp_path / "two", truths, seeds=2)

    assert "bokeh" not in imports_of_a_report(study)
    assert (study / "report/index.html").is_file()
    assert not (study / "report/explore.html").exists()


@pytest.mark.slow
def test_a_report_to_which_nothing_is_missing_imports_no_torch(tmp_path):
    truths = dict.fromkeys(("rope", "alibi", "none"), Truth(3.6, 0.1))
    study = write_study(tmp_path / "three", truths, seeds=5)

    assert "torch" not in imports_of_a_report(study)
    assert (study / "report/explore.html").is_file()


def test_a_report_writes_the_page_and_leads_to_it(tmp_path):
    truths = dict.fromkeys(("rope", "alibi", "none"), Truth(3.6, 0.1))
    study = write_study(tmp_path / "three", truths, seeds=2)
    assert posbench("report", str(study)) == 0
    assert '"alibi"' in (study / "report/explore.html").read_text()
    assert 'href="explore.html"' in (study / "report/index.html").read_text()


def test_nothing_that_a_run_folder_holds_becomes_code():
    frame = rows_of_study("six_reader")
    frame = frame.assign(label=frame["label"] + "</script><img src=x>")
    html = page(frame, "</title><script>alert(1)</script>")
    assert "</script><img" not in html
    assert "<script>alert(1)" not in html


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_what_is_chosen_in_a_browser_is_shown(tmp_path, width):
    driver_path, browser = map(shutil.which, ("chromedriver", "chromium"))
    if not driver_path or not browser:
        pytest.skip("no Chromium and its driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver_path)
    (tmp_path / "page.html").write_text(page(rows_of_study("six_reader")))

    with webdriver.Chrome(options=options, service=service) as driver:
        screen = {"width": width, "height": 1200, "deviceScaleFactor": 1}
        device = screen | {"mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
        driver.get((tmp_path / "page.html").as_uri())
        time.sleep(2)
        before = driver.execute_script(STATE)
        driver.execute_script(CHOOSE)
        time.sleep(1)
        after = driver.execute_script(STATE)
        wide = driver.execute_script("return document.documentElement.scrollWidth")
        faults = [
            entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"
        ]

    assert faults == []
    assert wide <= width
    assert before["x"] != after["x"] == after["parameters"]
    found = [after["labels"][number] for number in after["shown"]]
    assert "fox" in found
    assert len(found) < len(before["shown"]) == 6
    assert after["laid_over"] == after["labels"][4:6] != before["laid_over"]
