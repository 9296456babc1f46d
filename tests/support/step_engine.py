"""What `pw.engine.process.loop` needs of an engine, without a model.

It counts tokens and breaks when told to.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from pw.blocks import BlockShape, ExpertGeometry
from pw.engine.process.wire import EngineInfo
from pw.engine.request import BytesByClass, EngineStatus, RequestOutput, SamplingParams
from pw.errors import EngineLostError, RequestError

GEOMETRY = ExpertGeometry((0, 1), 4, 2, BlockShape(64, 32), BlockShape(32, 32))


class LostTensor:
    """Stands in for memory of a device that is lost."""

    def __del__(self) -> None:
        os.abort()


class StepEngine:
    """Gives every running sequence its next token, a number, at each step; two run at a time.

    Prompt tokens choose the misbehaviour, see the class attributes. A sequence ends at
    `max_tokens`, without one never.
    """

    REFUSE, CRASH, BREAK_ONCE, BREAK, LOSE, HANG = 900, 901, 902, 903, 904, 905
    LOSE_DEVICE = 907  # as LOSE, and the end of what took part in the step aborts the process
    CROWD = 906  # after its first token it waits until `max_running` run

    def __init__(self, step_seconds: float = 0.0, max_running: int = 2) -> None:
        self.step_seconds = step_seconds
        self.max_running = max_running
        self.policy = "adaptive"
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.done: dict[str, int] = {}  # tokens so far, of those that run
        self.steps = self.finished = self.aborted = self.failed = 0
        self.closed = self.abandoned = False

    def info(self) -> EngineInfo:
        return EngineInfo("step", "ab" * 32, "adaptive", 1000, 4096, 4096, 100, GEOMETRY,
                          BytesByClass())  # fmt: skip

    def status(self) -> EngineStatus:
        return EngineStatus(
            step=self.steps,
            policy=self.policy,
            running=len(self.done),
            waiting=len(self.requests) - len(self.done),
            finished=self.finished,
            aborted=self.aborted,
            failed=self.failed,
            max_model_len=4096,
            layer_bits={0: 4.0, 1: 4.5},
            plan_history=({"reason": "kv_pressure", "moves": 3},),
            last_step_time=time.monotonic(),
        )

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if self.REFUSE in prompt:
            raise RequestError("needs 9 pages of 8", code="context_length_exceeded", param="prompt")
        if self.CRASH in prompt:
            raise ZeroDivisionError("secret detail")
        self.requests[request_id] = (prompt, params)

    def abort(self, request_id: str) -> RequestOutput | None:
        if request_id not in self.requests:
            return None
        self.aborted += 1
        return self._end(request_id, RequestOutput(request_id), "abort")

    def fail_running(self, error: str, code: str) -> list[RequestOutput]:
        self.failed += len(self.done)
        broken = RequestOutput("", error=error, error_code=code)
        return [
            self._end(name, replace(broken, request_id=name), "error") for name in tuple(self.done)
        ]

    def waits(self, request_id: str) -> bool:
        return request_id in self.requests and request_id not in self.done

    def has_work(self) -> bool:
        return bool(self.requests)

    def idle_turn(self) -> bool:
        return False

    def step(self) -> list[RequestOutput]:
        for name in self.requests:
            if len(self.done) < self.max_running:
                self.done.setdefault(name, 0)
        self.steps += 1
        tokens = {token for name in self.done for token in self.requests[name][0]}
        time.sleep(3600 if self.HANG in tokens else self.step_seconds)
        self._break(tokens)
        outputs = []
        for name in tuple(self.done):
            prompt, params = self.requests[name]
            if self.CROWD in prompt and self.done[name] == 1 and len(self.done) < self.max_running:
                continue
            self.done[name] += 1
            count = self.done[name]
            output = RequestOutput(
                name,
                text=f"{count} ",
                token_ids=(count,),
                prompt_tokens=len(prompt),
                completion_tokens=count,
                mean_bits=4.25,
            )
            if count == params.max_tokens:
                self.finished += 1
                output = self._end(name, output, "length")
            outputs.append(output)
        return outputs

    def _break(self, tokens: set[int]) -> None:
        if self.LOSE in tokens:
            raise EngineLostError("no device any more")
        if self.LOSE_DEVICE in tokens:
            self._tensor = held = LostTensor()
            raise EngineLostError(f"no device any more for {held}")
        if self.BREAK in tokens:
            raise RuntimeError("a kernel failed")
        if self.BREAK_ONCE in tokens:
            for prompt, _ in self.requests.values():
                prompt[:] = [token for token in prompt if token != self.BREAK_ONCE]
            raise RuntimeError("a kernel failed once")

    def _end(self, name: str, output: RequestOutput, reason: Any) -> RequestOutput:
        del self.requests[name]
        self.done.pop(name, None)
        return replace(output, finish_reason=reason)

    def precision_map(self) -> dict[str, Any]:
        return {"layers": [{"layer": 0, "gate_up": [4, 4, 3, 2], "mass": [0.25]}]}

    def set_policy(self, policy: str) -> None:
        if policy == "static:9":
            raise RequestError("static width must be 2 to 8", param="policy")
        if policy == "static:0":
            raise ZeroDivisionError("secret detail")
        self.policy = policy

    def close(self, *, lost: bool = False) -> None:
        self.closed, self.abandoned = True, lost
