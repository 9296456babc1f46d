import io
import json

import pytest

from pw_pipelines.progress import Progress, Style


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_stage(style: Style, **options: bool) -> str:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(style, stream=stream, clock=clock, **options)
    progress.note("a note")
    progress.warn("a warning")
    progress.detail("a detail")
    with progress.stage("fit", 10, "blocks") as advance:
        for _ in range(10):
            clock.now += 2.0
            advance(1)
    return stream.getvalue()


def test_plain_lines_come_every_few_seconds_with_the_time_left() -> None:
    assert run_stage(Style.PLAIN).splitlines() == [
        "a note",
        "warning: a warning",
        "fit: 3/10 blocks, 14 s left",
        "fit: 6/10 blocks, 8 s left",
        "fit: 9/10 blocks, 2 s left",
        "fit: 10 blocks in 20.0 s",
    ]


def test_quiet_says_nothing() -> None:
    assert run_stage(Style.QUIET, verbose=True) == ""


def test_verbose_adds_details() -> None:
    assert "a detail" in run_stage(Style.PLAIN, verbose=True)


def test_json_lines_parse_and_end_with_done() -> None:
    events = [json.loads(line) for line in run_stage(Style.JSON).splitlines()]
    assert [e["event"] for e in events] == ["note", "warning", *["progress"] * 4, "done"]
    assert events[3] == {
        "event": "progress", "stage": "fit", "done": 3, "total": 10, "unit": "blocks",
        "seconds_left": 14.0,
    }  # fmt: skip


def test_a_stage_that_fails_does_not_claim_to_be_done() -> None:
    stream = io.StringIO()
    progress = Progress(Style.PLAIN, stream=stream)
    with pytest.raises(RuntimeError), progress.stage("fit", 2, "blocks"):
        raise RuntimeError
    assert "in" not in stream.getvalue()


@pytest.mark.parametrize("style", [Style.PLAIN, Style.JSON])
def test_a_stage_that_ends_early_names_what_was_done(style: Style) -> None:
    stream = io.StringIO()
    with Progress(style, stream=stream, clock=Clock()).stage("squeeze", 1000, "cycles") as advance:
        advance(1)
        advance(2)
    last = stream.getvalue().splitlines()[-1]
    if style is Style.PLAIN:
        assert last == "squeeze: 3 of 1000 cycles in 0.0 s"
    else:
        assert json.loads(last) == {
            "event": "done", "stage": "squeeze", "total": 1000, "unit": "cycles", "done": 3,
        }  # fmt: skip


def test_a_bar_is_drawn_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert Progress(stream=io.StringIO()).style is Style.PLAIN
    stream = Terminal()
    progress = Progress(stream=stream)
    assert progress.style is Style.BAR
    with progress.stage("fit", 3, "blocks") as advance:
        advance(3)
    assert "3 blocks in" in stream.getvalue()
