"""`pw top` against a served fake engine: one look, a server that is gone, keys."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rich.console import Console

from pw.cli import main
from pw.cli.top import View, curve, render
from pw.config import format_bytes
from pw.engine.request import EngineStatus
from pw.serving.context import ServingConfig
from support.patience import PATIENCE
from tests.serving.conftest import Served, serving
from tests.serving.show_dashboard import MovingEngine


def top(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["top", *arguments])
    return int(stop.value.code or 0)


def show(view: View, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(view, width))
    return capture.get()


def test_one_look(capsys: pytest.CaptureFixture[str]) -> None:
    engine = MovingEngine(4, 8)
    engine.second = 30.0
    with serving(engine) as served:
        assert top("--url", served.url, "--once") == 0
        text = capsys.readouterr().out
        assert top("--url", served.url, "--json") == 0
        status = json.loads(capsys.readouterr().out)
    assert text.startswith("PagedWeight fake  adaptive  ready")
    assert re.search(rf"mean bits +{status['mean_bits']:.2f}", text)
    assert re.search(r"running +23 +7 waiting", text)
    for layer, bits in status["layer_bits"].items():
        assert re.search(rf"\b{layer} . {bits:.2f}", text)
    kv = f"KV cache {format_bytes(status['bytes']['kv'])}"
    assert kv.replace(" ", "\N{NO-BREAK SPACE}") in text
    assert "no requests now" in text


def test_the_bar_is_as_wide_as_the_screen_and_in_proportion() -> None:
    engine = MovingEngine(48, 128)
    with serving(engine) as served, httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
        view = View(served.url)
        view.look(client)
        lines = show(view, 100).splitlines()
        bar = next(line for line in lines if "████" in line and "mean" not in line)
        held = view.status["bytes"]
        assert len(bar) == 100
        assert bar.count("·") == pytest.approx(100 * held["free"] / held["budget"], abs=1)
        assert max(map(len, lines)) <= 100
        assert sum(line.count(" 6.00") for line in lines) == 49  # 48 layers and their mean


class SharedEngine(MovingEngine):
    """Two ranks, of which the second holds fewer dense weights."""

    def status(self) -> EngineStatus:
        status = super().status()
        second = replace(status.bytes, dense=3 << 20, host=5 << 30)
        return replace(status, ranks=(status.bytes, second))


def test_every_rank_has_a_line() -> None:
    with (
        serving(SharedEngine(2, 4)) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE) as client,
    ):
        view = View(served.url)
        view.look(client)
    first, second = view.status["ranks"]
    assert first["dense"] == view.status["bytes"]["dense"] != second["dense"]
    text = show(view)
    assert f"memory, {format_bytes(first['budget'])} on each of 2 ranks" in text
    assert f"rank 0: dense weights {format_bytes(first['dense'])}" in text
    assert "rank 1: dense weights 3.00 MiB, planes on the host 5.00 GiB" in text


def test_requests_are_listed() -> None:
    prompt = f"1 {MovingEngine.HOLD}"
    with (
        serving(MovingEngine(2, 4)) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE) as client,
    ):
        stream = served.openai.completions.create(model="fake", prompt=prompt, stream=True)
        first = next(stream)
        view = View(served.url)
        view.look(client)
        stream.close()
    line = next(line for line in show(view, 140).splitlines() if first.id in line)
    assert re.search(r"running +2 +\d+ +\d\.\d\d s +\d+\.\d s +5\.50", line)


@pytest.mark.parametrize("width", [80, 130, 200])
def test_no_line_is_broken_at_any_width(width: int) -> None:
    engine = MovingEngine(24, 60)
    engine.second = 30.0
    with serving(engine) as served, httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
        stream = served.openai.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": str(MovingEngine.HOLD)}],
            stream=True,
        )
        next(stream)
        view = View(served.url)
        view.samples = [sample_of(served)] * 60
        view.look(client)
        stream.close()
    lines = show(view, width).splitlines()
    assert max(map(len, lines)) <= width
    for piece in (
        r"mean bits +\d\.\d\d ",
        r"generating +[\d,]+ tokens/s ",
        r"reading prompts +[\d,]+ tokens/s ",
        r"finished +90 +0 failed, 0 preempted, 0 bytes over budget",
        r"chatcmpl-[0-9a-f]{8,}.* running +1 ",
    ):
        assert sum(bool(re.search(piece, line)) for line in lines) == 1, piece


def sample_of(served: Served) -> dict[str, Any]:
    """A second at full load, as the timeline tells it."""
    sample: dict[str, Any] = served.http.get("/v1/pw/timeline").json()["samples"][-1]
    return sample | {"generation_tokens_per_second": 99999.0, "number": -1}


def test_a_server_that_goes_away_leaves_the_last_picture() -> None:
    with (
        serving(MovingEngine(2, 4)) as served,
        httpx.Client(base_url=served.url, timeout=PATIENCE) as client,
    ):
        view = View(served.url)
        view.look(client)
        before = view.status
    with httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
        view.look(client)
    assert view.status is before
    text = show(view)
    assert f"{served.url} does not answer" in text.replace("\n", "")
    assert "mean bits" in text


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert top("--url", url, "--once") == 1
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith(f"error: {url} does not answer: ")
    assert "--url" in error[1]
    assert len(error) == 2


def test_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(MovingEngine(2, 4), config=ServingConfig(("fake",), api_keys=("k",))) as served:
        assert top("--url", served.url, "--once") == 1
        error = capsys.readouterr().err
        assert "the server needs an API key" in error
        assert "PW_API_KEY" in error
        assert top("--url", served.url, "--once", "--api-key", "x") == 1
        assert "the server does not know this key" in capsys.readouterr().err
        monkeypatch.setenv("PW_API_KEY", "k")
        assert top("--url", served.url, "--once") == 0


def test_curves() -> None:
    assert curve([]) == ""
    assert curve([0, 0]) == "  "
    assert curve([0, 4, 8]) == " ▄█"
    assert curve([2, 4], top=8) == "▂▄"
    assert len(curve([1.0] * 60)) == 30
