"""The activations-first forward pass: how its work is dealt, where everything lies, and how weights get there.

For models whose weights are K-quants, or whose rows are too long for the registers: activations of all nodes are held,
weights pass by (see kernels/large/forward.cu). The host's view of kernels/large/shape.cuh and kernels/large/slab.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from warpsmith.backend.cuda.large.formats import EMBEDDINGS, ROUNDED, SLAB_BYTES, SLABS, SOURCES
from warpsmith.backend.cuda.memory.caches import CACHE_ROWS
from warpsmith.backend.cuda.shape import COLUMNS, HEAD_DIM, HISTORY, MAX_OWN_LOGITS, STATE_DIM
from warpsmith.backend.tree import MAX_NODES
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.model.config import Config
from warpsmith.model.weights import expected_shapes

ROWS, BLOCK_K, GROUP_BLOCKS, FEWER_GROUP_BLOCKS = 64, 256, 8, 7
# An H200's SM takes 508 clocks for a superblock of 64 rows in Q4_K (9,472 bytes) and 653 in Q6_K (13,440), where a
# stage has both: as if each had so many bytes more.
SUPERBLOCK_COST = 4400
KEPT_STATES = 5  # of a DeltaNet's channels while a tree is walked


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


def takes(config: Config) -> bool:
    """Whether the kernels are written for this shape."""
    c = config
    widths = (c.hidden, c.ffn, c.value_dim, c.heads * c.head_dim)
    return (
        all(k % BLOCK_K == 0 for k in widths)
        and (c.head_dim, c.rotary_dim, c.key_head_dim, c.value_head_dim, c.conv_kernel) == (HEAD_DIM, 64, 128, 128, 4)
        and c.hidden <= 8192
        and c.layers <= 128
        and 128 % c.kv_heads == 0
        and c.heads // c.kv_heads <= 8
    )


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
    """Who has what of a stage: a run of (tile, superblock) pairs for every SM, and where its results go."""

    def __init__(self, stage: LargeStage, sms: int, group_blocks: int = GROUP_BLOCKS) -> None:
        self.stage, self.groups = stage, deal_groups(stage.blocks, sms, group_blocks)
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
            cost = np.concatenate([[0], np.cumsum(weight + SUPERBLOCK_COST)])
            bounds = np.searchsorted(cost, np.arange(group.sms + 1) * cost[-1] / group.sms)
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
        self, name: str, k: int, block: str, *groups: Sequence[tuple[str, int]], woven: bool = False
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
        return LargeStage(name, k, tuple(parts))

    @cached_property
    def deals(self) -> list[Deal]:
        return [Deal(stage, self.sms, self.group_blocks) for stage in self.stages]

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

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return kernel_tables(self.deals)


def kernel_tables(deals: Sequence[Deal]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stages, runs and tiles as the kernel reads them."""
    sms = len(deals[0].first)
    stages = np.zeros((len(deals), 4), np.int32)
    runs = np.zeros((len(deals), sms, 12), np.int32)
    tiles: list[np.ndarray] = []
    at = 0
    for i, deal in enumerate(deals):
        stage = deal.stage
        stages[i, :3] = at, stage.tiles, len(deal.groups)
        table = deal.tables.astype(np.uint16).reshape(-1)
        tiles.append(np.pad(table, (0, -table.size % 8)))  # read sixteen bytes at a time
        at += tiles[-1].size
        # neighbours of one type are one part: an SM with rows of both need not pause between them
        same = [(kind, sum(p.tiles for p in parts)) for kind, parts in groupby(stage.parts, key=lambda p: p.type)]
        starts = np.cumsum([0, *(count for _, count in same)])
        ends = [int(starts[j]) if j <= len(same) else 1 << 30 for j in (1, 2)]
        types = [SLABS.index(same[min(j, len(same) - 1)][0]) for j in range(3)]
        for sm in range(sms):
            group = deal.groups[deal.group_of[sm]]
            tile, block = divmod(int(deal.first[sm]), group.blocks)
            runs[i, sm, :9] = (
                group.first_block, group.blocks, tile, block, deal.count[sm], deal.tile[sm], *ends,
                types[0] | types[1] << 8 | types[2] << 16,
            )  # fmt: skip
    return stages, runs, np.concatenate(tiles)


