"""A real headless browser for the tests of the live page; they are skipped where there is none."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from support.patience import PATIENCE

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs Debian's chromium and chromium-driver"
)
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--window-size=1440,1400"),
]


class Page:
    """The page in a browser, and the server behind it."""

    def __init__(self, driver: Any, url: str, engine: Any = None, app: Any = None) -> None:
        self.driver, self.url, self.engine, self.app = driver, url, engine, app

    def js(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def text(self, element: str) -> str:
        return str(self.js(f"return document.getElementById('{element}').textContent"))

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < deadline, (
                f"{what}; page: {self.js('return document.body.innerText')}"
            )
            time.sleep(0.1)
        return found

    def wait_for(self, element: str, pattern: str) -> None:
        self.wait(lambda: re.search(pattern, self.text(element)), f"{element}: {pattern}")

    def colour_at(self, canvas: str, x: float, y: float) -> list[int]:
        """Red, green, blue of a pixel, in CSS pixels."""
        pixel = self.js(
            f"const c = document.querySelector('{canvas}'), r = devicePixelRatio;"
            f"return [...c.getContext('2d').getImageData({x} * r, {y} * r, 1, 1).data]"
        )
        return list(pixel)[:3]

    def theme(self, name: str) -> list[int]:
        """A colour of the theme."""
        value = self.js(
            f"return getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()"
        )
        digits = value.lstrip("#")
        digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
        return [int(digits[i : i + 2], 16) for i in (0, 2, 4)]

    def set_scheme(self, scheme: str) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )

    def complaints(self) -> list[str]:
        """Errors of the console: scripts that fail, what the content security policy refuses.

        What another server's page left in the log of the same browser does not count.
        """
        host = self.js("return location.host")
        return [
            str(entry)
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE" and host in entry["message"]
        ]


@contextmanager
def served(app: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    browser = webdriver.Chrome(options=options, service=service)
    yield browser
    browser.quit()
