"""nginx by prefix instead of by load: equal beginnings meet, a session's header comes first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.patience import PATIENCE
from tests.deploy import test_deployment as deployment
from tests.serving.fakes import FakeEngine

balanced = deployment.balanced
PREFIX = {number: f"{number} " + "1 " * 600 for number in range(24)}


@pytest.fixture
def by_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration as its comment says to change it."""
    text = (deployment.DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    line = "hash $pagedweight_key consistent;"
    assert f"#     {line}\n" in text
    assert text.count("    least_conn;\n") == 1
    folder = tmp_path / "deploy"
    folder.mkdir()
    (folder / "nginx.conf").write_text(text.replace("    least_conn;\n", f"    {line}\n"))
    monkeypatch.setattr(deployment, "DEPLOY", folder)


def ask(url: str, prompt: str, **headers: str) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 1}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)


def served(engine: FakeEngine) -> int:
    return len(engine.calls)


@deployment.needs_nginx
@pytest.mark.usefixtures("by_prefix")
def test_equal_beginnings_meet_at_one_server(balanced: Callable[..., Any]) -> None:
    with balanced() as (url, one, _):
        homes = []
        for prefix in PREFIX.values():
            before = served(one.engine)
            answers = [ask(url, prefix + f"{turn} " * 9).status_code for turn in range(3)]
            assert answers == [200] * 3
            homes.append(served(one.engine) - before)
        assert set(homes) == {0, 3}  # all three here or all three there, and both are used
        before = served(one.engine)
        for prefix in PREFIX.values():
            ask(url, prefix, **{"x-session-id": "mine"})
        assert served(one.engine) - before in (0, len(PREFIX))


@deployment.needs_nginx
@pytest.mark.usefixtures("by_prefix")
def test_a_draining_server_hands_its_prefixes_over(balanced: Callable[..., Any]) -> None:
    with balanced() as (url, one, other):
        one.context.gate.draining = True
        assert [ask(url, prefix).status_code for prefix in PREFIX.values()] == [200] * len(PREFIX)
        assert (served(one.engine), served(other.engine)) == (0, len(PREFIX))
