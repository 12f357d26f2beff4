"""A stream of slabs: the stages of a pass, dealt to SMs, and where each SM's weights lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from warpsmith.backend.cuda.large.deal import GROUP_BLOCKS, ROWS, Deal, LargeStage, Part, Piece, kernel_tables
from warpsmith.backend.cuda.large.formats import ROUNDED, SOURCES

PARCEL_UNIT = 128  # bytes; of every type's superblocks of 64 rows a divisor
PARCELS_AHEAD = 32  # that a copier looks up at once, the next ones early: it reads that far beyond its last, and again


class SlabStages:
    """Stages of products on one number of SMs: what each SM reads, in order, and where its results go."""

    sms: int
    stored: Mapping[str, str]  # types of the tensors, as they are handed over
    rounded: str = ROUNDED  # what rows of different types that share tiles are handed over as
    group_blocks: int = GROUP_BLOCKS

    @property
    def stages(self) -> list[LargeStage]:
        raise NotImplementedError

    def _stage(
        self,
        name: str,
        k: int,
        block: str,
        *groups: Sequence[tuple[str, int]],
        woven: bool = False,
        in_rounds: bool = False,
    ) -> LargeStage:
        parts, tiles = [], 0
        for group in groups:
            names = [f"{block}{tensor}.weight" for tensor, _ in group]
            kinds = {self.stored[n] for n in names}
            slabs = {SOURCES.get(kind, SOURCES[self.rounded]).slab for kind in kinds}
            slab = (
                slabs.pop() if len(slabs) == 1 else SOURCES[self.rounded].slab
            )  # rows that share a tile have one type
            row, pieces = tiles * ROWS, []
            for number, (tensor, (_, count)) in enumerate(zip(names, group, strict=True), start=1):
                kind = self.stored[tensor]
                source = kind if kind in SOURCES and SOURCES[kind].slab == slab else self.rounded
                pieces.append(Piece(tensor, source, row, count, number if woven else 0))
                row += count
            count = -(-(row - tiles * ROWS) // ROWS)
            parts.append(Part(slab, count, tuple(pieces)))
            tiles += count
        return LargeStage(name, k, tuple(parts), in_rounds)

    @cached_property
    def deals(self) -> list[Deal]:
        return [Deal(stage, self.sms, self.group_blocks) for stage in self.stages]

    @property
    def stream_bytes(self) -> int:
        return int(sum(deal.nbytes.sum() for deal in self.deals))

    @cached_property
    def stage_at(self) -> np.ndarray:
        """Where each stage begins in the stream."""
        return np.cumsum([0, *(int(deal.nbytes.sum()) for deal in self.deals)])[:-1]

    @cached_property
    def first_parcel(self) -> np.ndarray:
        """[stages, sms]: the number, in `parcels`, of each SM's first parcel of each stage."""
        counts = np.stack([deal.parcels for deal in self.deals])
        return np.cumsum(counts, axis=0) - counts + np.cumsum([0, *counts.sum(axis=0)])[:-1]

    @cached_property
    def parcels(self) -> np.ndarray:
        """Where every parcel begins, in PARCEL_UNITs: an SM's in the order in which it copies them, SM after SM."""
        places = np.zeros(sum(len(deal.parcel_at) for deal in self.deals) + 2 * PARCELS_AHEAD, np.uint32)
        for deal, at, first in zip(self.deals, self.stage_at, self.first_parcel, strict=True):
            before = np.cumsum(deal.parcels) - deal.parcels
            own = np.arange(len(deal.parcel_at)) + np.repeat(first - before, deal.parcels)
            places[own] = (at + deal.parcel_at) // PARCEL_UNIT
        return places

    def offsets(self, stage: int) -> np.ndarray:
        """[tiles, superblocks]: where the 64 rows of every pair begin in the stream."""
        return (self.deals[stage].offsets + self.stage_at[stage]).astype(np.uint64)

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return kernel_tables(self.deals)
