"""Requests whose grammar is being compiled: beside the steps, one after the other, within a limit.

A thread of its own compiles; xgrammar lets go of the interpreter meanwhile. The time that counts is
the thread's own CPU time, so that a busy machine refuses nothing. What cannot be stopped is left
behind in its thread, and another takes over.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pw.engine.request import Grammar
from pw.engine.sampling.grammar import GrammarState, clean_tokens, compile_grammar, tokenizer_info
from pw.engine.sequence import Sequence
from pw.errors import RequestError
from pw.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

COMPILE_SECONDS = 2.0
CACHE_BYTES = 64 << 20  # of compiled grammars, least recently used go first


@dataclass
class _Job:
    grammar: Grammar
    begun: float | None = None  # reading of the worker's clock
    result: xgrammar.CompiledGrammar | RequestError | None = None


@dataclass(eq=False)
class _Worker:
    """A thread that compiles what is in a queue until it is told to leave."""

    jobs: queue.SimpleQueue[_Job | None]
    clock: int | None = None  # of its CPU time; None: the platform has none
    compiler: xgrammar.GrammarCompiler | None = None
    leave: threading.Event = field(default_factory=threading.Event)

    def seconds(self) -> float:
        return time.monotonic() if self.clock is None else time.clock_gettime(self.clock)


class GrammarQueue:
    """Sequences that wait for their grammars.

    Args:
        tokenizer: Of the model.
        vocabulary: Tokens that have a text.
        limit: CPU seconds that one grammar may take.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: int, limit: float = COMPILE_SECONDS
    ) -> None:
        self._tokenizer, self._vocabulary, self._limit = tokenizer, vocabulary, limit
        self._waiting: dict[Sequence, _Job] = {}
        self._news = threading.Event()
        self._clean: NDArray[np.uint32] | None = None
        self._worker: _Worker | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Compile the grammar of a sequence. Returns at once.

        Raises:
            RequestError: xgrammar is not installed.
        """
        grammar = sequence.params.grammar
        assert grammar is not None
        if importlib.util.find_spec("xgrammar") is None:
            tokenizer_info(None, 0, ())  # says what to install
        if self._worker is None:
            self._worker = self._start(queue.SimpleQueue())
        self._waiting[sequence] = job = _Job(grammar)
        self._worker.jobs.put(job)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence. Its grammar may come in useful for another."""
        self._waiting.pop(sequence, None)

    def take(self) -> list[tuple[Sequence, RequestError | None]]:
        """Sequences that wait no longer, with what is wrong with their grammar, if anything."""
        self._news.clear()
        self._stop_what_overran()
        done: list[tuple[Sequence, RequestError | None]] = []
        for sequence, job in list(self._waiting.items()):
            if job.result is None:
                continue
            del self._waiting[sequence]
            if isinstance(job.result, RequestError):
                done.append((sequence, job.result))
            else:
                json = job.grammar.kind in ("json_object", "json_schema")
                sequence.grammar = GrammarState(job.result, self._clean if json else None)
                done.append((sequence, None))
        return done

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is ready, for so long at most."""
        self._news.wait(seconds)

    def close(self) -> None:
        """Let the thread end."""
        if self._worker is not None:
            self._worker.leave.set()
            self._worker.jobs.put(None)
            self._worker = None

    def _stop_what_overran(self) -> None:
        worker = self._worker
        if worker is None:
            return
        for job in list(self._waiting.values()):
            if job.begun is None or job.result is not None:
                continue
            if worker.seconds() - job.begun > self._limit:
                job.result = RequestError(
                    f"the grammar took more than {self._limit:g} s to compile",
                    code="invalid_grammar",
                    param="grammar",
                    hint="use a smaller schema or expression",
                )
                worker.leave.set()
                self._worker = self._start(worker.jobs)
                return

    def _start(self, jobs: queue.SimpleQueue[_Job | None]) -> _Worker:
        worker = _Worker(jobs)
        threading.Thread(target=self._work, args=(worker,), name="pw-grammar", daemon=True).start()
        return worker

    # -- in the thread -----------------------------------------------------------------------

    def _work(self, worker: _Worker) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            worker.clock = time.pthread_getcpuclockid(threading.get_ident())
        while not worker.leave.is_set():
            job = worker.jobs.get()
            if job is None:
                return
            result: xgrammar.CompiledGrammar | RequestError
            try:
                worker.compiler = worker.compiler or self._new_compiler()
                job.begun = worker.seconds()
                result = compile_grammar(worker.compiler, job.grammar)
            except RequestError as error:
                result = error
            if not worker.leave.is_set():
                job.result = result
                self._news.set()

    def _new_compiler(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        info = tokenizer_info(
            self._tokenizer.inner, self._vocabulary, self._tokenizer.eos_token_ids
        )
        if self._clean is None:
            self._clean = clean_tokens(info)
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
