"""What the API process and the engine process say to each other, and how it becomes bytes.

A frame is a length (4 bytes, little-endian) and a msgpack message of one of the types below, read
back against its type: nothing that arrives is ever executed, unknown or misshapen messages are
refused. Both ends are always the same version of this code. The engine ends when its end is closed.

    to the engine     Load, then Add | Abort | GetPrecision | SetPolicy
    from the engine   Ready or StartFailed, then Outputs | Refused | Status | Answer | Failed
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pw.blocks import ExpertGeometry
from pw.config import EngineConfig
from pw.engine.request import BytesByClass, EngineStatus, RequestOutput, SamplingParams
from pw.errors import RequestError
from pw.logs import LogSettings

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20  # far above the longest prompt; a length above it is nonsense


@dataclass(frozen=True)
class EngineInfo:
    """What does not change while an engine lives, and its memory plan at the start."""

    model_name: str
    artifact_hash: str
    policy: str  # at the start; `EngineStatus.policy` is that of now
    vocab_size: int  # ids that the model takes; a tokenizer may know fewer
    max_model_len: int  # tokens
    page_bytes: int
    pages_total: int
    geometry: ExpertGeometry
    bytes: BytesByClass
    concurrency: dict[str, float] = field(default_factory=dict)  # see `pw.engine.status`


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """A `RequestError` on its way."""

    message: str
    code: str
    param: str | None
    status: int
    hint: str

    @classmethod
    def of(cls, error: RequestError) -> Refusal:
        """Pack an error."""
        return cls(error.message, error.code, error.param, error.status, error.hint)

    def unpack(self) -> RequestError:
        """The error again."""
        return RequestError(
            self.message, code=self.code, param=self.param, status=self.status, hint=self.hint
        )


class Load(_Message):
    """Load an artifact. The first message, answered by `Ready` or `StartFailed`."""

    artifact: Path
    config: EngineConfig
    logs: LogSettings
    queue_timeout: float | None = None  # seconds


class Add(_Message):
    """Run a request."""

    request_id: str
    prompt: list[int]
    params: SamplingParams


class Abort(_Message):
    """Give requests up. Unknown and finished ids are ignored."""

    request_ids: list[str]


class GetPrecision(_Message):
    """Ask for `Engine.precision_map`."""

    call: int


class SetPolicy(_Message):
    """Change the precision policy."""

    call: int
    policy: str


class Ready(_Message):
    """The engine is loaded."""

    info: EngineInfo
    status: EngineStatus


class StartFailed(_Message):
    """The engine cannot be loaded: an error's class in `pw.errors`, "OSError", or "" for a bug."""

    kind: str
    message: str
    hint: str = ""
    errno: int | None = None
    filename: str | None = None


class Outputs(_Message):
    """What one turn made; with a status when a request has ended, so that it is counted in it."""

    outputs: list[RequestOutput]
    status: EngineStatus | None = None


class Refused(_Message):
    """A request is not taken; without a refusal the fault is the engine's own."""

    request_id: str
    refusal: Refusal | None


class Status(_Message):
    """A snapshot, and a sign of life: sent by the loop that steps, several times a second."""

    status: EngineStatus


class Answer(_Message):
    """The answer to a call."""

    call: int
    value: Any = None  # as JSON has it
    refusal: Refusal | None = None


class Failed(_Message):
    """The last message of an engine that a fault of its own ends."""

    error: str


ToEngine = Load | Add | Abort | GetPrecision | SetPolicy
FromEngine = Ready | StartFailed | Outputs | Refused | Status | Answer | Failed


def _unknown(kind: type[Any], value: Any) -> Any:
    """What msgspec has no form for: paths, and `object`, which plans use for plain values."""
    if kind is Path:
        return Path(value)
    if kind is object:
        return value
    raise TypeError(f"has no form on the wire: {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=os.fspath)  # paths; anything else is a TypeError
_to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=_unknown)
_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_unknown)


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as bytes, its length before it.

    Raises:
        RequestError: It holds a number or a text that has no such form.
    """
    try:
        body = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise RequestError(f"request holds a value that cannot be passed on: {error}") from error
    return HEADER.pack(len(body)) + body


def decode_to_engine(body: bytes | bytearray | memoryview) -> ToEngine:
    """A message to the engine."""
    message: ToEngine = _to_engine.decode(body)
    return message


def decode_from_engine(body: bytes | bytearray | memoryview) -> FromEngine:
    """A message from the engine."""
    message: FromEngine = _from_engine.decode(body)
    return message


def body_length(header: bytes | bytearray | memoryview) -> int:
    """Length that a frame's header states.

    Raises:
        ValueError: It cannot be one.
    """
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes: the other end is not ours")
    return int(length)


def read_body(sock: socket.socket) -> bytes:
    """Wait for one frame on a blocking socket; its body, and not a byte more.

    Raises:
        EOFError: The other end is closed.
    """
    return _read(sock, body_length(_read(sock, HEADER.size)))


def _read(sock: socket.socket, length: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < length:
        piece = sock.recv(length - len(pieces))
        if not piece:
            raise EOFError("the other end of the socket is closed")
        pieces += piece
    return bytes(pieces)


class FrameBuffer:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies of the frames that are complete with `data`."""
        self._bytes += data
        bodies, start = [], 0
        while len(self._bytes) - start >= HEADER.size:
            begin = start + HEADER.size
            end = begin + body_length(self._bytes[start:begin])
            if end > len(self._bytes):
                break
            bodies.append(bytes(self._bytes[begin:end]))
            start = end
        del self._bytes[:start]
        return bodies


class Outbox:
    """Frames on their way into a non-blocking socket: what it does not take at once waits here."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames: deque[memoryview] = deque()
        self.bytes = 0  # that wait

    def put(self, data: bytes) -> None:
        """Send a frame, or keep it until `flush`."""
        self._frames.append(memoryview(data))
        self.bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            OSError: The other end is closed.
        """
        while self._frames:
            try:
                sent = self._socket.send(self._frames[0])
            except BlockingIOError:
                return
            self.bytes -= sent
            if sent == len(self._frames[0]):
                self._frames.popleft()
            else:
                self._frames[0] = self._frames[0][sent:]
