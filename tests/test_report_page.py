"""The HTML report in a real browser: it is clicked, it asks for nothing from the network, and no name in it runs."""

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, template = tmp_path_factory.mktemp("outputs") / "fake", demo_config()
    write_study(folder, template, {name: SCHEMES[name] for name in ("rope", "alibi", "sinusoidal", "learned")}, seeds=2)
    hostile = {"command": PAYLOAD, "data": {"sha256": "c0ffee" + "0" * 58, "split": "document", "name": PAYLOAD}}
    write_run(folder, configured(template, "alibi", 0, note=PAYLOAD), SCHEMES["alibi"], **hostile)
    write_run(folder, configured(template, "none", 0), None, "failed", reason="diverged", message=PAYLOAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda group, summaries, folder: [])
        report.main([folder])
    return folder / "report" / "index.html"


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda group, summaries, folder: [])
        report.main([folder])
    return folder / "report" / "index.html"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a task: one scheme learns, of one some seeds do, one has not learned, one ends where trained."""
    folder, config = tmp_path_factory.mktemp("outputs") / "fake", task_config(demo_config(), PAYLOAD)
    for seed in range(3):
        write_task_run(folder, config, "alibi", seed, Skill(1.0, (1.0, 0.9, 0.8 + 0.02 * seed, 0.7, 0.6)))
        write_task_run(folder, config, "rope", seed, Skill(1.0 if seed else 0.6, (0.5, 0.4, 0.3, 0.2, 0.1)))
        write_task_run(folder, config, "none", seed, Skill(0.82, steps=None))
        write_task_run(folder, config, "learned", seed, Skill(1.0, ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_figure, "save", lambda group, found, folder: [])
        report.main([folder])
    return folder / "report" / "index.html"


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    for kind in ("performance", "browser"):
        browser.get_log(kind)  # forget what came before
    browser.get(page.as_uri())
    return browser


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


def test_the_page_asks_for_nothing_but_itself(opened: Any, page: Path) -> None:
    click(opened, ".view", "rise against 1x")
    messages = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked == [page.as_uri()]


def test_the_browser_has_nothing_to_complain_about(opened: Any) -> None:
    click(opened, ".legend button", "sinusoidal")
    assert opened.get_log("browser") == []  # no script error, nothing refused by the policy


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


def test_a_click_in_the_legend_takes_a_curve_away_and_brings_it_back(opened: Any) -> None:
    def drawn() -> list[str]:
        return [str(e.get_attribute("data-label")) for e in opened.find_elements("css selector", "svg g.series")]

    assert "sinusoidal" in drawn()
    button = click(opened, ".legend button", "sinusoidal")
    assert "sinusoidal" not in drawn() and "rope" in drawn()
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert "sinusoidal" in drawn()


def test_only_the_references_windowed_curve_is_on_at_first(opened: Any) -> None:
    drawn = [e.get_attribute("data-label") for e in opened.find_elements("css selector", "svg g.series")]
    assert [label for label in drawn if label.endswith("windowed")] == ["rope, windowed"]


def test_the_rise_starts_at_zero_for_every_scheme(opened: Any) -> None:
    click(opened, ".view", "rise against 1x")
    starts = opened.execute_script(
        "return [...document.querySelectorAll('g.series path.curve')].map(e => e.getAttribute('d').split('L')[0])"
    )
    assert len(starts) >= 4 and len(set(starts)) == 1


def test_an_undefined_scheme_ends_at_a_stop_sign(opened: Any) -> None:
    titles = [e.get_attribute("textContent") for e in opened.find_elements("css selector", "svg g.end title")]
    assert titles == ["learned: undefined from 2x"]
    click(opened, ".legend button", "learned")
    assert opened.find_elements("css selector", "svg g.end") == []


def boxes(browser: Any, css: str) -> list[dict[str, float]]:
    script = f"return [...document.querySelectorAll({css!r})].map(e => e.getBoundingClientRect().toJSON())"
    return list(browser.execute_script(script))


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(
        one[low] < other[high] and other[low] < one[high] for low, high in (("left", "right"), ("top", "bottom"))
    )


@pytest.mark.full
def test_many_curves_have_no_bands_until_few_are_left_and_what_is_off_is_folded(browser: Any, many: Path) -> None:
    browser.get(many.as_uri())
    on = browser.find_elements("css selector", ".legend .row > button[aria-pressed=true]")
    assert len(on) > 8 and browser.find_elements("css selector", "path.band") == []
    folded = browser.find_elements("css selector", ".legend details:not([open]) button")
    assert len(folded) == 9 and {button.get_attribute("aria-pressed") for button in folded} == {"false"}
    click(browser, ".view", "rise against 1x")
    for button in on[:6]:
        button.click()
    assert 0 < len(browser.find_elements("css selector", "path.band")) <= 8


def test_names_of_variants_stay_apart_on_a_phone_and_wide_tables_say_so(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "save", lambda group, summaries, folder: [])
    for base in (10000, 100000, 1000000):
        config = configured(demo_config(), "rope", 0, base=base, another_long_option=base)
        write_run(tmp_path / "fake", config, SCHEMES["rope"])
    report.main([tmp_path / "fake"])
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        browser.get((tmp_path / "fake" / "report" / "index.html").as_uri())
        names = [e.text for e in browser.find_elements("css selector", "g.name text")]
        assert len(names) == 4 and len(set(names)) == 4
        wide = browser.execute_script("return document.querySelectorAll('.wide.more').length")
        assert wide >= 2
        browser.execute_script("for (const one of document.querySelectorAll('.scroll')) one.scrollLeft = 9999")
        script = "return document.querySelectorAll('.wide.more').length"
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(browser, 5).until(lambda there: there.execute_script(script) == 0)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.full
@pytest.mark.parametrize("view", ["level", "rise against 1x"])
def test_names_and_stop_signs_lie_within_the_chart_and_on_nothing_else(browser: Any, many: Path, view: str) -> None:
    browser.get(many.as_uri())
    click(browser, ".view", view)
    (chart,) = boxes(browser, "figure.chart > svg")
    names, signs = boxes(browser, "g.name text"), boxes(browser, "g.end path.stop")
    (panel,) = boxes(browser, "figure.chart > svg > svg")
    assert len(names) == 11 and len(signs) == 3
    assert not any(overlap(one, other) for one, other in itertools.combinations(names, 2))
    assert not any(overlap(one, other) for one, other in itertools.combinations(signs, 2))
    assert all(panel["right"] < name["left"] and name["right"] <= chart["right"] for name in names)
    assert all(chart["top"] <= name["top"] and name["bottom"] <= chart["bottom"] for name in names)
    assert sum("index \u2191 " in text for text in all_texts(browser, "g.name text")) == 1


def test_a_click_on_a_family_takes_all_of_it_away(browser: Any, many: Path) -> None:
    browser.get(many.as_uri())
    button = click(browser, ".legend .family", "scores")

    def drawn() -> set[str]:
        return {str(e.get_attribute("data-label")) for e in browser.find_elements("css selector", "svg g.series")}

    assert not {"alibi", "t5", "fox"} & drawn() and "sinusoidal" in drawn()
    button.click()
    assert {"alibi", "t5", "fox"} <= drawn()


def test_pointing_at_a_curve_reads_its_value(opened: Any) -> None:
    from selenium.webdriver import ActionChains

    spot = opened.find_elements("css selector", "g.series[data-label=sinusoidal] path.point")[-1]
    ActionChains(opened).move_to_element(spot).perform()
    readout = opened.find_element("css selector", ".readout").text
    assert readout.startswith("sinusoidal at 1024 tokens (16x): 5.") and "95 %" in readout


@pytest.mark.full
def test_a_task_shows_every_seed_and_what_has_not_learned_is_hollow(browser: Any, tasks: Path) -> None:
    browser.get_log("browser")
    browser.get(tasks.as_uri())
    lines = "return [...document.querySelectorAll('g.series')].map(g => [g.dataset.label, g.querySelectorAll('.curve')"
    dots = "[...g.querySelectorAll('path:not(.curve)')].map(p => p.getAttribute('fill') !== 'var(--page)')"
    drawn = {label: (n, seeds) for label, n, seeds in browser.execute_script(f"{lines}.length, {dots}])")}
    assert {label: n for label, (n, _) in drawn.items()} == {
        "alibi": 1,
        "rope": 1,
        "none, not learned": 0,
        "learned": 1,
    }
    filled = {label: (sum(seeds), len(seeds)) for label, (_, seeds) in drawn.items()}
    assert filled == {"alibi": (24, 24), "rope": (16, 24), "none, not learned": (0, 24), "learned": (9, 9)}
    assert "answer tokens right, %" in all_texts(browser, "svg text")
    click(browser, ".view", "whole answers")
    assert "whole answers right, %" in all_texts(browser, "svg text")
    click(browser, ".legend button", "alibi")
    assert "alibi" not in [
        str(e.get_attribute("data-label")) for e in browser.find_elements("css selector", "g.series")
    ]
    assert len(browser.find_elements("css selector", ".stop")) == 1
    tops = "return [...document.querySelectorAll('g.name text')].map(e => e.getBoundingClientRect().top)"
    heights = sorted(browser.execute_script(tops))
    assert all(below - above >= 12 for above, below in itertools.pairwise(heights))
    assert browser.title != "pwned" and browser.get_log("browser") == []


def test_text_among_numbers_stands_where_they_stand(opened: Any) -> None:
    script = """return [...document.querySelectorAll("td")].filter(e => e.textContent === "undefined")
        .map(e => getComputedStyle(e).textAlign)"""
    assert set(opened.execute_script(script)) == {"right"}


def texts_of_the_chart(browser: Any) -> list[dict[str, Any]]:
    """Words, box and size in pixels of every text."""
    script = """return [...document.querySelectorAll("figure.chart > svg text")].map(e => {
        const scale = e.ownerSVGElement.clientWidth / e.ownerSVGElement.viewBox.baseVal.width;
        return {words: e.textContent, box: e.getBoundingClientRect().toJSON(),
                size: parseFloat(getComputedStyle(e).fontSize) * scale};})"""
    return list(browser.execute_script(script))


def test_the_chart_follows_the_window(browser: Any, many: Path) -> None:
    browser.get(many.as_uri())
    widths = []
    for width in (1280, 800, 1280):
        browser.set_window_size(width, 1000)
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        (chart,) = boxes(browser, "figure.chart > svg")
        widths.append(chart["width"])
        assert all(abs(text["size"] - 12.5) < 1 for text in texts_of_the_chart(browser))
        assert max(name["right"] for name in boxes(browser, "g.name text")) <= chart["right"]
    assert widths[0] == widths[2] > 1.3 * widths[1]


@pytest.fixture
def phone(browser: Any) -> Iterator[Any]:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    yield browser
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("view", ["level", "rise against 1x"])
def test_on_a_phone_every_label_is_readable_and_lies_on_nothing_else(phone: Any, many: Path, view: str) -> None:
    phone.get(many.as_uri())
    click(phone, ".view", view)
    assert phone.execute_script("return document.documentElement.scrollWidth") == 390
    texts = texts_of_the_chart(phone)
    assert len(texts) > 20 and min(text["size"] for text in texts) >= 11
    (chart,) = boxes(phone, "figure.chart > svg")
    assert all(text["box"]["right"] <= chart["right"] and text["box"]["left"] >= chart["left"] for text in texts)
    apart = [text["box"] for text in texts if text["words"] != "trained at 64"]  # which stands on the grid
    assert not any(overlap(one, other) for one, other in itertools.combinations(apart, 2))


def test_on_a_phone_a_wide_table_scrolls_under_the_names_of_its_rows(phone: Any, page: Path) -> None:
    phone.get(page.as_uri())
    before, after = phone.execute_script("""
        const table = document.querySelector(".scroll"), left = e => e.getBoundingClientRect().left;
        const all = () => [table.querySelector("tbody th"), table.querySelector("tbody td:last-child")].map(left);
        const before = all();
        table.scrollLeft = 200;
        return [before, all()];""")
    assert after[0] == before[0] and after[1] < before[1] - 100


def test_a_tap_and_a_drag_read_the_curve(phone: Any, page: Path) -> None:
    phone.get(page.as_uri())
    phone.execute_script("document.querySelector('figure.chart > svg').scrollIntoView({block: 'center'})")
    places = boxes(phone, "g.series[data-label=sinusoidal] path.point")
    at = [{"x": place["left"] + 12, "y": place["top"] - 4} for place in places]  # a finger is not exact

    def touch(kind: str, points: list[dict[str, float]]) -> str:
        phone.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        return str(phone.find_element("css selector", ".readout").text)

    assert touch("touchStart", [at[2]]).startswith("sinusoidal at 256 tokens (4x)")
    assert touch("touchMove", [at[3]]).startswith("sinusoidal at 512 tokens (8x)")
    assert touch("touchEnd", []).startswith("sinusoidal at 512")  # it stays to be read
    assert phone.find_element("css selector", "circle.here").get_attribute("visibility") == "visible"


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
    browser.get(page.as_uri())
    assert [ink.upper() for ink in browser.execute_script(INKS)] == list(styles.COLOURS)  # as in the pictures
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        (ground,) = computed(browser, "html", "backgroundColor")
        inks = browser.execute_script(INKS)
        assert luminance(ground) < 0.02 and len(set(inks)) == 8
        assert all(contrast(ink, ground) >= 4 for ink in inks)
        words = computed(browser, "p, th, td, figcaption, pre, .legend button", "color")
        words |= computed(browser, "svg text", "fill")
        stripes = computed(browser, "tbody tr, pre", "backgroundColor")
        assert all(contrast(word, below) >= 4.5 for word in words for below in (ground, *stripes))
        lines = computed(browser, "g.series path.curve", "stroke")
        assert len(lines) >= 4 and all(contrast(line, ground) >= 4 for line in lines)
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_hostile_names_are_shown_and_do_nothing(opened: Any) -> None:
    assert opened.title == "posbench: fake"
    assert opened.find_elements("css selector", "img") == []
    assert len(opened.find_elements("css selector", "script")) == 2
    label = next(text for text in all_texts(opened, ".legend button") if "onerror" in text and "windowed" not in text)
    assert label.endswith(PAYLOAD)
    assert any(PAYLOAD in text for text in all_texts(opened, "details pre"))
    assert "49" not in label  # {{7*7}} was not evaluated


def test_every_run_shows_its_command_and_configuration(opened: Any) -> None:
    runs = opened.find_elements("css selector", "details")
    assert len(runs) == 10
    runs[0].find_element("css selector", "summary").click()
    text = runs[0].text
    assert "posbench train encoding=" in text and "train_length: 64" in text and "torch 2.13.0" in text


def test_properties_of_the_schemes_are_on_the_page(opened: Any) -> None:
    assert "Measured properties" in all_texts(opened, "h3")


@pytest.mark.full
def test_the_policy_refuses_a_script_that_is_not_ours(opened: Any) -> None:
    opened.execute_script(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s);"
        "const b = document.createElement('b'); b.setAttribute('onclick', 'document.title = 1'); b.click();"
    )
    assert opened.title == "posbench: fake"
    assert any("Content Security Policy" in entry["message"] for entry in opened.get_log("browser"))
