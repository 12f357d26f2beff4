"""The activations-first forward pass: how its work is dealt, where everything lies, and how weights get there.

For models whose weights are K-quants, or whose rows are too long for the registers: activations of all nodes are held,
weights pass by (see kernels/large.cu). The host's view of kernels/large_shape.cuh and kernels/slab.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from warpsmith.backend.tree import MAX_NODES
from warpsmith.model.config import Config

ROWS, BLOCK_K, GROUP_BLOCKS = 64, 256, 8
COLUMNS = (8, 16, 24)  # nodes a build takes
MAX_STOPS, MAX_FEATURES = 16, 8
HEAD_DIM, STATE_DIM, TAILS = 256, 128, 2

SLABS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "HALF")  # SlabType
SLAB_BYTES = {"Q4_K": 2368, "Q5_K": 2880, "Q6_K": 3360, "Q8_0": 4416, "HALF": 8256}
# What a type of a file is in the stream, exactly, and its number for `pack`.
SOURCES = {
    "Q4_K": ("Q4_K", 0), "Q5_K": ("Q5_K", 1), "Q6_K": ("Q6_K", 2), "Q8_0": ("Q8_0", 3), "F16": ("HALF", 4),
    "BF16": ("HALF", 5), "Q4_0": ("Q8_0", 6), "Q5_0": ("Q8_0", 7), "IQ4_NL": ("Q8_0", 8),
}  # fmt: skip
EMBEDDINGS = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # EmbeddingType


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


def deal_groups(blocks: int, sms: int) -> list[Group]:
    """Groups of at most GROUP_BLOCKS superblocks, and SMs for each in proportion."""
    count = -(-blocks // GROUP_BLOCKS)
    pairs = [blocks // 2 * (i + 1) // count - blocks // 2 * i // count for i in range(count)]
    sizes = [2 * n for n in pairs]  # even: both groups of warps have as much to do
    sizes[-1] += blocks % 2
    shares = [1] * count
    for _ in range(sms - count):  # always where an SM has most to do
        shares[max(range(count), key=lambda i: sizes[i] / shares[i])] += 1
    groups, block, sm = [], 0, 0
    for size, share in zip(sizes, shares, strict=True):
        groups.append(Group(block, size, sm, share))
        block, sm = block + size, sm + share
    return groups


class Deal:
    """Who has what of a stage: a run of (tile, superblock) pairs for every SM, and where its results go."""

    def __init__(self, stage: LargeStage, sms: int) -> None:
        self.stage, self.groups = stage, deal_groups(stage.blocks, sms)
        self.first = np.zeros(sms, np.int64)
        self.count = np.zeros(sms, np.int64)
        self.tile = np.zeros(sms, np.int64)
        self.group_of = np.zeros(sms, np.int64)
        self.nbytes = np.zeros(sms, np.int64)
        self.tables = np.zeros((len(self.groups), stage.tiles + 1), np.int64)
        self.offsets = np.zeros((stage.tiles, stage.blocks), np.int64)  # from the beginning of its SM's share
        self.owner = np.zeros((stage.tiles, stage.blocks), np.int64)
        results = 0
        for number, group in enumerate(self.groups):
            weight = np.repeat(stage.tile_bytes, group.blocks)
            before = np.concatenate([[0], np.cumsum(weight)])
            bounds = np.searchsorted(before, np.arange(group.sms + 1) * before[-1] / group.sms)
            for i in range(group.sms):
                sm, first, end = group.first_sm + i, int(bounds[i]), int(bounds[i + 1])
                self.first[sm], self.count[sm], self.group_of[sm], self.tile[sm] = first, end - first, number, results
                self.nbytes[sm] = before[end] - before[first]
                pairs = np.arange(first, end)
                tile, block = pairs // group.blocks, pairs % group.blocks + group.first_block
                self.offsets[tile, block] = before[first:end] - before[first]
                self.owner[tile, block] = sm
                if end > first:
                    covered = np.arange(first // group.blocks, (end - 1) // group.blocks + 1)
                    self.tables[number, covered + 1] = results + 1 + np.arange(len(covered))
                    results += len(covered)
            # a tile begins where the one before ends; that of the group's first is known from its first SM
            self.tables[number, 0] = self.tile[group.first_sm]
        self.results = results


class LargeLayout:
    """Sizes and offsets for one model on one number of SMs."""

    def __init__(self, config: Config, sms: int, stored: Mapping[str, str]) -> None:
        self.config, self.sms, self.stored = config, sms, stored
        self.delta_layers, self.attention_layers = len(config.recurrent_layers), len(config.attention_layers)
        self.splits = 128 // config.kv_heads

    @cached_property
    def stages(self) -> list[LargeStage]:
        c = self.config
        stages: list[LargeStage] = []
        for layer, recurrent in enumerate(c.recurrent):
            block = f"blk.{layer}."
            if recurrent:
                rows = [
                    [("attn_qkv", c.conv_channels)],
                    [("attn_gate", c.value_dim)],
                    [("ssm_beta", c.value_heads), ("ssm_alpha", c.value_heads)],
                ]
                out, out_k = "ssm_out", c.value_dim
            else:
                kv = c.kv_heads * c.head_dim
                rows = [[("attn_q", 2 * c.heads * c.head_dim)], [("attn_k", kv)], [("attn_v", kv)]]
                out, out_k = "attn_output", c.heads * c.head_dim
            stages += [
                self._stage(f"in.{layer}", c.hidden, block, *rows),
                self._stage(f"mix_out.{layer}", out_k, block, [(out, c.hidden)]),
                self._stage(f"mlp_in.{layer}", c.hidden, block, [("ffn_gate", c.ffn), ("ffn_up", c.ffn)], woven=True),
                self._stage(f"mlp_out.{layer}", c.ffn, block, [("ffn_down", c.hidden)]),
            ]
        head = "token_embd" if c.tied else "output"
        return [*stages, self._stage("head", c.hidden, "", [(head, c.vocab)])]

    def _stage(
        self, name: str, k: int, block: str, *groups: Sequence[tuple[str, int]], woven: bool = False
    ) -> LargeStage:
        parts, tiles = [], 0
        for group in groups:
            names = [f"{block}{tensor}.weight" for tensor, _ in group]
            kinds = {self.stored[n] for n in names}
            slabs = {SOURCES[kind][0] if kind in SOURCES else "HALF" for kind in kinds}
            slab = slabs.pop() if len(slabs) == 1 else "HALF"  # rows that share a tile have one type
            row, pieces = tiles * ROWS, []
            for number, (tensor, (_, count)) in enumerate(zip(names, group, strict=True), start=1):
                kind = self.stored[tensor]
                source = kind if SOURCES.get(kind, ("", 0))[0] == slab else "BF16"
                pieces.append(Piece(tensor, source, row, count, number if woven else 0))
                row += count
            count = -(-(row - tiles * ROWS) // ROWS)
            parts.append(Part(slab, count, tuple(pieces)))
            tiles += count
        return LargeStage(name, k, tuple(parts))

    @cached_property
    def deals(self) -> list[Deal]:
        return [Deal(stage, self.sms) for stage in self.stages]

    @cached_property
    def stage_start(self) -> np.ndarray:
        """[stages, sms]: where each SM's share of each stage begins in the stream."""
        nbytes = np.stack([deal.nbytes for deal in self.deals])
        inside = np.cumsum(nbytes, axis=0) - nbytes
        return inside + self.stream_start

    @cached_property
    def stream_start(self) -> np.ndarray:
        totals = sum(deal.nbytes for deal in self.deals)
        return np.concatenate([[0], np.cumsum(totals)[:-1]])

    @property
    def stream_bytes(self) -> int:
        return int(sum(deal.nbytes.sum() for deal in self.deals))

    def offsets(self, stage: int) -> np.ndarray:
        """[tiles, superblocks]: where the 64 rows of every pair begin in the stream."""
        deal = self.deals[stage]
        return (deal.offsets + self.stage_start[stage][deal.owner]).astype(np.uint64)

    @property
    def results(self) -> int:
        """Tiles of results that a stage writes, at most."""
        return max(deal.results for deal in self.deals)

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stages, runs and tiles as the kernel reads them."""
        stages = np.zeros((len(self.deals), 4), np.int32)
        runs = np.zeros((len(self.deals), self.sms, 12), np.int32)
        tiles: list[np.ndarray] = []
        at = 0
        for i, deal in enumerate(self.deals):
            stage = deal.stage
            stages[i, :3] = at, stage.tiles, len(deal.groups)
            table = deal.tables.astype(np.uint16).reshape(-1)
            tiles.append(np.pad(table, (0, table.size % 2)))  # read two at a time
            at += tiles[-1].size
            starts = np.cumsum([0, *(p.tiles for p in stage.parts)])
            ends = [int(starts[min(j, len(stage.parts))]) if j <= len(stage.parts) else 1 << 30 for j in (1, 2)]
            types = [SLABS.index(stage.parts[min(j, len(stage.parts) - 1)].type) for j in range(3)]
            for sm in range(self.sms):
                group = deal.groups[deal.group_of[sm]]
                tile, block = divmod(int(deal.first[sm]), group.blocks)
                runs[i, sm, :9] = (
                    group.first_block, group.blocks, tile, block, deal.count[sm], deal.tile[sm], *ends,
                    types[0] | types[1] << 8 | types[2] << 16,
                )  # fmt: skip
        return stages, runs, np.concatenate(tiles)

    def constants(self, nodes: int) -> dict[str, object]:
        c = self.config
        mask = sum(1 << i for i, slab in enumerate(SLABS) if any(p.type == slab for s in self.stages for p in s.parts))
        return {
            "HIDDEN": c.hidden, "FFN": c.ffn, "VOCAB": c.vocab, "LAYERS": c.layers, "HEADS": c.heads,
            "KV_HEADS": c.kv_heads, "KEY_HEADS": c.key_heads, "VALUE_HEADS": c.value_heads, "EPS": f"{c.eps!r}f",
            "SLAB_TYPE_MASK": mask, "EMBEDDING_TYPE": EMBEDDINGS.index(self.stored["token_embd.weight"]),
            "GROUP_BLOCKS": GROUP_BLOCKS, "SMS": self.sms, "NODES": nodes,
            "TABLE_ENTRIES": 1 + max(deal.tables.size for deal in self.deals[:-1]),
        }  # fmt: skip


class LargeRequest(ctypes.Structure):
    """`Request` of large_shape.cuh."""

    _fields_ = [
        *((name, ctypes.c_int) for name in
          ("nodes", "length", "steps", "stops", "features", "want_logits", "want_hidden", "pad")),
        ("tokens", ctypes.c_int * MAX_NODES),
        ("parents", ctypes.c_int * MAX_NODES),
        ("stop_ids", ctypes.c_int * MAX_STOPS),
        ("feature_layers", ctypes.c_int * MAX_FEATURES),
    ]  # fmt: skip


class LargeParams(ctypes.Structure):
    """`Params` of large_shape.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in
          ("stream", "stream_start", "stages", "runs", "tiles", "recurrent", "embedding", "vectors", "rope", "delta",
           "history", "keys", "values")),
        ("context", ctypes.c_longlong),
        *((name, ctypes.c_void_p) for name in
          ("counter", "sums", "x", "x_squares", "y", "y_squares", "h", "queries", "parts", "part_stats", "best",
           "pending_raw", "pending_key", "pending_write", "pending_fade", "pending_keys", "pending_values",
           "branch_state", "out_tokens", "out_count", "out_logits", "out_features", "out_hidden", "profile")),
    ]  # fmt: skip


class LargePack(ctypes.Structure):
    """`Pack` of large_pack.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "stream", "offsets")),
        *((name, ctypes.c_int) for name in
          ("source", "first_row", "offset", "count", "blocks", "row_bytes", "pattern")),
    ]  # fmt: skip
