"""Durable file operations: fsynced writes, atomic replacement, digests, the one-writer lock.

Knows nothing of artifacts. Every file is opened without following a symlink.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pw.config import format_exactly
from pw.errors import PartialResultError, StoreError

_CHUNK = 1 << 22  # bytes per read while hashing


def write_file(path: Path, *buffers: Any) -> None:
    """Create or truncate a file, write the buffers (bytes or C-contiguous arrays) and fsync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that at any instant it is the old one or the new one, whole."""
    scratch = path.with_name(f".{path.name}.tmp")
    write_file(scratch, data)
    os.replace(scratch, path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path, *, files: bool) -> None:
    """Make the names below `folder` durable, and the bytes of its files too if `files`."""
    for where, _, names in os.walk(folder):
        for name in names if files else ():
            fsync_file(Path(where, name))
        fsync_folder(Path(where))


def fsync_file(path: Path) -> None:
    """Make the bytes of an existing file durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Delete a folder that may not exist; an interrupted delete can be repeated."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Descriptor of a regular file, for reading.

    Raises:
        StoreError: The file is missing, a symlink, or not a plain file.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(f"artifact file is a symlink: `{path}`") from error
        raise StoreError(f"cannot open artifact file: `{path}`: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StoreError(f"artifact file is not a plain file: `{path}`")
        yield descriptor
    finally:
        os.close(descriptor)


def regular_size(path: Path) -> int | None:
    """Bytes of a regular file; None when it is missing, a symlink or something else."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def tree_sizes(root: Path) -> dict[str, int]:
    """Bytes of every file below `root` by relative name.

    Raises:
        StoreError: There is a symlink, a socket or a device in the tree.
    """
    sizes: dict[str, int] = {}
    folders = [("", str(root))]
    while folders:
        prefix, folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append((f"{name}/", entry.path))
                elif entry.is_file(follow_symlinks=False):
                    sizes[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    kind = "a symlink" if entry.is_symlink() else "not a plain file"
                    raise StoreError(f"artifact file is {kind}: `{entry.path}`")
    return sizes


def read_exact(descriptor: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill `out` (bytes, writable) from the file at `offset`.

    Raises:
        StoreError: The file ends too early or cannot be read.
    """
    try:
        while out:
            count = os.preadv(descriptor, [out], offset)
            if count == 0:
                raise StoreError(f"artifact file is too short: `{path}`: ends at byte {offset}")
            out, offset = out[count:], offset + count
    except OSError as error:
        raise StoreError(f"cannot read artifact file: `{path}`: {error.strerror}") from error


def read_bounded(path: Path, limit: int) -> bytes:
    """Bytes of a regular file of at most `limit` bytes.

    Raises:
        StoreError: The file is missing, not plain, or larger than `limit`.
    """
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise StoreError(f"artifact file is too large: `{path}`: {size} bytes, limit {limit}")
        data = bytearray(size)
        read_exact(descriptor, memoryview(data), 0, path)
    return bytes(data)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a regular file."""
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    with open_regular(path) as descriptor:
        left = os.fstat(descriptor).st_size
        offset = 0
        while left:
            view = memoryview(buffer)[: min(left, _CHUNK)]
            read_exact(descriptor, view, offset, path)
            digest.update(view)
            offset, left = offset + len(view), left - len(view)
    return digest.hexdigest()


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


@contextmanager
def disk_errors(target: Path, needed: int) -> Iterator[None]:
    """Turn a failed write into one line that says what is needed and that the work resumes.

    Args:
        target: Folder being written.
        needed: Bytes that were still to be written when this part began.

    Raises:
        PartialResultError: Any operating system error inside the block.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(target, needed) from error
        raise PartialResultError(
            f"cannot write `{target}`: {error.strerror or error}",
            "cure the cause and run the same command again: it resumes where it stopped",
        ) from error


def disk_full(target: Path, needed: int) -> PartialResultError:
    """The error of a disk without room for `needed` more bytes of `target`."""
    free = shutil.disk_usage(existing_parent(target)).free
    asked = f"{format_exactly(needed)} needed, " if needed else ""
    return PartialResultError(
        f"disk full while writing `{target}`: {asked}{format_exactly(free)} free",
        "free some space and run the same command again: it resumes where it stopped",
    )


class WriteLock:
    """Lets one process write an artifact. The kernel drops the lock when the process dies.

    The lock is an advisory `flock` on `<artifact>.lock`, which holds the owner for the message.
    """

    def __init__(self, artifact: Path) -> None:
        self._artifact = artifact
        self._path = artifact.with_name(f"{artifact.name}.lock")
        self._descriptor = -1

    def __enter__(self) -> WriteLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def held(self) -> bool:
        """Whether this process may write."""
        return self._descriptor >= 0

    def acquire(self) -> None:
        """Take the lock at once or not at all.

        Raises:
            StoreError: Another process, or another writer of this one, holds it; or the folder
                cannot be written.
        """
        try:
            while self._descriptor < 0:
                self._descriptor = self._try_once()
        except OSError as error:
            raise StoreError(
                f"cannot lock `{self._artifact}` for writing: {error.strerror}",
                "its lock stands beside it: name a folder where this user may write",
            ) from error

    def _try_once(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_current(descriptor):  # its last owner removed it meanwhile
                os.close(descriptor)
                return -1
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise StoreError(
                f"`{self._artifact}` is being written by {owner}",
                "wait until it ends, or write to another folder",
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock back and remove its file; harmless when it is not held."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1
