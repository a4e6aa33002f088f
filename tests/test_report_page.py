"""The HTML report in a real browser: it sorts, it asks for nothing from the network, and no name in it runs."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_study import SCHEMES, configured, demo_config, write_run, write_study

from posbench import report
from posbench.report import figures

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
PAYLOAD = "\"'></th><img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>{{7*7}}"
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run --window-size=1280,1000"
)

if not (CHROMIUM and DRIVER) and os.environ.get("POSBENCH_REQUIRE_CHROMIUM") != "1":
    pytest.skip(
        "chromium and chromedriver are not installed (apt-get install chromium-driver)", allow_module_level=True
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "localhost,127.0.0.1")  # the driver is asked on this machine
        patch.setenv("SE_OFFLINE", "true")  # selenium downloads nothing
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        yield driver
        driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, template = tmp_path_factory.mktemp("outputs") / "fake", demo_config()
    write_study(folder, template, {name: SCHEMES[name] for name in ("rope", "alibi", "sinusoidal", "learned")}, seeds=2)
    hostile = {"command": PAYLOAD, "data": {"sha256": "c0ffee" + "0" * 58, "split": "document", "name": PAYLOAD}}
    write_run(folder, configured(template, "alibi", 0, note=PAYLOAD), SCHEMES["alibi"], **hostile)
    write_run(folder, configured(template, "none", 0), None, "failed", reason="diverged", message=PAYLOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 30)
        report.main([folder])
    return folder / "report" / "index.html"


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    for kind in ("performance", "browser"):
        browser.get_log(kind)  # forget what came before
    browser.get(page.as_uri())
    return browser


def test_the_page_asks_for_nothing_but_itself_shows_its_picture_and_runs_no_name(opened: Any, page: Path) -> None:
    messages = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:image/svg+xml;base64,")] == [page.as_uri()]
    assert opened.get_log("browser") == []  # no script error, nothing refused by the policy
    assert opened.execute_script("return document.querySelector('figure img').naturalWidth") > 300
    assert opened.title == "posbench: fake"
    assert len(opened.find_elements("css selector", "details")) == 10


def test_a_click_on_a_header_sorts_and_another_turns_it_round(opened: Any) -> None:
    def column(number: int) -> list[str]:
        script = (
            "return [...document.querySelector('table').tBodies[0].rows].map(r => r.cells[arguments[0]].textContent)"
        )
        return [str(text) for text in opened.execute_script(script, number)]

    before = column(0)
    header = next(e for e in opened.find_elements("css selector", "thead button") if e.text.strip() == "nll")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", header)
    header.click()
    ascending, levels = column(0), [float(text) for text in column(2) if text]
    assert ascending != before and sorted(ascending) == sorted(before)
    assert len(levels) == 5 and levels == sorted(levels)
    assert ascending[-1] == "none"  # its run failed: without a value it stays last
    header.click()
    assert column(0) == [*ascending[:-1][::-1], "none"]
    assert header.find_element("xpath", "..").get_attribute("aria-sort") == "descending"
