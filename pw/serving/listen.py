"""Where a server listens: a port or a Unix socket, with or without TLS."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pw.errors import ConfigError

BACKLOG = 2048


@dataclass(frozen=True)
class Endpoint:
    """An address, checked when made.

    Raises:
        ConfigError: Certificate and key are not both given, or cannot be used.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    uds: Path | None = None  # a Unix socket instead of host and port
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    root_path: str = ""  # under which a proxy in front shows the server

    def __post_init__(self) -> None:
        if self.ssl_certfile is None and self.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile", "give both")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"--root-path must begin with a slash: `{self.root_path}`")
        if self.ssl_certfile is not None:
            _check_certificate(self.ssl_certfile, self.ssl_keyfile)

    @contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """A listening socket for the length of the block.

        Raises:
            ConfigError: The address is taken or not this machine's.
        """
        if self.uds is not None:
            with _unix_listener(self.uds) as listener:
                yield listener
            return
        with self._port_listener() as listener:
            yield listener

    def check_free(self) -> None:
        """See that the address can be had, before the model is loaded.

        Raises:
            ConfigError: It cannot.
        """
        with self.listening():
            pass

    def url(self, listener: socket.socket) -> str:
        """How clients reach `listener`."""
        scheme = "https" if self.ssl_certfile is not None else "http"
        if self.uds is not None:
            return f"{scheme}://localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{listener.getsockname()[1]}"

    def _port_listener(self) -> socket.socket:
        try:
            listener = socket.create_server(
                (self.host, self.port),
                family=socket.AF_INET6 if ":" in self.host else socket.AF_INET,
                backlog=BACKLOG,
            )
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None) or 0  # negative where a name is not known
            elsewhere = number < 0 or number == errno.EADDRNOTAVAIL
            raise ConfigError(
                f"cannot listen on {self.host}:{self.port}: "
                + (os.strerror(number).lower() if number > 0 else str(error)),
                "`--host` must be an address of this machine, or 0.0.0.0 for all"
                if elsewhere
                else "choose another one with `--port`",
            ) from error
        # Connections inherit it. asyncio sets it only where a socket was made with its protocol's
        # number; without it, what is written in two pieces waits for an acknowledgement, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener


def _check_certificate(certificate: Path, key: Path | None) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"not a certificate and its key: `{certificate}`"
            + (f", `{key}`" if key is not None else "")
            + f" ({error.reason or error})",
            "both are PEM files without a password; --ssl-keyfile names the key",
        ) from error
    except OSError as error:
        missing = certificate if not certificate.is_file() else key
        raise ConfigError(f"cannot read `{missing}`: {error.strerror or error}") from error


@contextmanager
def _unix_listener(path: Path) -> Iterator[socket.socket]:
    """A Unix socket, removed afterwards; one that a server left behind is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            _remove_stale(path)
            listener.bind(str(path))
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on `{path}`: {error.strerror or error}",
                "choose another one with `--uds`",
            ) from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on.

    Raises:
        OSError: Somebody does, or it is something else.
    """
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError(errno.EEXIST, "a file of that name exists")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "a server listens there")
