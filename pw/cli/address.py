"""Where a running server is, as people write it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pw.errors import ConfigError


def server_url(text: str, flag: str = "--url") -> str:
    """The root of a server from `http://host:port`, `host:port`, `host` or `:port`.

    A `/v1` at the end, as OpenAI's clients want it, is left off: whoever asks knows the paths.

    Args:
        text: As given. A scheme that is missing is http, a host that is missing this machine.
        flag: What the message calls it.

    Raises:
        ConfigError: It is no address of an HTTP server.
    """
    url = text.strip()
    if "://" not in url:
        url = f"http://{'127.0.0.1' if url.startswith(':') else ''}{url}"
    url = re.sub(r"(?<=[^/:])/+v1$", "", url.rstrip("/"))
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none, brackets that do not close
        known = False
    if not known or any(mark in url for mark in " ?#"):
        raise ConfigError(
            f"{flag} is no address of a server: `{text}`", "write it like `http://127.0.0.1:8000`"
        )
    return url
