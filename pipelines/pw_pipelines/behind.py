"""Work that a stage leaves behind while it computes on: files written by threads.

Knows nothing of what they write.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType


class Behind:
    """Some jobs at a time behind the caller; a failure is raised where the caller next asks.

    Args:
        jobs: How many are unfinished at most; 0 = the caller does them at once.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool = ThreadPoolExecutor(jobs) if jobs else None
        self._open: set[Future[None]] = set()

    def do(self, job: Callable[[], None]) -> None:
        """Have a job done; waits while there are as many as allowed."""
        if self._pool is None:
            job()
            return
        while len(self._open) >= self._jobs:
            self._collect(FIRST_COMPLETED)
        self._open.add(self._pool.submit(job))

    def finish(self) -> None:
        """Wait for all jobs."""
        self._collect()

    def _collect(self, when: str = "ALL_COMPLETED") -> None:
        done, self._open = wait(self._open, return_when=when)
        for job in done:
            job.result()

    def __enter__(self) -> Behind:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        if kind is None:
            self.finish()
