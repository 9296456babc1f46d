"""Log lines: three styles, one handler, fields only where a machine reads."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pw import logs
from pw.cli.runtime import _announce, _show_plan
from pw.engine.request import BytesByClass, EngineStatus


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in logs.PACKAGES}
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, each in levels.items():
        logging.getLogger(name).setLevel(each)


def test_json_lines_have_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logging.INFO, "json")
    assert logs.current() == logs.LogSettings(logging.INFO, "json")
    logging.getLogger("pw.x").info("one %s", "näme\n", extra={"fields": {"tokens": 3}})
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("pw.x").exception("failed")
    logging.getLogger("pw.x").debug("not shown")
    logging.getLogger("other").info("not shown")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert list(first) == ["time", "level", "logger", "message", "tokens"]
    assert (first["level"], first["logger"], first["message"]) == ("info", "pw.x", "one näme\n")
    assert first["tokens"] == 3
    written = datetime.fromisoformat(first["time"])
    assert abs(datetime.now(UTC) - written) < timedelta(minutes=2)
    assert second["level"] == "error"
    assert "KeyError: 'gone'" in second["exception"]


def test_warnings_are_json_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logging.INFO, "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")


def test_a_second_set_up_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logging.DEBUG, "plain")
    logs.configure(logging.WARNING, "text")
    logging.getLogger("pw.x").info("not shown")
    logging.getLogger("pw.x").warning("shown", extra={"fields": {"a": 1}})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(" WARNING pw.x: shown")
    assert lines[0][:4].isdigit()
    logs.configure(logging.INFO)
    logging.getLogger("pw.x").info("plain")
    assert capsys.readouterr().err == "INFO pw.x: plain\n"


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(ValueError, match="plain, text, json: xml"):
        logs.configure(logging.INFO, "xml")


def test_a_server_starts_with_lines_of_json_where_every_line_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = EngineStatus(policy="adaptive", bytes=BytesByClass(planes=3, budget=4))
    logs.configure(logging.INFO, "json")
    _show_plan(status, {"6 bits": 2.0})
    _announce("PagedWeight serves tiny on http://h:1\n\n  curl ...")
    out, err = capsys.readouterr()
    assert out == ""
    plan, listening = map(json.loads, err.splitlines())
    assert (plan["event"], plan["planes_bytes"], plan["budget_bytes"]) == ("memory_plan", 3, 4)
    assert listening["event"] == "listening"
    assert listening["message"] == "PagedWeight serves tiny on http://h:1"
    logs.configure(logging.INFO, "text")
    _show_plan(status, {"6 bits": 2.0})
    _announce("PagedWeight serves tiny on http://h:1\n\n  curl ...")
    out, err = capsys.readouterr()
    assert out.endswith("  curl ...\n")
    assert err.startswith("memory plan: 3 B of a budget of 4 B\n  planes")
