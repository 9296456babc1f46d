"""Log lines on stderr: for people, or one JSON object each with keys that stay.

A line of an event carries its fields in `extra={"fields": {...}}`: people read the message,
machines the fields. Prompts, answers and keys are never among them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass

PACKAGES = ("pw", "pw_pipelines", "pw_kernels")
STYLES = ("plain", "text", "json")


@dataclass(frozen=True)
class LogSettings:
    """How this process logs; travels to the processes that it starts."""

    level: int = logging.INFO  # of our own packages; others speak from WARNING on
    style: str = "plain"  # plain: no time, for commands; text: with time; json


def current() -> LogSettings:
    """What `configure` was last called with."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Stderr):
            return handler.settings
    return LogSettings()


def configure(level: int, style: str = "plain") -> None:
    """Set this process's logging up, or anew.

    Args:
        level: Of our own packages, like `logging.INFO`.
        style: One of STYLES.
    """
    if style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(STYLES)}: {style}")
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Stderr)]:
        root.removeHandler(old)
    handler = _Stderr(LogSettings(level, style))
    handler.setFormatter(_formatter(style))
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)
    logging.captureWarnings(style == "json")  # where every line is JSON, a warning is one too


def _formatter(style: str) -> logging.Formatter:
    if style == "json":
        return JsonFormatter()
    if style == "text":
        return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    return logging.Formatter("%(levelname)s %(name)s: %(message)s")


class _Stderr(logging.Handler):
    """Ours, so that a second `configure` replaces it and nobody else's.

    Looks `sys.stderr` up at every line, so that it may be redirected at any time.
    """

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self.settings = settings

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # a log that cannot be written must not stop the service
            self.handleError(record)


class JsonFormatter(logging.Formatter):
    """One object a line: `time` (UTC), `level`, `logger`, `message`, then the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
