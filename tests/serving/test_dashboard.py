"""The live page: its files and headers, and the page itself in a real headless browser.

The browser tests are skipped where no Chromium is installed. They look at what a reader would see:
texts, the bar's proportions, colours of single squares of the maps.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from pw.serving.operations.page import page_paths
from support.patience import PATIENCE, get
from tests.serving.browser import Page, needs_browser, served
from tests.serving.conftest import abandoned
from tests.serving.show_dashboard import KINDS, PAGE, MovingEngine, moving_app


@contextmanager
def opened(
    driver: Any, layers: int, experts: int, second: float = 30.0, keys: tuple[str, ...] = ()
) -> Iterator[Page]:
    engine = MovingEngine(layers, experts)
    app = moving_app(engine, seconds=200, keys=keys)
    engine.second = second
    with served(app) as url:
        page = Page(driver, url, engine, app)
        page.set_scheme("light")
        driver.get(url)
        if not keys:
            page.wait_for("state", "ready")
        yield page
        driver.get("about:blank")


def test_files_and_their_headers() -> None:
    with served(moving_app(MovingEngine(1, 2), seconds=0, keys=("secret",))) as url:
        paths = page_paths()
        assert {"/", "/dashboard/main.js", "/dashboard/style.css"} <= paths
        for path in paths:
            answer = get(url + path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            tag = answer.headers["etag"]
            assert get(url + path, headers={"if-none-match": tag}).status_code == 304
        types = {path.rpartition(".")[2]: get(url + path).headers["content-type"] for path in paths}
        assert types["js"].startswith("text/javascript")
        assert types["css"].startswith("text/css")
        for path in (
            "/dashboard/none.js",
            "/dashboard/..%2f..%2f..%2fpyproject.toml",
            "/dashboard/",
        ):
            assert get(url + path).status_code == 401  # as every path that is not a file's


def test_the_page_asks_nobody_else() -> None:
    folder = Path(__file__).parents[2] / "pw" / "serving" / "operations" / "dashboard"
    for file in folder.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, file
        assert "https:" not in text, file
        assert "innerHTML" not in text, file
        assert not re.search(r"\son\w+=|<style|style=", text) or file.suffix != ".html", file


@needs_browser
def test_figures_and_maps_are_those_of_the_engine(driver: Any) -> None:
    with opened(driver, 4, 8) as page:
        status = page.engine.status()
        assert page.text("model") == "Qwen1.5-MoE-A2.7B"
        assert page.text("bits") == f"{status.mean_bits:.2f}"
        assert page.text("running") == f"{status.running} running  {status.waiting} waiting"
        assert page.text("over") == "0 B"
        shares = page.js(
            "return [...document.getElementById('bar').children]"
            ".map((piece) => [piece.className, parseFloat(piece.style.width)])"
        )
        held = status.bytes
        assert dict(shares)["kv"] == pytest.approx(100 * held.kv / held.budget, abs=0.01)
        assert sum(share for _, share in shares) == pytest.approx(100, abs=0.01)
        bits, kinds = page.engine.at(30.0)
        page.wait(
            lambda: page.js("return document.querySelectorAll('[data-map]').length == 3"), "maps"
        )
        columns = page.js("return document.querySelector('[data-map=gate_up]').style.width")
        cell = (float(columns.removesuffix("px")) - 34 - 44) / 8
        for layer, expert in ((0, 0), (0, 5), (2, 0), (3, 7)):
            for module, name in enumerate(("gate_up", "down")):
                place = (34 + (expert + 0.5) * cell, 16 + (layer + 0.5) * min(22, cell))
                width = bits[layer, expert, module]
                assert page.colour_at(f"[data-map={name}]", *place) == page.theme(f"bit{width}")
            times = 8 * page.engine.mass[layer, expert].round(4)  # an equal share
            step = min(8, max(2, round(5 + 1.5 * math.log2(times))))
            assert page.colour_at("[data-map=mass]", *place) == page.theme(f"bit{step}")
        words = {"K": "kv", "L": "lut", **{str(plane): f"bit{plane + 1}" for plane in range(6)}}
        width = float(
            page.js("return document.getElementById('pages').style.width").removesuffix("px")
        )
        size = min(20, int((width * 240 / len(kinds)) ** 0.5))
        for number in (0, 1, 60, 61, 62, 100):
            kind = KINDS[kinds[number]]
            row, column = divmod(number, int(width // size))
            seen = page.colour_at("#pages", (column + 0.4) * size, (row + 0.4) * size)
            assert kind == "F" or seen == page.theme(words[kind]), number
        assert str(len(kinds)) in page.text("pages-text")
        assert page.complaints() == []


@needs_browser
def test_it_follows_the_engine_and_the_theme(driver: Any) -> None:
    with opened(driver, 4, 8) as page:
        before = page.text("bits")
        page.engine.second = 100.0  # the squeeze is over
        page.wait_for("bits", r"6\.00")
        assert before != "6.00"
        page.wait(lambda: page.text("map-legend") == "6 bits 64 blocks", "legend")
        light = page.theme("panel")
        page.set_scheme("dark")
        page.wait(lambda: page.theme("panel") != light, "dark panel")
        page.wait(
            lambda: page.colour_at("[data-map=down]", 40, 24) == page.theme("bit6"), "dark map"
        )
        points = page.js(
            "return document.querySelectorAll('[data-chart] polygon, [data-chart] polyline').length"
        )
        assert points == 7
        assert page.js("return document.querySelectorAll('[data-plan=kv_pressure]').length") > 10
        assert page.complaints() == []


@needs_browser
def test_a_large_model_fits_the_window(driver: Any) -> None:
    with opened(driver, 48, 128, second=37.0) as page:
        page.wait(
            lambda: page.js("return document.querySelectorAll('[data-map]').length == 2"), "maps"
        )
        assert page.js("return document.documentElement.scrollWidth <= innerWidth")
        bits, _ = page.engine.at(37.0)
        for layer, expert in ((0, 0), (47, 127), (20, 64)):
            place = (34 + expert * 4 + 2, 16 + layer * 8 + 3)
            assert page.colour_at("[data-map=gate_up]", *place) == page.theme(
                f"bit{bits[layer, expert, 0]}"
            )
        driver.find_element("css selector", "[data-view=routing]").click()
        page.wait(lambda: page.js("return !!document.querySelector('[data-map=mass]')"), "routing")
        assert "equal share" in page.text("map-legend")
        assert "129,024 of 16.0 KiB, 32 a square" in page.text("pages-text")
        assert len(page.js("return document.getElementById('plans').children")) == 12
        hover = page.js(
            "const c = document.querySelector('[data-map=mass]'), b = c.getBoundingClientRect();"
            "const cell = (b.width - 34 - 44) / 128;"
            "c.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + 34 + 3.5 * cell,"
            "clientY: b.top + 18})); return document.getElementById('tip').textContent"
        )
        gate_up, down = bits[0, 3]
        mass = 100 * page.engine.mass[0, 3].round(4)
        assert hover == (
            f"layer 0, expert 3\ngate_up {gate_up} bits, down {down} bits\nrouting {mass:.2f} %"
        )
        assert page.complaints() == []


@needs_browser
def test_policies_without_widths_or_without_routing(driver: Any) -> None:
    with opened(driver, 2, 4) as page:
        whole = page.engine.precision_map

        async def unrouted() -> dict[str, Any]:
            told = await whole()
            return told | {"layers": [layer | {"mass": None} for layer in told["layers"]]}

        async def unquantized() -> dict[str, Any]:
            return (await whole()) | {"layers": []}

        maps = "return document.querySelectorAll('[data-map]').length"
        page.wait(lambda: page.js(maps) == 3, "three maps")
        page.engine.precision_map = unrouted
        page.wait(lambda: page.js(maps) == 2, "two maps")
        page.engine.precision_map = unquantized
        page.wait(lambda: page.js(maps) == 0, "no map")
        assert "unquantized" in page.text("map-text")
        assert page.complaints() == []


@needs_browser
def test_requests_come_and_go(driver: Any) -> None:
    with opened(driver, 2, 4) as page:
        page.wait_for("requests", "none now")
        with abandoned(page.url, "/v1/completions", {"prompt": f"1 2 {MovingEngine.HOLD}"}):
            page.wait_for("requests", r"running33\d+ ms|running33\d+\.\d s")
        page.wait_for("requests", "none now")
        assert page.complaints() == []


@needs_browser
def test_a_key_is_asked_for_and_kept_in_this_tab_only(driver: Any) -> None:
    with opened(driver, 2, 4, keys=("correct horse",)) as page:
        page.wait_for("state", "key needed")
        assert not page.js("return document.getElementById('main').checkVisibility()")

        def give(key: str) -> None:
            field = driver.find_element("id", "key")
            field.send_keys(key)
            driver.find_element("css selector", "#key-form button").click()

        give("wrong")
        page.wait_for("key-text", "does not know this key")
        give("correct horse")
        page.wait_for("state", "ready")
        assert page.js("return Object.values(sessionStorage)") == ["correct horse"]
        assert page.js("return localStorage.length + document.cookie.length") == 0
        assert "correct horse" not in driver.page_source
        driver.refresh()
        page.wait_for("state", "ready")
        driver.find_element("id", "forget").click()
        page.wait_for("state", "key needed")
        assert page.js("return sessionStorage.length") == 0


@needs_browser
def test_it_says_what_is_wrong(driver: Any) -> None:
    with opened(driver, 2, 4) as page:
        page.app.state.context.gate.draining = True
        page.wait_for("state", "draining")
        page.app.state.context.gate.draining = False
        page.wait_for("state", "ready")
        page.engine.alive, page.engine.failed = False, True
        page.wait_for("state", "engine failed")
        assert "restart the server" in page.text("notice")
        assert page.text("bits") == f"{page.engine.status().mean_bits:.2f}"  # its last state
        page.engine.alive, page.engine.failed = True, False
        page.wait_for("state", "ready")
        assert page.text("notice") == ""


@needs_browser
def test_a_server_that_is_gone_and_comes_back(driver: Any) -> None:
    engine = MovingEngine(2, 4)
    app = moving_app(engine, seconds=5)
    with served(app) as url:
        driver.get(url)
        page = Page(driver, url, engine, app)
        page.wait_for("state", "ready")
    page.wait_for("state", "not reachable")
    assert "last seen" in page.text("notice")
    assert page.text("model") == "Qwen1.5-MoE-A2.7B"
    config = uvicorn.Config(
        moving_app(engine, seconds=5), port=int(url.rpartition(":")[2]), log_config=None, ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    page.wait_for("state", "ready")
    server.should_exit = True
    thread.join(PATIENCE)
    driver.get("about:blank")


def test_the_fake_adds_up() -> None:
    engine = MovingEngine(3, 5)
    for second in (0.0, 20.0, 37.5, 70.0):
        engine.second = second
        status = engine.status()
        assert status.pages_weights + status.pages_kv + status.pages_free == status.pages_total
        assert status.bytes.total == status.bytes.budget
        assert status.bytes.kv == status.pages_kv * PAGE
