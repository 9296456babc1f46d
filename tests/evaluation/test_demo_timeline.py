import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pw.blocks import BlockKey, BlockShape, ExpertGeometry
from pw.engine.precision.trace import TraceWriter, read_replay
from pw.evaluation.demo.plot import plot_timeline
from pw.evaluation.demo.snapshots import bits_at, spread
from pw.evaluation.demo.timeline import Timeline
from pw.evaluation.demo.view import View, bar, line, picture, sparkline
from support.demo import plan_record, sample, squeezed, timeline_of

GEOMETRY = ExpertGeometry((1, 3), 2, 1, BlockShape(64, 32), BlockShape(32, 32))


def test_summary_of_a_squeeze() -> None:
    timeline = squeezed()
    assert (timeline.least_bits(), timeline.most_kv_pages(), timeline.finished) == (3.0, 50, 2)
    assert timeline.time_by_bits() == {3: 4 / 8, 6: 4 / 8}
    assert timeline.marks == [(8.0, "load")]


def test_plans_become_events_once_at_the_sample_that_shows_them_first() -> None:
    timeline = squeezed()
    assert [(p.seconds, p.kind, p.pages) for p in timeline.plans] == [
        (2.0, "release", 15),
        (6.0, "reload", 15),
    ]


def test_plans_from_before_the_first_sample_and_lost_history_are_no_events() -> None:
    old = plan_record("kv allocation", 1)
    timeline = timeline_of(
        sample(0, plans=5, plan_history=(old,) * 5),
        sample(1, plans=100, plan_history=(plan_record("rebalance", 3),) * 64),
    )
    assert [p.kind for p in timeline.plans] == ["trade"] * 64


@pytest.mark.parametrize(
    ("samples", "lost"),
    [
        ([sample(0, pages_free=39), sample(1, pages_free=39)], 1),
        ([sample(0, pages_free=42), sample(1, pages_free=42)], 2),  # a page with two owners
        ([sample(0, pages_free=39), sample(1)], 0),  # seen once: caught between two owners
        ([sample(0, running=1, pages_free=39), sample(1, running=1, pages_free=39)], 0),
        ([sample(0), sample(1)], 0),
    ],
)
def test_pages_are_lost_where_still_books_do_not_add_up(samples: list, lost: int) -> None:
    assert timeline_of(*samples).pages_lost() == lost


def test_steps_are_spread_evenly() -> None:
    assert spread(100, 4) == [12, 37, 62, 87]
    assert spread(3, 5) == [0, 1, 2]
    assert spread(0, 5) == []


def test_bits_of_a_step_are_those_committed_before_it(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.jsonl")
    trace.write("start", format="pw-trace-1", artifact="x", pages=9, page_bytes=4096, bits=[6] * 8)

    def move(event: str, step: int, key: BlockKey, to: int) -> None:
        names = {"layer": key.layer, "expert": key.expert, "module": key.module}
        trace.write(event, step=step, **names, to=to, reason="kv_pressure", **{"from": 6})

    first, last = BlockKey(1, 0, "gate_up"), BlockKey(3, 1, "down")
    move("reduce", 2, first, 3)
    move("reduce", 2, last, 4)
    move("begin_raise", 4, first, 6)
    move("commit_raise", 6, first, 5)
    trace.close()
    snapshots = bits_at(read_replay(tmp_path / "trace.jsonl"), GEOMETRY, [1, 2, 5, 5, 6])
    rest = [6] * (GEOMETRY.blocks - 2)
    expected = [[6, *rest, 6], [3, *rest, 4], [3, *rest, 4], [3, *rest, 4], [5, *rest, 4]]
    assert np.array(snapshots).tolist() == expected


def test_the_bar_gives_each_owner_its_share() -> None:
    shown = bar(sample(0, pages_weights=50, pages_kv=25), 20).plain
    assert shown == "█" * 10 + "▓" * 5 + "·" * 5
    assert bar(sample(0, pages_weights=33, pages_kv=67), 10).plain == "███▓▓▓▓▓▓▓"


def test_the_sparkline_spans_what_was_seen() -> None:
    assert sparkline(squeezed()) == "██▁██"
    assert sparkline(timeline_of(sample(0))) == "▁"


def test_a_line_and_a_picture_tell_the_same() -> None:
    timeline = timeline_of(sample(0, finished=5), *squeezed().samples[2:3])
    text = line(timeline, 7)
    assert "weights 0.18 MiB at 3.00 bits, KV 0.20, free 0.02" in text
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(picture(timeline, 7))
    painted = console.export_text()
    for part in ("weights 0.18 MiB", "mean 3.00", "running 2", "of 7", "kv_pressure", "budget: 0"):
        assert part in painted, part


def test_without_a_terminal_a_line_a_second_is_printed() -> None:
    stream = io.StringIO()
    view = View(Console(file=stream, width=200), requests=2)
    timeline = Timeline()
    with view.open():
        for seconds in (0.0, 0.5, 1.0, 1.4, 2.5):
            timeline.add(sample(seconds))
            view.show(timeline)
    assert [text.split()[0] for text in stream.getvalue().splitlines()] == ["0.0", "1.0", "2.5"]


def test_on_a_terminal_the_picture_is_repainted() -> None:
    stream = io.StringIO()
    view = View(Console(file=stream, width=100, force_terminal=True), requests=2)
    with view.open():
        view.show(squeezed())
    assert "requests" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    plot_timeline(squeezed(), "title", path)
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert int.from_bytes(head[16:20]) == 1430  # pixels wide
