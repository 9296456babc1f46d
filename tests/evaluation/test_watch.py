import itertools

import pytest

from pw.evaluation.watch import Watch
from support.scoring import UnigramEngine


def watched(engine: UnigramEngine, steps: int) -> Watch:
    """Look once in each step, and once too often in the first."""
    watch = Watch(engine)
    for step in range(steps):
        watch.look()
        if step == 0:
            watch.look()
        engine.steps += 1
        watch.next_step()
    return watch


def test_means_over_steps_peaks_and_widths() -> None:
    engine = UnigramEngine(bits=(6, 3, 3, 4))
    engine.queue.extend([("a", [], None), ("b", [], None)])  # type: ignore[list-item]
    usage = watched(engine, 4).usage()
    assert usage.bytes.planes == usage.expert_bytes == 4000
    assert (usage.bytes.kv, usage.kv_peak) == (200, 200)
    assert usage.used_peak == 6200
    assert usage.used_single == 6100  # with the KV of one of the two sequences
    widths = usage.widths
    assert (widths.mean, widths.least, widths.most) == (4.0, 3.0, 6.0)
    assert widths.share == {3: 0.5, 4: 0.25, 6: 0.25}
    assert widths.blocks == [{"layer": 3, "gate_up": [4.0, 2.0], "down": [4.0, 2.0]}]
    assert [moment.weight_bytes for moment in usage.timeline] == [6000, 3000, 3000, 4000]
    assert [moment.step for moment in usage.timeline] == [0, 1, 2, 3]


def test_unquantized_experts_have_no_map() -> None:
    engine = UnigramEngine(bits=None)
    usage = watched(engine, 2).usage()
    assert usage.widths.blocks is None
    assert usage.widths.share == {}
    assert (usage.widths.mean, usage.expert_bytes) == (16.0, 16_000)
    assert engine.maps == 0


def test_a_long_run_keeps_a_bounded_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pw.evaluation.watch._MOST_MOMENTS", 8)
    moments = watched(UnigramEngine(), 100).usage().timeline
    assert 3 <= len(moments) <= 8
    steps = [moment.step for moment in moments]
    assert len({b - a for a, b in itertools.pairwise(steps)}) == 1  # evenly spread


def test_nothing_seen_is_no_usage() -> None:
    with pytest.raises(ValueError, match="no forward step"):
        Watch(UnigramEngine()).usage()
