"""Who has what of a stage of the activations-first pass, and where it lies.

A stage is cut twice: K into groups of superblocks, and a group's (tile of 64 rows, superblock) pairs, in order, into a
run for each of its SMs. The host's view of `Stage` and `Run` of kernels/large/shape.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from warpsmith.backend.cuda.large.formats import PARCEL_BLOCKS, SLAB_BYTES, SLABS

ROWS, BLOCK_K, GROUP_BLOCKS = 64, 256, 8
# An H200's SM takes 508 clocks for a superblock of 64 rows in Q4_K (9,472 bytes) and 653 in Q6_K (13,440), where a
# stage has both: as if each had so many bytes more.
SUPERBLOCK_COST = 4400


@dataclass(frozen=True)
class Piece:
    """A tensor's rows in a stage: in order from `first_row`, or woven with its pair (1: gate, 2: up)."""

    tensor: str
    source: str  # the type its rows are handed over in
    first_row: int
    rows: int
    pattern: int = 0


@dataclass(frozen=True)
class Part:
    type: str
    tiles: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Group:
    """Superblocks of K that some SMs have."""

    first_block: int
    blocks: int
    first_sm: int
    sms: int


@dataclass(frozen=True)
class LargeStage:
    name: str
    k: int
    parts: tuple[Part, ...]
    in_rounds: bool = False  # one group of K after another, see `Deal`

    @property
    def blocks(self) -> int:
        return self.k // BLOCK_K

    @property
    def tiles(self) -> int:
        return sum(part.tiles for part in self.parts)

    @cached_property
    def tile_bytes(self) -> np.ndarray:
        """Bytes of one superblock of every tile of 64 rows."""
        return np.repeat([4 * SLAB_BYTES[p.type] for p in self.parts], [p.tiles for p in self.parts])

    @cached_property
    def parcel_blocks(self) -> np.ndarray:
        """Superblocks of a parcel (see `Deal`) of every tile's type."""
        return np.repeat([PARCEL_BLOCKS[p.type] for p in self.parts], [p.tiles for p in self.parts])


