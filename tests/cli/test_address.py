"""Where a running server is, as people write it."""

import pytest

from pw.cli.address import server_url
from pw.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://example.org/", "https://example.org"),
        ("http://proxy/pw/", "http://proxy/pw"),
        ("gpu7:8000", "http://gpu7:8000"),
        ("localhost", "http://localhost"),
        (":8001", "http://127.0.0.1:8001"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("localhost:8000/v1//", "http://localhost:8000"),
        ("https://proxy/pw/v1/", "https://proxy/pw"),
        ("http://v1", "http://v1"),
        (" 10.0.0.3:80 ", "http://10.0.0.3:80"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_what_is_missing_is_added(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://",
        "ftp://x",
        "gpu7:many",
        "gpu7:99999",
        "http://[::1",
        "a b",
        "x:0",
        "h?x=1",
        "http:///v1",
    ],
)
def test_what_is_no_address_is_refused_with_it(text: str) -> None:
    with pytest.raises(ConfigError, match="--base-url is no address of a server") as caught:
        server_url(text, "--base-url")
    assert f"`{text}`" in caught.value.message
    assert "http://127.0.0.1:8000" in caught.value.hint
