"""Files and directories that appear under their name when they are complete, and not before.

Each writer works under a random name of its own in the same folder, so two writers of one path cannot mix: the last to
finish wins with a whole file. What is unfinished is removed, whatever ended the writing.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from warpsmith.errors import BadRequest


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to write; it replaces `path` at the end, and is gone if the writing fails."""
    part = _part_of(path)
    with open(part, "xb", opener=_open_exclusively) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the name on an empty file
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    _flush(path.parent)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A new directory to fill; it becomes `path` at the end, and is gone if the filling fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part_of(path)
    part.mkdir()
    try:
        yield part
        for file in part.iterdir():
            _flush(file)
        os.rename(part, path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise BadRequest(f"{path} exists already.", "Choose another name, or remove it first.") from None
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _flush(path.parent)


def _open_exclusively(path: str, flags: int) -> int:
    """What already has this name, a link to somewhere else above all, is not written through."""
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _part_of(path: Path) -> Path:
    return path.with_name(f".warpsmith-{secrets.token_hex(8)}.part")


def _flush(path: Path) -> None:
    """Make sure that a file's bytes, or a folder's names, are on the disk, where the system can be asked for that."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
