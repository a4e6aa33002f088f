"""The HTML report in a real browser: it is clicked, it asks for nothing from the network, and no name in it runs."""

import collections
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_study import SCHEMES, Truth, configured, demo_config, write_run, write_study
from fake_tasks import Skill, task_config, write_task_run

from posbench import report
from posbench.report import figures, styles, task_figure

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


def page_of(folder: Path) -> Path:
    """The page of a report on a study, made without its pictures."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (figures, task_figure):
            patch.setattr(module, "save", lambda group, summaries, folder: [])
        report.main([folder])
    return folder / "report" / "index.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, template = tmp_path_factory.mktemp("outputs") / "fake", demo_config()
    write_study(folder, template, {name: SCHEMES[name] for name in ("rope", "alibi", "sinusoidal", "learned")}, seeds=2)
    hostile = {"command": PAYLOAD, "data": {"sha256": "c0ffee" + "0" * 58, "split": "document", "name": PAYLOAD}}
    write_run(folder, configured(template, "alibi", 0, note=PAYLOAD), SCHEMES["alibi"], **hostile)
    write_run(folder, configured(template, "none", 0), None, "failed", reason="diverged", message=PAYLOAD)
    return page_of(folder)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten schemes, three of which end at the training length and one of which rises far above the others."""
    folder, template = tmp_path_factory.mktemp("outputs") / "fake", demo_config()
    short = Truth(3.9, 0.0, last_ratio=1)
    schemes = {"alibi": 0.0, "t5": 0.1, "fox": 0.01, "none": 0.2, "sinusoidal": 0.3, "index": 0.9}
    write_study(folder, template, {name: Truth(3.7, rise) for name, rise in schemes.items()}, seeds=1)
    for rows in (64, 65, 66):
        write_run(folder, configured(template, "learned", 0, rows=rows, a_long_name_of_an_option="x" * rows), short)
    write_run(folder, configured(template, "rope", 0), Truth(3.7, 0.2))
    return page_of(folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a task: one scheme learns, of one some seeds do, one has not learned, one ends where trained."""
    folder, config = tmp_path_factory.mktemp("outputs") / "fake", task_config(demo_config(), PAYLOAD)
    for seed in range(3):
        write_task_run(folder, config, "alibi", seed, Skill(1.0, (1.0, 0.9, 0.8 + 0.02 * seed, 0.7, 0.6)))
        write_task_run(folder, config, "rope", seed, Skill(1.0 if seed else 0.6, (0.5, 0.4, 0.3, 0.2, 0.1)))
        write_task_run(folder, config, "none", seed, Skill(0.82, steps=None))
        write_task_run(folder, config, "learned", seed, Skill(1.0, ()))
    return page_of(folder)


def visit(browser: Any, page: Path) -> Any:
    """Open a page and wait for its charts."""
    from selenium.webdriver.support.ui import WebDriverWait

    for kind in ("performance", "browser"):
        browser.get_log(kind)  # forget what came before
    browser.get(page.as_uri())
    WebDriverWait(browser, 20).until(lambda there: there.find_elements("css selector", ".drawn svg"))
    return browser


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    return visit(browser, page)


def dots(browser: Any) -> dict[str, float]:
    """The opacity of each dot of the chart by its words for screen readers."""
    script = """return [...document.querySelectorAll(".drawn path[aria-label]")].map(
        e => [e.getAttribute("aria-label"), Number(e.getAttribute("opacity") ?? 1)])"""
    return {str(words): float(shown) for words, shown in browser.execute_script(script) if " at " in words}


def until_dots(browser: Any, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The dots once they are as they should be; a chart draws in the next frame."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 5).until(lambda there: holds(dots(there)))
    return dots(browser)


def legend(browser: Any) -> list[str]:
    return all_texts(browser, ".drawn .role-legend-label text")


def choose(browser: Any, css: str) -> None:
    """Click an input of the chart."""
    browser.execute_script(f"document.querySelector({css!r}).click()")


def all_texts(browser: Any, css: str) -> list[str]:
    return [
        str(text)
        for text in browser.execute_script(f"return [...document.querySelectorAll({css!r})].map(e => e.textContent)")
    ]


def click(browser: Any, css: str, text: str) -> Any:
    """Click the element of that text, as a user would."""
    element = next(e for e in browser.find_elements("css selector", css) if e.text.strip() == text)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()
    return element


RISE = "input[type=radio][value=rise]"


def test_the_page_asks_for_nothing_but_itself(opened: Any, page: Path) -> None:
    choose(opened, RISE)
    messages = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked == [page.as_uri()]
    assert opened.get_log("browser") == []  # no script error, nothing refused by the policy
    assert page.stat().st_size < 1.2e6


def test_a_click_on_a_header_sorts_and_another_turns_it_round(opened: Any) -> None:
    def column(number: int) -> list[str]:
        script = (
            "return [...document.querySelector('table').tBodies[0].rows].map(r => r.cells[arguments[0]].textContent)"
        )
        return [str(text) for text in opened.execute_script(script, number)]

    before = column(0)
    header = click(opened, "thead button", "nll")
    ascending, levels = column(0), [float(text) for text in column(2) if text]
    assert ascending != before and sorted(ascending) == sorted(before)
    assert len(levels) == 5 and levels == sorted(levels)
    assert ascending[-1] == "none"  # its run failed: without a value it stays last
    header.click()
    assert column(0) == [*ascending[:-1][::-1], "none"]
    assert header.find_element("xpath", "..").get_attribute("aria-sort") == "descending"


def test_a_click_in_the_legend_isolates_a_curve_and_a_double_click_brings_all_back(opened: Any) -> None:
    from selenium.webdriver import ActionChains

    assert legend(opened)[-1] == "rope, windowed"  # of the narrowed curves only the reference's is on at first
    assert set(dots(opened).values()) == {1.0}
    (label,) = (e for e in opened.find_elements("css selector", ".drawn .role-legend-label text") if e.text == "rope")
    ActionChains(opened).move_to_element(label).click().perform()
    found = until_dots(opened, lambda found: min(found.values()) < 0.2)
    assert {words.partition(" at ")[0] for words, shown in found.items() if shown == 1.0} == {"rope"}
    choose(opened, "input[type=checkbox]")
    assert "sinusoidal, windowed" in legend(opened)


def test_the_rise_starts_at_zero_for_every_scheme(opened: Any) -> None:
    choose(opened, RISE)
    found = until_dots(opened, lambda found: "rope at 64 tokens (1x): 0" in found)
    starts = {words for words in found if " at 64 tokens (1x)" in words}
    assert len(starts) >= 4 and all(words.endswith(": 0") for words in starts)


def test_an_undefined_scheme_ends_at_a_stop_sign(opened: Any) -> None:
    stops = opened.find_elements("css selector", '.drawn path[aria-label="undefined from 2x"]')
    assert len(stops) == 1
    assert not [words for words in dots(opened) if words.startswith("learned at 128")]


def test_pointing_at_a_curve_reads_its_value(opened: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    spot = opened.find_elements("css selector", '.drawn path[aria-label^="sinusoidal at 1,024"]')[-1]
    ActionChains(opened).move_to_element_with_offset(spot, -6, 4).perform()  # near it
    WebDriverWait(opened, 5).until(lambda there: there.find_elements("css selector", "#vg-tooltip-element.visible"))
    said = opened.find_element("css selector", "#vg-tooltip-element").text
    assert re.fullmatch(r"of sinusoidal\nat 1,024 tokens \(16x\)\nis 5\.\d+ \(range of seeds: 5\.\d+ to 5\.\d+\)", said)


@pytest.mark.full
def test_what_would_flatten_the_others_leaves_the_picture_and_many_curves_have_no_bands(
    browser: Any, many: Path
) -> None:
    visit(browser, many)
    assert len([words for words in dots(browser) if words.startswith("index at")]) == 5
    (plot,) = boxes(browser, ".drawn .mark-group.role-frame.root > g > path.background")
    places = {e.get_attribute("aria-label"): e.rect["y"] for e in browser.find_elements("css selector", ".drawn path")}
    shown = [words for words in places if words and words.startswith("sinusoidal at")]
    assert len(shown) == 5 and plot["height"] > 300
    assert max(places[words] for words in shown) - min(places[words] for words in shown) > 60  # not flattened
    assert browser.find_elements("css selector", ".drawn .mark-area path") == []


@pytest.mark.full
def test_a_task_shows_every_seed_and_what_has_not_learned_is_hollow(browser: Any, tasks: Path) -> None:
    visit(browser, tasks)
    script = """return [...document.querySelectorAll(".drawn path[aria-label]")].map(
        e => [e.getAttribute("aria-label").split(" at ")[0], e.getAttribute("fill") !== "var(--page)"])"""
    found = collections.Counter(map(tuple, browser.execute_script(script)))
    medians = {"alibi": 8, "rope": 8, "learned": 3}
    assert found["alibi", True] == 24 + medians["alibi"] and found["alibi", False] == 0
    assert (found["rope", True], found["rope", False]) == (16 + medians["rope"], 8)
    assert (found["none, not learned", True], found["none, not learned", False]) == (0, 24)
    assert found["learned", True] == 9 + medians["learned"]
    assert "right, %" in all_texts(browser, ".drawn text")
    assert browser.title != "pwned" and browser.get_log("browser") == []


def boxes(browser: Any, css: str) -> list[dict[str, float]]:
    script = f"return [...document.querySelectorAll({css!r})].map(e => e.getBoundingClientRect().toJSON())"
    return list(browser.execute_script(script))


def test_text_among_numbers_stands_where_they_stand(opened: Any) -> None:
    script = """return [...document.querySelectorAll("td")].filter(e => e.textContent === "undefined")
        .map(e => getComputedStyle(e).textAlign)"""
    assert set(opened.execute_script(script)) == {"right"}


@pytest.fixture
def phone(browser: Any) -> Iterator[Any]:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    yield browser
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.full
def test_on_a_phone_the_chart_fits_and_every_word_is_readable(phone: Any, many: Path) -> None:
    visit(phone, many)
    assert phone.execute_script("return document.documentElement.scrollWidth") == 390
    texts = boxes(phone, ".drawn svg text")
    assert len(texts) > 20 and all(text["left"] >= 0 and text["right"] <= 390 for text in texts)
    assert min(text["height"] for text in texts if text["width"]) >= 11


def test_on_a_phone_a_wide_table_scrolls_under_the_names_of_its_rows(phone: Any, page: Path) -> None:
    phone.get(page.as_uri())
    before, after = phone.execute_script("""
        const table = document.querySelector(".scroll"), left = e => e.getBoundingClientRect().left;
        const all = () => [table.querySelector("tbody th"), table.querySelector("tbody td:last-child")].map(left);
        const before = all();
        table.scrollLeft = 200;
        return [before, all()];""")
    assert after[0] == before[0] and after[1] < before[1] - 100


def luminance(colour: str) -> float:
    """Of WCAG; of `rgb(1, 2, 3)` or `#010203`."""
    parts = re.findall(r"\d+", colour) if "(" in colour else [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    linear = [
        (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4) for x in (int(part) / 255 for part in parts)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


INKS = """const root = getComputedStyle(document.documentElement);
    return [...Array(8).keys()].map(i => root.getPropertyValue(`--ink-${i}`).trim())"""


def computed(browser: Any, css: str, key: str) -> set[str]:
    script = f"return [...document.querySelectorAll({css!r})].map(e => getComputedStyle(e)[{key!r}])"
    return set(browser.execute_script(script))


def test_where_it_is_dark_the_page_is_and_every_curve_and_word_stands_out(browser: Any, page: Path) -> None:
    visit(browser, page)
    assert [ink.upper() for ink in browser.execute_script(INKS)] == list(styles.COLOURS)  # as in the pictures
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        (ground,) = computed(browser, "html", "backgroundColor")
        inks = browser.execute_script(INKS)
        assert luminance(ground) < 0.02 and len(set(inks)) == 8
        assert all(contrast(ink, ground) >= 4 for ink in inks)
        words = computed(browser, "p, th, td, figcaption, pre", "color")
        words |= computed(browser, ".drawn svg text", "fill")
        stripes = computed(browser, "tbody tr, pre", "backgroundColor")
        assert all(contrast(word, below) >= 4.5 for word in words for below in (ground, *stripes))
        lines = computed(browser, ".drawn .mark-line path", "stroke")
        assert len(lines) >= 4 and all(contrast(line, ground) >= 4 for line in lines)
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_hostile_names_are_shown_and_do_nothing(opened: Any) -> None:
    assert opened.title == "posbench: fake"
    assert opened.find_elements("css selector", "img") == []
    assert len(opened.find_elements("css selector", "script")) == 2
    label = next(text for text in dots(opened) if "onerror" in text and "windowed" not in text)
    assert PAYLOAD in label
    assert any(PAYLOAD in text for text in all_texts(opened, "details pre"))
    assert "49" not in label  # {{7*7}} was not evaluated


def test_every_run_shows_its_command_and_configuration(opened: Any) -> None:
    runs = opened.find_elements("css selector", "details")
    assert len(runs) == 10
    rope = next(run for run in runs if "rope" in run.text)  # the hostile run has another command
    rope.find_element("css selector", "summary").click()
    text = rope.text
    assert "posbench train encoding=" in text and "train_length: 64" in text and "torch 2.13.0" in text


@pytest.mark.full
def test_the_policy_refuses_a_script_that_is_not_ours(opened: Any) -> None:
    opened.execute_script(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s);"
        "const b = document.createElement('b'); b.setAttribute('onclick', 'document.title = 1'); b.click();"
    )
    assert opened.title == "posbench: fake"
    assert any("Content Security Policy" in entry["message"] for entry in opened.get_log("browser"))
