"""The report page in a real browser: it renders, says what the trace says, and can be used with a keyboard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import capabilities
from capabilities import need
from nobounce import config
from nobounce.config import Settings
from nobounce.io import hooks
from nobounce.observe import start, traceread
from nobounce.observe.analyse import analyse
from nobounce.observe.html import render

MIB = 1 << 20
LIMITS = {"disk read": 2e9, "host memory": 9e9, "link to device": 20e9, "link from device": 20e9}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    need("chromium", "chromedriver", "selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = capabilities.tool("chromium")
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(capabilities.tool("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A page of a real trace, with a file whose name is markup, and the data in it."""
    import nobounce

    folder = tmp_path_factory.mktemp("page")
    path = folder / "<b onmouseover=alert(1)>weights&.bin"
    path.write_bytes(os.urandom(8 * MIB))
    start.reset()
    config.override(Settings(trace=str(folder / "t.json")))
    hooks.start()
    device = nobounce.Device("sim:0")
    with nobounce.open(path, "r+") as f, device.allocate(8 * MIB) as buffer, device.create_stream() as stream:
        f.read(buffer, require="fallback")
        f.write(buffer, nbytes=5000, file_offset=3)
        for i in range(8):
            f.read_async(buffer, stream=stream, nbytes=MIB, file_offset=i * MIB).result()
        with pytest.raises(nobounce.RouteError):
            f.read(buffer, nbytes=5, require="fastpath")
        with nobounce.Batch() as batch:
            batch.read(f, buffer, file_offsets=[0, 4096, 8192], nbytes=[4096, 100, 4096], cache="avoid")
    start._closers[0].close()  # type: ignore[attr-defined]
    start.reset()
    config.override(None)
    data = analyse(traceread.read(traceread.find(str(folder / "t.json"))), LIMITS)
    page = folder / "page.html"
    page.write_text(render(data, path.name), encoding="utf-8")
    return page, data


def show(browser: Any, page: Path, width: int, scheme: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get(page.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_renders_without_errors_and_fits(
    browser: Any, made: tuple[Path, dict[str, Any]], width: int, scheme: str
) -> None:
    show(browser, made[0], width, scheme)
    assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return document.querySelectorAll('.plot svg').length") >= 6
    wide = "[...document.querySelectorAll('.plot')].filter((p) => p.scrollWidth > p.clientWidth + 1).map((p) => p.id)"
    assert browser.execute_script(f"return {wide}") == []
    left = "[...document.querySelectorAll('.plot svg text')].filter((t) => t.getBoundingClientRect().left < 0).length"
    assert browser.execute_script(f"return {left}") == 0, "labels are cut off"
    back, text = browser.execute_script(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color].map((c) => c.match(/[0-9]+/g).slice(0, 3))"
    )
    assert _contrast(back, text) > 7
    assert (int(back[0]) < 128) == (scheme == "dark")


def _contrast(a: list[str], b: list[str]) -> float:
    def luminance(colour: list[str]) -> float:
        parts = [int(c) / 255 for c in colour]
        r, g, bl = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * bl

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_figures_equal_the_json(browser: Any, made: tuple[Path, dict[str, Any]]) -> None:
    page, data = made
    show(browser, page, 1280, "light")
    shown = json.loads(browser.execute_script("return document.getElementById('data').textContent"))
    assert shown == json.loads(json.dumps(data))
    for name in ("fastpath_bytes", "fallback_bytes", "cached_bytes", "host_traffic_bytes"):
        text = browser.execute_script(f"return document.getElementById('figure-{name}').textContent")
        assert text == f"{data['totals'][name]:,} bytes"
    assert data["totals"]["fastpath_bytes"] > 0
    assert browser.execute_script("return document.querySelectorAll('[data-slice]').length") == len(
        data["slices"]
    )
    assert "agree with the trace" in browser.execute_script(
        "return document.getElementById('notes').textContent"
    )


def test_a_click_on_a_slice_shows_its_receipt(browser: Any, made: tuple[Path, dict[str, Any]]) -> None:
    page, data = made
    show(browser, page, 1280, "light")
    index = next(
        i for i, s in enumerate(data["slices"]) if s["kind"] == "transfer" and s["way"] == "fallback"
    )
    assert not browser.execute_script("return document.getElementById('detail').checkVisibility()")
    slice_ = browser.find_element("css selector", f"[data-slice='{index}']")
    browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", slice_)
    text = browser.find_element("id", "detail").text
    assert "receipt: fallback_bytes" in text
    assert str(data["slices"][index]["args"]["receipt"]["fallback_bytes"]) in text
    assert "<b onmouseover=alert(1)>weights&.bin" in text


def test_a_batch_and_a_refusal_show_what_became_of_them(
    browser: Any, made: tuple[Path, dict[str, Any]]
) -> None:
    page, data = made
    show(browser, page, 400, "dark")
    assert (
        browser.execute_script("return document.getElementById('figure-refused').textContent")
        == "size-align 1"
    )
    for index, said in (
        (next(i for i, s in enumerate(data["slices"]) if s["kind"] == "batch"), "receipt: fastpath_bytes"),
        (next(i for i, s in enumerate(data["slices"]) if "refused" in s["args"]), "size-align"),
    ):
        slice_ = browser.find_element("css selector", f"[data-slice='{index}']")
        browser.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", slice_)
        assert said in browser.find_element("id", "detail").text


def test_the_timeline_is_reached_and_read_by_keyboard(
    browser: Any, made: tuple[Path, dict[str, Any]]
) -> None:
    from selenium.webdriver.common.keys import Keys

    show(browser, made[0], 1280, "dark")
    at = "const s = document.activeElement.dataset.slice; return s === undefined ? null : Number(s)"
    for _ in range(3):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        if browser.execute_script(at) is not None:
            break
    assert browser.execute_script(at) == 0
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert browser.execute_script(at) == 1
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.execute_script("return document.getElementById('detail').checkVisibility()")
    browser.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.execute_script("return document.activeElement.tagName") == "SUMMARY"


def test_names_of_files_are_text_and_nothing_else(browser: Any, made: tuple[Path, dict[str, Any]]) -> None:
    show(browser, made[0], 1280, "light")
    assert browser.execute_script("return document.querySelectorAll('b[onmouseover]').length") == 0
    assert "<b onmouseover=alert(1)>weights&.bin" in browser.execute_script("return document.body.innerText")


def test_a_page_of_nothing_says_so(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "empty.html"
    page.write_text(render(analyse(traceread.Trace(), {}), "nothing"), encoding="utf-8")
    show(browser, page, 400, "light")
    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
    assert "Nothing to show" in browser.execute_script("return document.body.innerText")
