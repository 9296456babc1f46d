"""Grammars are tried in a process of their own before the engine sees them; see `grammar_worker`.

A grammar that does not compile, or not in the time and memory it gets, is the request's error. The
compiler brings torch, seconds of start and hundreds of megabytes: its process starts with the first
grammar, which waits for it, and ends when none has come for an hour; then the next one waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from pathlib import Path

import orjson

from pw.engine.request import Grammar
from pw.errors import RequestError

logger = logging.getLogger("pw.serving")

CPU_SECONDS = 2.0
MEMORY_BYTES = 512 << 20
CACHE_BYTES = 1 << 20  # of verdicts
MAX_WAITING = 32
START_SECONDS = 120.0
ANSWER_SECONDS = 60.0  # for a grammar and all that wait before it
IDLE_SECONDS = 3600.0  # without a new grammar; then the process ends until the next one
_ENTRY_BYTES = 256  # of a cached verdict, beside its text


class Verdicts:
    """What is known of grammars, the least recently used forgotten first.

    Args:
        max_bytes: Of all verdicts together.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, str] = OrderedDict()  # digest -> error, "" if it compiles
        self.bytes = 0

    def get(self, key: bytes) -> str | None:
        """The verdict, or None."""
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def add(self, key: bytes, error: str) -> None:
        """Remember one."""
        if key in self._known:
            return
        self._known[key] = error
        self.bytes += _ENTRY_BYTES + len(error)
        while self.bytes > self._max_bytes:
            _, dropped = self._known.popitem(last=False)
            self.bytes -= _ENTRY_BYTES + len(dropped)


class GrammarChecker:
    """Tells whether a grammar compiles.

    Args:
        folder: Of the model's tokenizer; None where structured output is not offered.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._verdicts = Verdicts()
        self._trials: dict[bytes, asyncio.Task[str]] = {}
        self._answers: dict[int, asyncio.Future[str]] = {}  # of the process, by the id of the job
        self._jobs = 0
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self._readers: set[asyncio.Task[None]] = set()
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def offered(self) -> bool:
        """Whether grammars can be followed here at all."""
        return self._folder is not None and importlib.util.find_spec("xgrammar") is not None

    async def check(self, grammar: Grammar, param: str) -> None:
        """Return if the engine can take the grammar.

        Args:
            grammar: To be tried.
            param: The request field that it comes from.

        Raises:
            RequestError: 400 with the compiler's words, 503 when the worker is busy or broken.
        """
        if not self.offered:
            raise RequestError(
                "structured output is not available here",
                code="unsupported_parameter",
                param=param,
                hint="install the server with `pagedweight[structured]`",
            )
        key = hashlib.blake2b(f"{grammar.kind}:{grammar.text}".encode(), digest_size=16).digest()
        error = self._verdicts.get(key)
        if error is None:
            error = await asyncio.shield(self._trial(key, grammar))
        if error:
            raise RequestError(f"{param} cannot be followed: {error}", param=param)

    async def close(self) -> None:
        """End the process, and with it all trials."""
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await asyncio.gather(*self._readers)
        await asyncio.gather(*self._trials.values(), return_exceptions=True)

    def _trial(self, key: bytes, grammar: Grammar) -> asyncio.Task[str]:
        """The trial of a grammar, one for all who ask; it goes on when they leave."""
        if key not in self._trials:
            if len(self._trials) >= MAX_WAITING:
                raise RequestError(
                    f"{MAX_WAITING} grammars wait to be compiled",
                    code="server_overloaded",
                    status=503,
                )
            task = asyncio.create_task(self._try(key, grammar))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._trials[key] = task
        return self._trials[key]

    async def _try(self, key: bytes, grammar: Grammar) -> str:
        """The worker's verdict."""
        try:
            async with asyncio.timeout(START_SECONDS + ANSWER_SECONDS):
                error = await self._ask(grammar)
        except TimeoutError:
            raise _unavailable("does not answer") from None
        except ConnectionError:
            raise _unavailable("has ended") from None
        except OSError as cause:  # no memory or no number left for another process
            raise _unavailable(f"does not start: {cause.strerror}") from None
        finally:
            del self._trials[key]
            self._rest_later()
        self._verdicts.add(key, error)
        return error

    def _rest_later(self) -> None:
        """End the process after a while in which nothing is tried."""
        if self._idle is not None:
            self._idle.cancel()
        if self._closed:
            return
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._rest)

    def _rest(self) -> None:
        """Let the process end by itself, which it does when nothing more can come."""
        if self._trials or self._process is None or self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None
        logger.info("the grammar compiler rests: no new grammar for %.0f s", IDLE_SECONDS)

    async def _ask(self, grammar: Grammar) -> str:
        process = await self._running()
        self._jobs += 1
        job = {"id": self._jobs, "kind": grammar.kind, "text": grammar.text}
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[self._jobs] = answer
        assert process.stdin is not None
        try:
            process.stdin.write(orjson.dumps(job) + b"\n")
            await process.stdin.drain()
        except ConnectionError:
            await process.wait()  # it is dying: the next grammar must find it dead
            raise
        return await answer

    async def _running(self) -> Process:
        """The process, started if there is none."""
        async with self._starting:
            if self._closed:
                raise _unavailable("has ended")
            if self._process is None or self._process.returncode is not None:
                await self._start()
            assert self._process is not None
            return self._process

    async def _start(self) -> None:
        assert self._folder is not None
        arguments = (str(self._folder), str(CPU_SECONDS), str(MEMORY_BYTES))
        # One thread: a process with more cannot fork safely.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        path = os.pathsep.join(filter(None, sys.path))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "pw.serving.structured.grammar_worker", *arguments),
            stdin=PIPE,
            stdout=PIPE,
            env=os.environ | alone | {"PYTHONPATH": path},
            process_group=0,  # signals of a terminal are the server's
        )
        self._process = process  # from here on `close` ends it
        if self._closed:
            process.kill()
        assert process.stdout is not None
        try:
            ready = await process.stdout.readline()
        except asyncio.CancelledError:  # it takes too long: the next grammar starts another
            process.kill()
            self._process = None
            raise
        if not ready:
            await process.wait()
            raise _unavailable("does not start")
        self._answers = {}
        reader = asyncio.create_task(self._read(process, self._answers))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    @staticmethod
    async def _read(process: Process, answers: dict[int, asyncio.Future[str]]) -> None:
        """Hand out verdicts until the process ends; then nobody waits any more."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            verdict = orjson.loads(line)
            answer = answers.pop(verdict["id"])
            if answer.done():  # it came too late
                continue
            if verdict["bug"]:
                logger.error("the grammar compiler's check failed: %s", verdict["error"])
                answer.set_exception(_unavailable("has failed"))
                answer.exception()
            else:
                answer.set_result(verdict["error"])
        await process.wait()
        while answers:
            _, answer = answers.popitem()
            if not answer.done():
                answer.set_exception(_unavailable("has ended"))
                answer.exception()  # who asked may have gone: not an error of asyncio's then


def _unavailable(state: str) -> RequestError:
    return RequestError(f"the grammar compiler {state}", code="engine_unavailable", status=503)
