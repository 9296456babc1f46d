"""A process that tries grammars, so that none can harm the server: run as a module.

It loads the compiler once and forks for each grammar. The child has little CPU time and memory and
may die of anything; what is left is a verdict. Jobs come as JSON lines on stdin, verdicts leave as
JSON lines on stdout:

    {"id": 1, "kind": "regex", "text": "a+"}       {"id": 1, "error": "", "bug": false}

It ends when stdin does.
"""

from __future__ import annotations

import json
import os
import random
import resource
import selectors
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar

from pw.engine.request import Grammar
from pw.engine.sampling.grammar import GrammarState, compile_grammar, tokenizer_info
from pw.errors import PwError, RequestError
from pw.models.tokenizer import load_tokenizer

MAX_CHILDREN = 2
WALK_TOKENS = 32
WALL_FACTOR = 5  # seconds of wall time for each second of CPU time, as machines are shared
_SIGNALS = {
    signal.SIGPROF: "it takes too long to compile",
    signal.SIGALRM: "it takes too long to compile",
}
_TOO_LARGE = "it takes too much memory to compile"


class Worker:
    """Runs jobs in children, a few at a time.

    Args:
        compiler: Knows the model's tokenizer.
        cpu_seconds: CPU time of a child.
        memory_bytes: Memory that a child may take beyond what the worker has.
    """

    def __init__(
        self, compiler: xgrammar.GrammarCompiler, cpu_seconds: float, memory_bytes: int
    ) -> None:
        self._compiler = compiler
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._jobs: deque[dict[str, Any]] = deque()
        self._children: dict[int, tuple[int, Any]] = {}  # pipe -> process, job id
        self._events = selectors.DefaultSelector()

    def run(self) -> None:
        """Work until stdin ends."""
        self._events.register(0, selectors.EVENT_READ)
        held = b""
        while True:
            for key, _ in self._events.select():
                if key.fd != 0:
                    self._finish(key.fd)
                    continue
                data = os.read(0, 1 << 20)
                if not data:
                    return
                *lines, held = (held + data).split(b"\n")
                self._jobs.extend(map(json.loads, lines))
            while self._jobs and len(self._children) < MAX_CHILDREN:
                self._start(self._jobs.popleft())

    def _start(self, job: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            self._child(job, writing)
        os.close(writing)
        self._children[reading] = (process, job["id"])
        self._events.register(reading, selectors.EVENT_READ)

    def _child(self, job: dict[str, Any], writing: int) -> None:
        """Compile, tell, die. Never returns into the worker's loop."""
        try:
            _limit(self._cpu_seconds, self._memory_bytes)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the compiler's remarks
            compiled = compile_grammar(self._compiler, Grammar(job["kind"], job["text"]))
            _walk(compiled, compiled.tokenizer_info.vocab_size)
            os.write(writing, b"+")
        except PwError as error:
            os.write(writing, b"-" + error.message.encode()[:1000])
        except (MemoryError, RuntimeError) as error:  # the compiler's own are RuntimeErrors
            os.write(writing, b"-" + (str(error) or _TOO_LARGE).encode()[:1000])
        except Exception as error:
            os.write(writing, b"!" + repr(error).encode()[:1000])
        finally:
            os._exit(0)

    def _finish(self, reading: int) -> None:
        """Collect a child that has told its verdict, or died before."""
        process, job_id = self._children.pop(reading)
        self._events.unregister(reading)
        told = os.read(reading, 4096)
        os.close(reading)
        _, status = os.waitpid(process, 0)
        error = told[1:].decode(errors="replace") if told else _cause(status)
        verdict = {"id": job_id, "error": error, "bug": told.startswith(b"!")}
        print(json.dumps(verdict), flush=True)


def _walk(compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
    """Follow a grammar for some tokens, as the engine will: what breaks, breaks here.

    Raises:
        RequestError: No text matches it.
    """
    state = GrammarState(compiled)
    words = np.zeros((1, -(-vocab_size // 32)), np.int32)
    chance = random.Random(0)
    for step in range(WALK_TOKENS):
        if state.ended:
            return
        state.fill(words, 0, ())
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if not state.accept(int(chance.choice(allowed))) and step == 0:
            raise RequestError("no text matches it")


def _limit(cpu_seconds: float, memory_bytes: int) -> None:
    """Bound this process; it dies where it would exceed time, and cannot allocate more memory."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, cpu_seconds * WALL_FACTOR)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def _cause(status: int) -> str:
    """Why a child died without a verdict: time, or, mostly, no memory left."""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _SIGNALS:
        return _SIGNALS[signal.Signals(os.WTERMSIG(status))]
    return _TOO_LARGE


def main() -> None:
    """Arguments: folder of the tokenizer, CPU seconds, bytes."""
    folder, cpu_seconds, memory_bytes = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the server ends us
    try:
        tokenizer = load_tokenizer(Path(folder))
        info = tokenizer_info(tokenizer.inner, tokenizer.vocab_size, tokenizer.eos_token_ids)
    except PwError as error:  # of the model, no bug: one line in the server's log
        sys.exit(f"the grammar compiler does not start: {error.message}")
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    print(json.dumps({"ready": True}), flush=True)
    Worker(compiler, float(cpu_seconds), int(memory_bytes)).run()


if __name__ == "__main__":
    main()
