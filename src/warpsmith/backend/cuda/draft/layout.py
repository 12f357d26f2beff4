"""A draft's stages and sizes: the host's view of kernels/draft/shape.cuh."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from warpsmith.backend.cuda.draft.formats import HELD
from warpsmith.backend.cuda.large.deal import (
    BLOCK_K,
    GROUP_BLOCKS,
    ROWS,
    Deal,
    LargeStage,
    kernel_tables,
    most_parts,
)
from warpsmith.backend.cuda.large.formats import SLABS
from warpsmith.backend.cuda.large.stream import SlabStages
from warpsmith.backend.cuda.shape import MAX_FEATURES
from warpsmith.checkpoint.dflash import DFlashConfig

COLUMNS = 16  # rows that a launch appends, and positions of a block, at most
DIM = 128  # of a head
MAX_LAYERS = 32
MOST_TYPES = 3  # of a stage's weights (`Run` of kernels/draft/shape.cuh)
BATCH = 64  # rows of queries at a time
ABREAST = 64  # rows that are gathered together
COUNTER_BYTES = 5 * 128  # of steps, and of four stages, each in a line of its own (kernels/draft/block.cuh)
WAITING_BYTES = 16 << 20  # of features that wait, about: several hundred tokens of the largest models


def takes(config: DFlashConfig, vocab: int) -> bool:
    """Whether the kernels are written for this shape beside a target of this vocabulary."""
    c = config
    widths = (c.hidden, c.ffn, c.heads * c.head_dim)
    return (
        all(k % BLOCK_K == 0 for k in widths)
        and c.head_dim == DIM
        and c.block <= COLUMNS
        and c.hidden <= 8192
        and c.layers <= MAX_LAYERS
        and len(c.target_layers) <= MAX_FEATURES
        and c.heads // c.kv_heads <= COLUMNS
        and (c.speaks or vocab) % 4 == 0
    )


class DraftStream(SlabStages):
    """The draft's own weights: fc; keys and values of all layers, for the context; four stages a layer."""

    rounded = HELD

    def __init__(self, config: DFlashConfig, sms: int, stored: Mapping[str, str]) -> None:
        self.config, self.sms, self.stored = config, sms, stored

    @cached_property
    def context(self) -> list[list[tuple[int, str]]]:
        """Keys and values of all layers, those of one type together, so that none is rounded for another's sake; all
        together where there are too many types. A matrix has a number: twice its layer, and one more for
        values."""
        names = [f"layers.{i}.self_attn.{name}" for i in range(self.config.layers) for name in ("k_proj", "v_proj")]
        by_type: dict[str, list[tuple[int, str]]] = {}
        for number, name in enumerate(names):
            by_type.setdefault(self.stored[f"{name}.weight"], []).append((number, name))
        return [by_type[kind] for kind in sorted(by_type)] if len(by_type) <= MOST_TYPES else [list(enumerate(names))]

    @property
    def context_order(self) -> list[int]:
        """Their numbers, as they lie."""
        return [number for part in self.context for number, _ in part]

    @cached_property
    def stages(self) -> list[LargeStage]:
        c = self.config
        kv, inner = c.kv_heads * c.head_dim, c.heads * c.head_dim
        stages = [
            self._stage("fc", len(c.target_layers) * c.hidden, "", [("fc", c.hidden)]),
            self._stage("context", c.hidden, "", *([(name, kv) for _, name in part] for part in self.context)),
        ]
        for i in range(c.layers):
            attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
            rows = [[("q_proj", inner)], [("k_proj", kv)], [("v_proj", kv)]]
            stages += [
                self._stage(f"in.{i}", c.hidden, attention, *rows),
                self._stage(f"out.{i}", inner, attention, [("o_proj", c.hidden)]),
                self._stage(f"mlp_in.{i}", c.hidden, mlp, [("gate_proj", c.ffn), ("up_proj", c.ffn)], woven=True),
                self._stage(f"mlp_out.{i}", c.ffn, mlp, [("down_proj", c.hidden)]),
            ]
        return stages


class HeadStream(SlabStages):
    """A draft's own LM head, or a copy of the target's: of its first rows, or where the target has another layout."""

    def __init__(self, name: str, vocab: int, hidden: int, sms: int, stored: Mapping[str, str]) -> None:
        self.name, self.vocab, self.hidden, self.sms, self.stored = name, vocab, hidden, sms, stored

    @cached_property
    def stages(self) -> list[LargeStage]:
        return [self._stage("head", self.hidden, "", [(self.name, self.vocab)], in_rounds=True)]

    @property
    def nbytes(self) -> int:
        return self.stream_bytes + self.parcels.nbytes + 4 * self.sms


