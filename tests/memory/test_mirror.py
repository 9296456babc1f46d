"""The page table's two sides: equal after every publish, by no more bytes than were noted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pw.memory.mirror import Mirror

CPU = torch.device("cpu")


def test_on_a_cpu_both_sides_are_the_same_memory() -> None:
    mirror = Mirror(16, CPU)
    mirror.host[3] = 7
    mirror.note(np.array([3]))
    mirror.publish()
    assert mirror.device is mirror.host
    assert (mirror.bytes, mirror.sent_bytes) == (64, 0)


def test_only_what_has_changed_is_sent_and_only_at_publish() -> None:
    mirror = Mirror(800, CPU, apart=True)
    address = mirror.device.data_ptr()
    random = np.random.default_rng(1)
    for turn in range(20):
        sent = mirror.sent_bytes
        touched = 0
        for _ in range(int(random.integers(1, 4))):
            positions = random.choice(800, int(random.integers(1, 20)), replace=False)
            mirror.host[positions] = torch.from_numpy(
                random.integers(99, size=len(positions))
            ).int()
            mirror.note(positions)
            touched += len(positions)
        assert turn == 0 or not torch.equal(mirror.host, mirror.device)
        mirror.publish()
        assert torch.equal(mirror.host, mirror.device)
        assert mirror.sent_bytes - sent == 12 * touched
    mirror.publish()
    assert mirror.device.data_ptr() == address


def test_many_changes_send_the_whole_table() -> None:
    mirror = Mirror(800, CPU, apart=True)
    mirror.host.copy_(torch.arange(800))
    mirror.note(np.arange(101))
    mirror.publish()
    assert mirror.sent_bytes == 3200
    assert torch.equal(mirror.host, mirror.device)


@pytest.mark.parametrize("size", [171, 173, 174, 1025])
def test_tables_of_any_size_have_buffers_for_positions(size: int) -> None:
    """A rank's table may have an odd number of entries: every buffer is aligned for int64."""
    mirror = Mirror(size, CPU, apart=True)
    for turn in range(9):
        mirror.host[turn : turn + 3] = turn
        mirror.note(np.arange(turn, turn + 3))
        mirror.publish()
        assert torch.equal(mirror.host, mirror.device)
    assert mirror.sent_bytes == 9 * 3 * 12
