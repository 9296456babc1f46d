"""Frames between the processes: every message survives, at any cut, and nonsense is refused."""

from __future__ import annotations

import random
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pw.config import EngineConfig, PlannerConfig, PrecisionPolicy
from pw.engine.process import wire
from pw.engine.request import (
    BytesByClass,
    EngineStatus,
    Grammar,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from pw.errors import RequestError
from pw.logs import LogSettings
from support.step_engine import StepEngine

PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    seed=-(2**63),
    stop=("a\nb", "naïve 🦊"),
    stop_token_ids=(3, 5),
    logprobs=2,
    logit_bias=((4, -100.0), (9, 0.25)),
    grammar=Grammar("json_schema", '{"type": "object"}'),
    min_bits=3,
)
OUTPUT = RequestOutput(
    "cmpl-1-0",
    text="🦊",
    token_ids=(5, 2**31),
    logprobs=(TokenLogprob(5, -0.125, ((5, -0.125), (6, -float("inf")))),),
    prompt_logprobs=(None, TokenLogprob(1, -2.5)),
    finish_reason="error",
    error="why",
    error_code="nonfinite",
    mean_bits=4.5,
)
STATUS = EngineStatus(
    step=2**40,
    layer_bits={0: 4.5, 11: 8.0},
    blocks_by_bits={2: 10, 8: 1},
    bytes=BytesByClass(planes=2**40),
    plan_history=({"reason": "idle", "moves": 3, "damage": 0.5},),
)
CONFIG = EngineConfig(
    memory_budget=2**41,
    policy=PrecisionPolicy.parse("static:some/file"),
    trace=Path("/tmp/trace.jsonl"),
    planner=PlannerConfig(residual="off"),
)
REFUSAL = wire.Refusal.of(
    RequestError("too long", code="context_length_exceeded", param="prompt", status=413, hint="cut")
)
TO_ENGINE = [
    wire.Load(Path("/a/b.pw"), CONFIG, LogSettings(10, "json"), 2.5),
    wire.Add("cmpl-1-0", [1, 2**31, 0], PARAMS),
    wire.Abort(["a", "b"]),
    wire.GetPrecision(4),
    wire.SetPolicy(5, "static:4"),
]
FROM_ENGINE = [
    wire.Ready(StepEngine().info(), STATUS),
    wire.StartFailed("OSError", "no such file", "", 2, "/a"),
    wire.Outputs([OUTPUT, OUTPUT], STATUS),
    wire.Outputs([], None),
    wire.Refused("a", REFUSAL),
    wire.Refused("a", None),
    wire.Status(STATUS),
    wire.Answer(4, {"layers": [{"layer": 0, "gate_up": [2, 3], "mass": [0.5]}]}),
    wire.Answer(5, refusal=REFUSAL),
    wire.Failed("RuntimeError: x"),
]


def test_every_message_survives_cut_anywhere() -> None:
    generator = random.Random(3)
    for messages, decode in (
        (TO_ENGINE, wire.decode_to_engine),
        (FROM_ENGINE, wire.decode_from_engine),
    ):
        stream = b"".join(map(wire.frame, messages * 20))  # type: ignore[arg-type]
        buffer, found = wire.FrameBuffer(), []
        while stream:
            size = generator.choice((1, 2, 3, 7, 100, 3000))
            found += [decode(body) for body in buffer.feed(stream[:size])]
            stream = stream[size:]
        assert found == messages * 20


def test_every_kind_of_message_was_tried() -> None:
    assert {type(m) for m in TO_ENGINE} == set(wire.ToEngine.__args__)  # type: ignore[attr-defined]
    assert {type(m) for m in FROM_ENGINE} == set(wire.FromEngine.__args__)  # type: ignore[attr-defined]


def test_a_refusal_is_the_same_error_again() -> None:
    error = REFUSAL.unpack()
    assert (error.message, error.hint, error.code) == ("too long", "cut", "context_length_exceeded")
    assert (error.param, error.status) == ("prompt", 413)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(min_tokens=2**64), SamplingParams(stop=("\udcff",))],
)
def test_what_has_no_form_is_a_refusal(params: SamplingParams) -> None:
    with pytest.raises(RequestError, match="cannot be passed on") as refused:
        wire.frame(wire.Add("a", [1], params))
    assert refused.value.status == 400


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="not ours"):
        wire.FrameBuffer().feed(b"\xff\xff\xff\xffxxxx")
    good: Any = msgspec.msgpack.decode(wire.frame(TO_ENGINE[1])[wire.HEADER.size :])
    assert good[0] == "Add"
    for place, value in ((0, "Nothing"), (1, 7), (2, ["x"]), (3, {"temperature": "hot"})):
        bad = [*good[:place], value, *good[place + 1 :]]
        with pytest.raises(msgspec.ValidationError):
            wire.decode_to_engine(msgspec.msgpack.encode(bad))
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_engine(wire.frame(FROM_ENGINE[-1])[wire.HEADER.size :])


def test_fields_have_types_that_the_wire_can_check() -> None:
    """`object` is let through unread; only the plans of a status may be that."""
    for kind in (EngineConfig, SamplingParams, RequestOutput, EngineStatus, wire.EngineInfo):
        loose = [f.name for f in fields(kind) if "object" in str(f.type) or "Any" in str(f.type)]
        assert loose in ([], ["plan_history"]), kind


def test_the_outbox_keeps_what_the_socket_does_not_take() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        outbox = wire.Outbox(ours)
        frames = [bytes([i]) * 100_000 for i in range(20)]
        for each in frames:
            outbox.put(each)
        assert outbox.bytes > 0
        theirs.settimeout(5)
        received = b""
        while len(received) < 2_000_000:
            received += theirs.recv(1 << 16)
            outbox.flush()
        assert received == b"".join(frames)
        assert outbox.bytes == 0
        theirs.close()
        with pytest.raises(OSError, match="Broken pipe"):
            outbox.put(b"x")


def test_reading_a_frame_takes_no_byte_of_the_next() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(wire.frame(FROM_ENGINE[0]) + b"rest")
        assert wire.decode_from_engine(wire.read_body(theirs)) == FROM_ENGINE[0]
        assert theirs.recv(100) == b"rest"
        ours.close()
        with pytest.raises(EOFError):
            wire.read_body(theirs)