class DraftLayout:
    """Sizes and tables of a draft beside a target whose LM head is dealt as `head` says, or with a head itself."""

    def __init__(self, config: DFlashConfig, stream: DraftStream, head: Deal | HeadStream, capacity: int) -> None:
        self.config, self.stream, self.capacity = config, stream, capacity
        self.copied = head.nbytes if isinstance(head, HeadStream) else 0
        head = head.deals[0] if isinstance(head, HeadStream) else head
        self.deals = [*stream.deals, head]
        self.vocab = sum(piece.rows for part in head.stage.parts for piece in part.pieces)

    @property
    def sms(self) -> int:
        return self.stream.sms

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return kernel_tables(self.deals)

    @property
    def first_parcel(self) -> np.ndarray:
        """[2, sms]: each SM's first parcel of all, and of the block's stages."""
        return self.stream.first_parcel[[0, 2]].astype(np.uint32)

    @property
    def splits(self) -> int:
        """SPLITS."""
        c = self.config
        batches = -(-COLUMNS * (c.heads // c.kv_heads) // BATCH)
        return max(1, min(self.sms // (c.kv_heads * batches), 32))

    @cached_property
    def layer_results(self) -> int:
        """Tiles of results that a stage but the head writes at most."""
        return max(deal.results for deal in self.deals[:-1])

    @property
    def word_bytes(self) -> int:
        """ALL_WORDS of kernels/draft/words.cuh."""
        c, block = self.config, -(-COLUMNS * (17 * 32 + 4) // 128) * 128
        residual = c.hidden // BLOCK_K * block + COLUMNS * (c.hidden // 128) * 4
        layer = (c.heads * DIM + c.ffn) // BLOCK_K * block + COLUMNS * (c.heads + 2 * c.kv_heads) * DIM * 2
        return (2 * c.layers + 2) * residual + c.layers * layer

    def scratch_bytes(self) -> dict[str, int]:
        """Between SMs."""
        parts = COLUMNS * self.config.heads * self.splits
        return {
            "counter": COUNTER_BYTES,
            "words": self.word_bytes,
            "sums": 2 * self.layer_results * COLUMNS * ROWS * 4,
            "head_sums": self.deals[-1].results * COLUMNS * ROWS * 4,
            "parts": parts * DIM * 2,
            "part_stats": parts * 8,
        }

    def memory_bytes(self) -> dict[str, int]:
        """What is remembered of a sequence."""
        c = self.config
        rings = c.layers * c.kv_heads * self.capacity * DIM * 2
        waiting = self.groups * self.group_bytes
        return {"keys": rings, "values": rings, "positions": self.capacity * 4, "waiting": waiting}

    @property
    def group_rows(self) -> int:
        """Rows that a launch appends together."""
        return min(COLUMNS, self.capacity)

    @property
    def group_bytes(self) -> int:
        return COLUMNS * len(self.config.target_layers) * self.config.hidden * 2

    @cached_property
    def groups(self) -> int:
        """Groups of rows that may wait: no more than are remembered."""
        return max(1, min(WAITING_BYTES // self.group_bytes, self.capacity // self.group_rows))

    def vectors(self) -> list[str]:
        """In the order the kernel expects them."""
        names = []
        for i in range(self.config.layers):
            layer = f"layers.{i}."
            names += [layer + "input_layernorm.weight", layer + "post_attention_layernorm.weight"]
            names += [layer + "self_attn.q_norm.weight", layer + "self_attn.k_norm.weight"]
        return [*names, "norm.weight", "hidden_norm.weight"]

    def constants(self, embedding: int) -> dict[str, object]:
        c = self.config
        kinds = {part.type for deal in self.deals for part in deal.stage.parts}
        return {
            "HIDDEN": c.hidden, "FFN": c.ffn, "VOCAB": self.vocab, "LAYERS": c.layers, "HEADS": c.heads,
            "KV_HEADS": c.kv_heads, "EPS": f"{c.eps!r}f", "FEATURES": len(c.target_layers), "ROUND_Q8_0": 1,
            "SLAB_TYPE_MASK": sum(1 << i for i, slab in enumerate(SLABS) if slab in kinds),
            "EMBEDDING_TYPE": embedding, "GROUP_BLOCKS": GROUP_BLOCKS, "SMS": self.sms,
            "TABLE_ENTRIES": max(-(-deal.tables.size // 8) * 8 for deal in self.deals[:-1]),
            "MOST_PARTS": most_parts(self.deals), "LAYER_RESULTS": self.layer_results,
            "FC_RESULTS": self.deals[0].results, "CONTEXT_RESULTS": self.deals[1].results,
        }  # fmt: skip
