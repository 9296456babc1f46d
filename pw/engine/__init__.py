"""The step loop: scheduler decides, runner touches the device, engine joins them.

The engine brings torch and transformers; who only needs `pw.engine.request` does not pay for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pw.engine.async_engine import AsyncEngine
    from pw.engine.completion import Completion
    from pw.engine.engine import Engine

__all__ = ["AsyncEngine", "Completion", "Engine"]

_HOMES = {
    "AsyncEngine": "pw.engine.async_engine",
    "Completion": "pw.engine.completion",
    "Engine": "pw.engine.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
