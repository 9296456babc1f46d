"""The engine's process: one thread that reads commands, steps the engine and sends what it makes.

Started by `pw.serving.process.engine_process` as `python -m pw.engine.process.worker FD`, where
FD is one end of a socket pair; the other end is the API process. Nobody else can reach it. The
process ends when the other end is closed, however that came about, or when the engine is beyond
help.

The socket never blocks the loop. An API process that does not read gets its streams aborted
before what waits for it fills the memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from pw import logs
from pw.engine.process import wire
from pw.engine.process.loop import IDLE_SECONDS, EngineLoop
from pw.engine.request import RequestOutput
from pw.errors import PwError, RequestError

if TYPE_CHECKING:
    from pw.engine.engine import Engine

logger = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 32 << 20  # that an API process may leave unread
_RECEIVE_BYTES = 1 << 18
_BUSY_STATUS_SECONDS = 0.1  # between status messages of an engine that works
_IDLE_STATUS_SECONDS = 0.5  # ... that does not
_LAST_WORD_SECONDS = 1.0  # for an API process to read why the engine ends
LAST_STEP_SECONDS = 5.0  # to end by itself after the API process has gone


class Worker:
    """Serves one engine to the other end of a socket.

    Args:
        engine: Owned from here on.
        sock: Read and written by `run` only.
        queue_timeout: See `EngineLoop`.
    """

    def __init__(
        self, engine: Engine, sock: socket.socket, queue_timeout: float | None = None
    ) -> None:
        sock.setblocking(False)
        self._engine, self._socket = engine, sock
        self._loop = EngineLoop(engine, self._collect, queue_timeout)
        self._inbox, self._outbox = wire.FrameBuffer(), wire.Outbox(sock)
        self._outputs: list[RequestOutput] = []
        self._open: set[str] = set()  # requests that have not ended
        self._busy = False
        self._status_due = 0.0

    def run(self) -> NoReturn:
        """Work for as long as both ends live.

        Raises:
            EOFError: The other end is closed.
            ConnectionError: ... while something was sent.
            Exception: The engine is beyond help.
        """
        wait = 0.0
        while True:
            for command in self._receive(wait):
                self._obey(command)
            wait = self._loop.turn()
            self._send_outputs()
            self._send_status(busy=wait < IDLE_SECONDS)
            self._outbox.flush()
            if self._outbox.bytes > MAX_BACKLOG_BYTES:
                self._give_up_all()

    def _receive(self, wait: float) -> list[wire.ToEngine]:
        """Commands that have come; waits for the first of them for at most so many seconds."""
        writes = [self._socket] if self._outbox.bytes else []
        readable, _, _ = select.select([self._socket], writes, [], wait)
        if not readable:
            return []
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError("the API process has gone")
        return [wire.decode_to_engine(body) for body in self._inbox.feed(data)]

    def _obey(self, command: wire.ToEngine) -> None:
        if isinstance(command, wire.Add):
            self._add(command)
        elif isinstance(command, wire.Abort):
            for request_id in command.request_ids:
                self._loop.abort(request_id)
        elif isinstance(command, wire.GetPrecision):
            self._answer(command.call, self._engine.precision_map)
        elif isinstance(command, wire.SetPolicy):
            policy = command.policy
            self._answer(command.call, lambda: self._engine.set_policy(policy))
        else:
            raise TypeError(f"not a command for a loaded engine: {type(command).__name__}")

    def _add(self, command: wire.Add) -> None:
        try:
            if self._outbox.bytes > MAX_BACKLOG_BYTES:
                raise RequestError("the server is overloaded", code="server_overloaded", status=503)
            self._loop.add(command.request_id, command.prompt, command.params)
        except RequestError as error:
            self._send(wire.Refused(command.request_id, wire.Refusal.of(error)))
        except Exception:  # the engine lives on, whatever it is
            logger.exception("request %s could not be added", command.request_id)
            self._send(wire.Refused(command.request_id, None))
        else:
            self._open.add(command.request_id)

    def _answer(self, call: int, ask: Callable[[], Any]) -> None:
        try:
            answer = wire.Answer(call, ask())
        except RequestError as error:
            answer = wire.Answer(call, refusal=wire.Refusal.of(error))
        except Exception:  # the asker's, not the engine's
            logger.exception("a question could not be answered")
            fault = RequestError("internal error", code="server_error", status=500)
            answer = wire.Answer(call, refusal=wire.Refusal.of(fault))
        self._send(answer)
        self._status_due = 0.0

    def _collect(self, outputs: list[RequestOutput]) -> None:
        self._outputs += outputs

    def _send_outputs(self) -> None:
        """What commands and the turn have made, in one message."""
        if not self._outputs:
            return
        ended = [out.request_id for out in self._outputs if out.finish_reason is not None]
        self._open.difference_update(ended)
        self._send(wire.Outputs(self._outputs, self._engine.status() if ended else None))
        self._outputs = []

    def _send_status(self, busy: bool) -> None:
        now = time.monotonic()
        if (now < self._status_due and busy == self._busy) or self._outbox.bytes:
            return
        self._busy = busy
        self._status_due = now + (_BUSY_STATUS_SECONDS if busy else _IDLE_STATUS_SECONDS)
        self._send(wire.Status(self._engine.status()))

    def _give_up_all(self) -> None:
        """End every request: what they make would be kept for a reader that does not come."""
        if not self._open:
            return
        logger.error("the API process does not read: %d requests are aborted", len(self._open))
        for request_id in tuple(self._open):
            self._loop.abort(request_id)
        self._outputs = [
            replace(out, finish_reason="error", error="nobody reads", error_code="slow_reader")
            for out in self._outputs
        ]
        self._send_outputs()

    def _send(self, message: wire.FromEngine) -> None:
        self._outbox.put(wire.frame(message))

    def say_failed(self, error: Exception) -> None:
        """Tell the other end, after all that it was told before, why this one ends."""
        self._socket.settimeout(_LAST_WORD_SECONDS)
        self._send(wire.Failed(f"{type(error).__name__}: {error}"))


def main(arguments: list[str]) -> int:
    """Load what the other end says, then serve it.

    Returns:
        The exit code: 0 when the other end is closed, 1 after a fault.
    """
    # Ctrl-C and a supervisor's SIGTERM may reach all processes of a service. The API process
    # decides what they mean; when it ends, its end of the socket is closed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(arguments[0]))
    end_with_the_other_end(sock)
    try:
        load = wire.decode_to_engine(wire.read_body(sock))
        if not isinstance(load, wire.Load):
            raise TypeError(f"the first message must be Load: {type(load).__name__}")
        logs.configure(load.logs.level, load.logs.style)
        engine = _load(load, sock)
        return 1 if engine is None else serve(engine, sock, load.queue_timeout)
    except (EOFError, ConnectionError):
        return 0


def leave(code: int) -> NoReturn:
    """End this process as it is, its log flushed.

    Nothing is let go of: threads may wait for ranks that have gone, and where the device is lost
    the end of a tensor is the end of the process, by SIGABRT.
    """
    logging.shutdown()
    os._exit(code)


def serve(
    engine: Engine,
    sock: socket.socket,
    queue_timeout: float | None = None,
    leave: Callable[[int], object] = leave,
) -> int:
    """Say that an engine is ready and run it to its end.

    Args:
        engine: Owned from here on.
        sock: To the API process.
        queue_timeout: See `EngineLoop`.
        leave: Ends this process after a fault, with an exit code.

    Returns:
        The exit code.
    """
    sock.sendall(wire.frame(wire.Ready(engine.info(), engine.status())))
    worker = Worker(engine, sock, queue_timeout)
    try:
        worker.run()
    except (EOFError, ConnectionError):
        logger.debug("the API process has gone")
    except Exception as error:
        logger.exception("the engine stopped at a fault of its own")
        with contextlib.suppress(OSError):
            worker.say_failed(error)
        try:
            engine.close(lost=True)
        finally:
            leave(1)  # while the error holds all that took part in it
        return 1
    engine.close()
    return 0


def _load(load: wire.Load, sock: socket.socket) -> Engine | None:
    """The engine; None when it cannot be loaded, which the other end has been told."""
    try:
        from pw.engine.engine import Engine

        return Engine.from_artifact(load.artifact, load.config)
    except (PwError, OSError) as error:
        if load.logs.level <= logging.DEBUG:
            traceback.print_exc()
        failure = _failure(error)
    except Exception as error:
        logger.exception("the engine cannot be loaded")
        failure = wire.StartFailed("", f"{type(error).__name__}: {error}")
    sock.sendall(wire.frame(failure))
    return None


def _failure(error: PwError | OSError) -> wire.StartFailed:
    if isinstance(error, PwError):
        return wire.StartFailed(type(error).__name__, error.message, error.hint)
    text = error.strerror or str(error)
    return wire.StartFailed("OSError", text, "", error.errno, error.filename)


def end_with_the_other_end(sock: socket.socket) -> None:
    """See to it that this process ends soon after the other end is closed, whatever it is doing.

    The loop sees it at its next turn. A step that takes for ever must not outlive the server.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(sock, 0)  # hang-ups are always reported
        poll.poll()
        time.sleep(LAST_STEP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="pw-hang-up", daemon=True).start()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