def most_parts(deals: Sequence[Deal]) -> int:
    """Of a group's tile, where SMs share it."""
    return max(int(np.diff(deal.tables, axis=1).max()) for deal in deals)


class LargeLayout(SlabStages):
    """Sizes and offsets for one model on one number of SMs, with keys and values kept as named types."""

    def __init__(
        self, config: Config, sms: int, stored: Mapping[str, str], cache_types: tuple[str, str] = ("f16", "f16")
    ) -> None:
        self.config, self.sms, self.stored = config, sms, stored
        self.key_rows, self.value_rows = (CACHE_ROWS[name] for name in cache_types)
        self.delta_layers, self.attention_layers = len(config.recurrent_layers), len(config.attention_layers)
        self.splits = 128 // config.kv_heads
        # Fewer superblocks leave more room for weights on their way, where that does not cut the residual stream into
        # more groups. (A draft that borrows the head counts on as many.)
        blocks = config.hidden // BLOCK_K
        if -(-blocks // FEWER_GROUP_BLOCKS) == -(-blocks // GROUP_BLOCKS):
            self.group_blocks = FEWER_GROUP_BLOCKS

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

    # -- per sequence, in bytes -----------------------------------------------------------------------------------

    @property
    def delta_bytes(self) -> int:
        return self.delta_layers * self.config.value_dim * STATE_DIM * 4

    @property
    def history_bytes(self) -> int:
        return self.delta_layers * HISTORY * self.config.conv_channels * 4

    @property
    def caches(self) -> int:
        """Key heads of all layers, each with a contiguous cache of its own."""
        return self.attention_layers * self.config.kv_heads

    def cache_bytes(self, context: int) -> tuple[int, int]:
        """Keys, and values."""
        rows = self.caches * context
        return rows * self.key_rows.row_bytes, rows * self.value_rows.row_bytes

    def pending_bytes(self) -> dict[str, int]:
        c, nodes = self.config, self.delta_layers * MAX_NODES * 4
        keys, values = self.cache_bytes(MAX_NODES)
        return {
            "pending_raw": nodes * c.conv_channels,
            "pending_key": nodes * c.key_heads * STATE_DIM,
            "pending_write": nodes * c.value_dim,
            "pending_fade": nodes * c.value_dim // COLUMNS,
            "pending_keys": keys,
            "pending_values": values,
        }

    # -- what a pass writes ---------------------------------------------------------------------------------------

    def scratch_bytes(self, nodes: int) -> dict[str, int]:
        """Between SMs, for trees of up to `nodes` nodes."""
        c = self.config
        parts = nodes * c.heads * (self.splits + 2)
        return {
            "counter": 6 * 128,
            "words": max(self.word_bytes(1), self.word_bytes(nodes)),
            "sums": self.layer_results * max(2, nodes) * ROWS * 4,  # one node's are in two places
            "head_sums": self.deals[-1].results * nodes * ROWS * 4,
            "queries": nodes * c.heads * HEAD_DIM * 2,
            "parts": parts * HEAD_DIM * 2,
            "part_stats": parts * 8,
            "best": nodes * self.sms * 8,
            "branch_state": KEPT_STATES * c.value_dim * STATE_DIM * 4,
        }

    @cached_property
    def sum_tags(self) -> int:
        """Last bits of sums that tell which stage of a pass they are of from which one wrote to the same place before,
        and from none: they are all ones (see kernels/large/words.cuh)."""
        results = [deal.results for deal in self.deals[:-1]]
        tags = 7
        for place in {count - 1 for count in results}:
            writers = [stage for stage, count in enumerate(results) if place < count]
            turns = [[stage for stage in writers if stage % 2 == turn] for turn in (0, 1)]  # one node's two places
            while any((a ^ b) & tags == 0 for each in (writers, *turns) for a, b in pairwise([-1, *each])):
                tags = 2 * tags + 1
        return tags

    @cached_property
    def layer_results(self) -> int:
        """Tiles of results that a layer's stage writes at most."""
        return max(deal.results for deal in self.deals[:-1])

    def word_bytes(self, nodes: int) -> int:
        """What SMs poll for in the build for so many nodes (see kernels/large/words.cuh)."""
        c = self.config
        if nodes == 1:
            squares, block, places = max(self.sms, c.hidden // 128), BLOCK_K // 2, 2
        else:
            squares, block, places = c.hidden // 128, -(-nodes * (17 * 8 + 1) // 32) * 32, 1
        residual = c.hidden // BLOCK_K * block + -(-nodes * squares // 4) * 4
        mixed = max(c.heads * c.head_dim, c.value_dim) // BLOCK_K * block + nodes * c.value_dim // 8
        if nodes > 1:  # a DeltaNet's before its heads are normed, and q and k
            mixed += nodes * (c.value_dim // 2 + 2 * c.key_heads * STATE_DIM)
        return places * 4 * (2 * residual + mixed + c.ffn // BLOCK_K * block)

    @property
    def samples(self) -> bool:
        """Whether an SM has room for its logits while a token is sampled (see candidates.cuh)."""
        return -(-self.stages[-1].tiles // self.sms) * ROWS <= MAX_OWN_LOGITS

    @property
    def table_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables) + self.sms * 8 + self.config.layers

    @property
    def embedding_bytes(self) -> int:
        c = self.config
        return c.vocab * TYPES[self.embedding_type].row_bytes(c.hidden)

    @property
    def embedding_type(self) -> str:
        stored = self.stored["token_embd.weight"]
        return stored if stored in EMBEDDINGS else ROUNDED

    def vectors(self) -> list[str]:
        """The F32 vectors in the order the kernel expects them."""
        names: list[str] = []
        for layer, recurrent in enumerate(self.config.recurrent):
            block = f"blk.{layer}."
            names += [block + "attn_norm.weight", block + "post_attention_norm.weight"]
            if recurrent:
                names += [block + n for n in ("ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_norm.weight")]
            else:
                names += [block + "attn_q_norm.weight", block + "attn_k_norm.weight"]
        return [*names, "output_norm.weight"]

    @property
    def vector_bytes(self) -> int:
        shapes = expected_shapes(self.config)
        return sum(math.prod(shapes[name]) for name in self.vectors()) * 4

    # -- compile-time constants -----------------------------------------------------------------------------------

    def constants(self, nodes: int) -> dict[str, object]:
        c = self.config
        mask = sum(1 << i for i, slab in enumerate(SLABS) if any(p.type == slab for s in self.stages for p in s.parts))
        return {
            "HIDDEN": c.hidden, "FFN": c.ffn, "VOCAB": c.vocab, "LAYERS": c.layers, "HEADS": c.heads,
            "KV_HEADS": c.kv_heads, "KEY_HEADS": c.key_heads, "VALUE_HEADS": c.value_heads, "EPS": f"{c.eps!r}f",
            "SLAB_TYPE_MASK": mask, "EMBEDDING_TYPE": EMBEDDINGS.index(self.embedding_type),
            "GROUP_BLOCKS": self.group_blocks, "SMS": self.sms, "NODES": nodes,
            "DELTA_LAYERS": self.delta_layers, "KEY_TYPE": self.key_rows.number, "VALUE_TYPE": self.value_rows.number,
            "LAYER_RESULTS": self.layer_results, "SUM_TAGS": self.sum_tags,
            "MOST_PARTS": most_parts(self.deals),
            "TABLE_ENTRIES": max(-(-deal.tables.size // 8) * 8 for deal in self.deals[:-1]),
        }  # fmt: skip
