"""The live page over a real engine under a real squeeze, in a real browser."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from pw.engine import AsyncEngine
from pw.engine.request import SamplingParams
from pw.serving.context import ServingConfig
from support.engines import make_artifact, open_engine, random_prompt, tight_budget
from support.patience import PATIENCE
from tests.serving.browser import Page, needs_browser
from tests.serving.conftest import serving
from tests.serving.show_dashboard import MovingEngine


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboard")
    return make_artifact("qwen2_moe", folder, num_attention_heads=2)[1]


def shape(value: Any) -> Any:
    """Keys and types, as deep as they go; of lists the first entry."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    return [shape(value[0])] if isinstance(value, list) else type(value)


def test_the_fake_says_what_the_engine_says(artifact: Path) -> None:
    budget = tight_budget(artifact, kv_tokens=80)
    engine = open_engine(artifact, memory_budget=budget, planner_low_watermark=0.01)
    prompts = [random_prompt(150, seed) for seed in range(4)]
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
    fake = MovingEngine(2, 4)
    fake.second = 30.0
    assert shape(asyncio.run(fake.precision_map())) == shape(engine.precision_map())
    plans = engine.status().plan_history
    assert plans
    assert set(fake.status().plan_history[0]) <= set(plans[0])


@needs_browser
def test_a_squeeze_as_it_is_seen(artifact: Path, driver: Any) -> None:
    budget = tight_budget(artifact, kv_tokens=170)
    settings = {"planner_low_watermark": 0.01, "planner_idle_grace_seconds": 2.0}
    engine = open_engine(artifact, memory_budget=budget, **settings)

    seen = threading.Event()

    def load(url: str) -> None:
        for round_ in itertools.count():
            asks = [
                threading.Thread(
                    target=httpx.post,
                    args=(f"{url}/v1/completions",),
                    kwargs={
                        "json": {
                            "prompt": random_prompt(100, 10 * round_ + seed),
                            "max_tokens": 60,
                            "ignore_eos": True,
                        },
                        "timeout": PATIENCE,
                    },
                )
                for seed in range(6)
            ]
            for ask in asks:
                ask.start()
            for ask in asks:
                ask.join()
            if seen.is_set():
                return

    with serving(AsyncEngine(engine), engine.tokenizer, ServingConfig(("real",))) as running:
        driver.get(running.url)
        page = Page(driver, running.url)
        page.wait_for("bits", r"^6\.00$")
        clients = threading.Thread(target=load, args=(running.url,), daemon=True)
        clients.start()
        try:
            page.wait_for("bits", r"^[2-5]\.\d\d$")
            page.wait_for("plans", "kv_pressure|kv_forecast|kv allocation")
            page.wait(lambda: "KV cache" in page.text("bar-legend"), "KV in the legend")
        finally:
            seen.set()
            clients.join(PATIENCE)
        page.wait_for("bits", r"^6\.00$")
        page.wait_for("requests", "none now")
        blocks = engine.status().blocks_by_bits
        page.wait_for("map-legend", f"^6 bits {blocks[6]} blocks$")
        assert page.js("return document.querySelectorAll('[data-plan]').length") > 0
        assert page.text("over") == "0 B"
        assert page.complaints() == []
        driver.get("about:blank")
