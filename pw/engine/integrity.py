"""Do the books of an engine agree with each other? For tests and for runs that check themselves."""

from __future__ import annotations

from pw.engine.request import EngineStatus
from pw.engine.start.build import Parts


def check_books(parts: Parts, status: EngineStatus) -> None:
    """Check every invariant of DESIGN section 6.

    Args:
        parts: Of the engine.
        status: Its snapshot of now.

    Raises:
        AssertionError: One does not hold.
    """
    parts.pool.check_integrity()
    parts.kv.check_integrity()
    used = parts.kv.used_pages
    if parts.table is not None:
        parts.table.check_integrity()
        if not parts.precision.holds(parts.precision.floor):
            raise AssertionError(f"a block is below {parts.precision.floor} bits")
        used += parts.table.resident_pages()
    if used + parts.pool.free_count != parts.pool.num_pages:
        raise AssertionError("free + weight + KV pages are not all pages")
    if status.bytes.total > status.bytes.budget:
        raise AssertionError(f"{status.bytes.total} bytes exceed {status.bytes.budget}")
