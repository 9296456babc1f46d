"""What rank 0 tells the other ranks, and what they answer. Frames as in `pw.engine.process.wire`.

    to a follower     Follow, Budget, Capture, then Turn after Turn, Fetch where a LUT is on disk,
                      Compare where somebody looks whether all is well
    from a follower   Here, Planned, Ready, then Progress where copies have ended; Lost at its end

A turn is everything that has changed since the last one, in order, and the step to compute then, if
any. Page ids need no translation: all arenas are laid out alike. Nothing is pickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pw.config import EngineConfig
from pw.engine.process.wire import HEADER
from pw.logs import LogSettings


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Follow(_Message):
    """Load your part of an artifact. Answered by `Here`, and after `Budget` by `Planned`."""

    artifact: Path
    config: EngineConfig
    logs: LogSettings
    rank: int
    folder: Path  # where the ranks meet
    threads: int  # of torch, on a CPU


class Budget(_Message):
    """Bytes that every rank divides: the least that any of them has."""

    bytes: int


class Load(_Message):
    """Bring every block in at its first width; before the first step."""

    bits: list[int]  # by block index


class Reduce(_Message):
    """Lower the bits of a block."""

    index: int
    to_bits: int


class Begin(_Message):
    """Begin a raise into the pages that rank 0 has taken for it."""

    serial: int
    index: int
    to_bits: int
    pages: list[int]
    urgent: bool


class Commit(_Message):
    """Serve the width of a raise that has landed everywhere, or give its pages back."""

    index: int


class Cancel(_Message):
    """Have the pages of a raise given back at its `Commit`."""

    index: int


class Drop(_Message):
    """Give up all copies under way."""


class Patch(_Message):
    """Pages that a sequence has taken in one group of layers."""

    group: int
    row: int
    start: int  # first block
    pages: bytes  # [layers of the group, blocks] int32


class Step(_Message):
    """The chunks of a forward pass, packed."""

    rows: list[int]  # in the block tables
    starts: list[int]
    counts: list[int]
    tokens: list[int]  # of all chunks, one after the other
    prompts: list[bool]
    samples: list[bool]
    watched: list[bool]  # prompts that rank 0 learns from or scores: they take no graph
    patches: list[Patch]  # of the block tables, before it
    ahead: bool  # the tokens are on rank 0's device, and are told by a sum over the ranks


Change = Load | Reduce | Begin | Commit | Cancel | Drop


class Turn(_Message):
    """Make changes, move copies on, compute a step."""

    changes: list[Change]
    step: Step | None


class Fetch(_Message):
    """Have the LUT that a reduction needs at hand; answered by `Fetched`."""

    index: int
    bits: int


class Compare(_Message):
    """Check the page table, and say what is in it. Answered by `Compared`."""


class Capture(_Message):
    """Capture decode steps of up to so many sequences."""

    most: int


class Here(_Message):
    """A follower has started."""

    budget: int  # bytes that it has


class Planned(_Message):
    """A follower has divided the budget, and goes to meet the others."""

    plan: str  # digest of its memory plan
    dense: int  # bytes of its dense weights


class Ready(_Message):
    """A follower has made its first turn: its experts are loaded."""

    host: int  # bytes of its host store


class Fetched(_Message):
    """A LUT is at hand, or why not."""

    error: str | None


class Compared(_Message):
    """What a page table says: a digest, the same on all ranks that have made the same turns."""

    digest: str


class Progress(_Message):
    """Raises, by serial, whose copies have ended on a rank since it last said so."""

    landed: list[int]
    failed: dict[int, str]


class Lost(_Message):
    """A follower ends: an error's class in `pw.errors`, or "" for a bug."""

    kind: str
    message: str
    hint: str = ""


ToFollower = Follow | Budget | Turn | Fetch | Compare | Capture
FromFollower = Here | Planned | Ready | Fetched | Compared | Progress | Lost


def _path(kind: type[Any], value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise TypeError(f"has no form on the wire: {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # paths
_to_follower = msgspec.msgpack.Decoder(ToFollower, dec_hook=_path)
_from_follower = msgspec.msgpack.Decoder(FromFollower, dec_hook=_path)


def frame(message: ToFollower | FromFollower) -> bytes:
    """A message as bytes, its length before it."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def decode_to_follower(body: bytes) -> ToFollower:
    """A message to a follower."""
    message: ToFollower = _to_follower.decode(body)
    return message


def decode_from_follower(body: bytes) -> FromFollower:
    """A message from a follower."""
    message: FromFollower = _from_follower.decode(body)
    return message
