"""The step loop: scheduler decides, runner touches the device, engine joins them."""

from pw.engine.async_engine import AsyncEngine
from pw.engine.engine import Completion, Engine

__all__ = ["AsyncEngine", "Completion", "Engine"]