def deal_groups(blocks: int, sms: int, most: int = GROUP_BLOCKS) -> list[Group]:
    """Groups of at most so many superblocks, and SMs for each in proportion."""
    count = -(-blocks // most)
    unit = 2 - most % 2  # even sizes where the limit is: both groups of warps have as much to do
    sizes = [unit * (blocks // unit * (i + 1) // count - blocks // unit * i // count) for i in range(count)]
    sizes[sizes.index(min(sizes))] += blocks % unit
    shares = [1] * count
    for _ in range(sms - count):  # always where an SM has most to do
        shares[max(range(count), key=lambda i: sizes[i] / shares[i])] += 1
    groups, block, sm = [], 0, 0
    for size, share in zip(sizes, shares, strict=True):
        groups.append(Group(block, size, sm, share))
        block, sm = block + size, sm + share
    return groups


class Deal:
    """Who has what of a stage: runs of (tile, superblock) pairs for every SM, and where their results go.

    Groups of K have SMs of their own, which leave sums for others to add up: an SM has one run. Or the stage goes over
    K in rounds, where whole tiles stay with an SM: it has a run a group, and adds up its sums itself.

    What an SM copies at once is a parcel: up to two superblocks that follow each other in a run and have one type. In
    memory parcels lie by turns, the first ones of all SMs, then their second ones: so all SMs read near each other, and
    where stages are short the slowest has its weights earlier.
    """

    def __init__(self, stage: LargeStage, sms: int, group_blocks: int = GROUP_BLOCKS) -> None:
        self.stage, self.sms = stage, sms
        self.groups = deal_groups(stage.blocks, sms, group_blocks)
        if stage.in_rounds:
            self.groups = [replace(group, first_sm=0, sms=sms) for group in self.groups]
            self.results, self.tables = stage.tiles, np.arange(stage.tiles + 1)[None]
        else:
            self.results, self.tables = 0, np.zeros((len(self.groups), stage.tiles + 1), np.int64)
        runs = (len(self.groups) if stage.in_rounds else 1), sms
        self.first, self.count, self.tile, self.group_of = (np.zeros(runs, np.int64) for _ in range(4))
        for number, group in enumerate(self.groups):
            turn, own = (number if stage.in_rounds else 0), slice(group.first_sm, group.first_sm + group.sms)
            bounds = self._bounds(group)
            self.first[turn, own], self.count[turn, own] = bounds[:-1], np.diff(bounds)
            self.group_of[turn, own] = number
            if stage.in_rounds:
                self.tile[turn] = bounds[:-1] // group.blocks
                continue
            for sm, (first, end) in enumerate(pairwise(bounds.tolist()), start=group.first_sm):
                self.tile[0, sm] = self.results
                if end > first:
                    covered = np.arange(first // group.blocks, (end - 1) // group.blocks + 1)
                    self.tables[number, covered + 1] = self.results + 1 + np.arange(len(covered))
                    self.results += len(covered)
            # a tile begins where the one before ends; that of the group's first is known from its first SM
            self.tables[number, 0] = self.tile[0, group.first_sm]
        self._place()

    def _bounds(self, group: Group) -> np.ndarray:
        """Where runs of a group's SMs begin among its pairs, and the last one's end."""
        if self.stage.in_rounds:
            return np.arange(self.sms + 1) * self.stage.tiles // self.sms * group.blocks
        cost = np.concatenate([[0], np.cumsum(np.repeat(self.stage.tile_bytes + SUPERBLOCK_COST, group.blocks))])
        return np.searchsorted(cost, np.arange(group.sms + 1) * cost[-1] / group.sms)

    def _place(self) -> None:
        """Where every superblock and every parcel lies, counted from the stage's beginning."""
        stage = self.stage
        tile = np.concatenate([np.repeat(np.arange(stage.tiles), group.blocks) for group in self.groups])
        block = np.concatenate(
            [np.tile(np.arange(group.blocks) + group.first_block, stage.tiles) for group in self.groups]
        )
        sm = np.repeat(np.broadcast_to(np.arange(self.sms), self.count.shape), self.count.ravel())
        run = np.repeat(np.arange(self.count.size), self.count.ravel())
        in_order = np.argsort(sm, kind="stable")  # SM by SM, each's runs one after another
        tile, block, sm, run = (each[in_order] for each in (tile, block, sm, run))
        nbytes, at_once = stage.tile_bytes[tile], stage.parcel_blocks[tile]
        number = np.arange(len(sm))  # from the last change of the run or the type on
        changes = np.concatenate([[True], (np.diff(run) != 0) | (np.diff(nbytes) != 0)])
        number = number - np.maximum.accumulate(np.where(changes, number, 0))
        begins = number % at_once == 0
        parcel, owner = np.cumsum(begins) - 1, sm[begins]
        self.parcels = np.bincount(owner, minlength=self.sms)  # of every SM
        turn = np.arange(len(owner)) - np.repeat(np.cumsum(self.parcels) - self.parcels, self.parcels)
        by_turns = np.lexsort((owner, turn))
        sizes = np.bincount(parcel, nbytes).astype(np.int64)[by_turns]
        self.parcel_at = np.empty_like(sizes)  # SM by SM
        self.parcel_at[by_turns] = np.cumsum(sizes) - sizes
        self.offsets = np.empty((stage.tiles, stage.blocks), np.int64)
        self.offsets[tile, block] = self.parcel_at[parcel] + number % at_once * nbytes
        self.nbytes = np.bincount(sm, nbytes, self.sms).astype(np.int64)


def kernel_tables(deals: Sequence[Deal]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stages, runs and tiles as the kernel reads them. Every round is a stage."""
    stages: list[tuple[int, ...]] = []
    runs: list[list[tuple[int, ...]]] = []
    tiles: list[np.ndarray] = []
    at = 0
    for deal in deals:
        stage = deal.stage
        table = deal.tables.astype(np.uint16).reshape(-1)
        tiles.append(np.pad(table, (0, -table.size % 8)))  # read sixteen bytes at a time
        # neighbours of one type are one part: an SM with rows of both need not pause between them
        same = [(kind, sum(p.tiles for p in parts)) for kind, parts in groupby(stage.parts, key=lambda p: p.type)]
        starts = np.cumsum([0, *(count for _, count in same)])
        ends = [int(starts[j]) if j <= len(same) else 1 << 30 for j in (1, 2)]
        types = [SLABS.index(same[min(j, len(same) - 1)][0]) for j in range(3)]
        for turn in range(len(deal.first)):
            stages.append((at, stage.tiles, len(deal.groups), 0))
            runs.append([])
            for sm in range(deal.sms):
                group = deal.groups[deal.group_of[turn, sm]]
                tile, block = divmod(int(deal.first[turn, sm]), group.blocks)
                runs[-1].append((
                    group.first_block, group.blocks, tile, block, int(deal.count[turn, sm]), int(deal.tile[turn, sm]),
                    *ends, types[0] | types[1] << 8 | types[2] << 16, 0, 0, 0,
                ))  # fmt: skip
        at += tiles[-1].size
    return np.array(stages, np.int32), np.array(runs, np.int32), np.concatenate(tiles)


def most_parts(deals: Sequence[Deal]) -> int:
    """Of a group's tile, where SMs share it."""
    return max(int(np.diff(deal.tables, axis=1).max()) for deal in deals)
