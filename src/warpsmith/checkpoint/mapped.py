"""A model file's bytes, mapped and not read.

A page of a mapped file that was cut off since cannot be read: the system ends the process (SIGBUS). So whoever wants
bytes asks for a view just before he reads them, and the file's length is looked at then.
"""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from warpsmith.errors import BadFile, DoesNotFit


class MappedFile:
    """A regular file that is not empty. The mapping lives as long as any view of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self.mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                size = path.stat().st_size
                raise DoesNotFit(
                    f"{path} with its {size / 1e9:.1f} GB cannot be mapped: {error.strerror}.",
                    "Give the process more address space (ulimit -v), or use a smaller model.",
                ) from None
        self._bytes = np.frombuffer(self.mapped, np.uint8)

    def __len__(self) -> int:
        return len(self._bytes)

    def view(self, start: int, end: int) -> NDArray[np.uint8]:
        """Some bytes, to be read at once."""
        self.check()
        return self._bytes[start:end]

    def check(self) -> None:
        """Refuse a file of which a part is gone."""
        if self.mapped.size() < len(self.mapped):
            raise BadFile(
                f"{self.path} has become shorter since it was opened.", "Load the model again, from a complete file."
            )
