"""Rows of numbers that stay where they were computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class Rows(ABC):
    """Rows of float32, where the backend has them that computed them. Selecting moves nothing; `numpy` brings them.

    Rows of an `Output` can be read until the backend computes again: `prefill`, `forward`, `decode`, `mtp`, `head`.
    `verify`, `commit`, `snapshot` and `restore` leave them alone. Whoever needs them longer takes `keep()`.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @abstractmethod
    def numpy(self) -> np.ndarray:
        """On the host, float32 [rows, width]; not to be written to."""

    @abstractmethod
    def __getitem__(self, rows: slice | Sequence[int]) -> Rows: ...

    @abstractmethod
    def groups(self, chosen: Sequence[int], of: int) -> Rows:
        """Of columns that are `of` equal groups side by side (features: one a layer), the chosen groups."""

    @abstractmethod
    def keep(self) -> Rows:
        """The same rows on the same device, in memory of their own."""

    def row(self, number: int) -> np.ndarray:
        """One row on the host, float32 [width]."""
        return self[[number]].numpy()[0]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * 4


class HostRows(Rows):
    """An array that nobody else writes to."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self._array.shape
        return rows, width

    def numpy(self) -> np.ndarray:
        return self._array

    def __getitem__(self, rows: slice | Sequence[int]) -> HostRows:
        return HostRows(self._array[rows])

    def groups(self, chosen: Sequence[int], of: int) -> HostRows:
        apart = self._array.reshape(len(self), of, -1)
        return HostRows(apart[:, list(chosen)].reshape(len(self), -1))

    def keep(self) -> HostRows:
        return self

    def row(self, number: int) -> np.ndarray:
        return self._array[number]
