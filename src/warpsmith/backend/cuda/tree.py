"""Trees that are made on the device, and the sampler's way through them there."""

from __future__ import annotations

from dataclasses import dataclass

from warpsmith.backend.base import Drafted


@dataclass(frozen=True)
class TreeOnDevice:
    """Takes the place of a `Tree` in a launch."""

    pointer: int  # of a `MadeTree`
    nodes: int  # it has at most

    def __len__(self) -> int:
        return self.nodes


@dataclass(frozen=True)
class WalkedOnDevice(Drafted):
    """Whose commit is queued already, for the whole path."""

    path: list[int]
    overwritten: bool = False  # what a commit of another path would need: the next pass is queued too
