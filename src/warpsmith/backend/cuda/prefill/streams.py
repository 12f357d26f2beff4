"""Where a prompt's matrices lie: in the row tiles of the one forward pass, or in the slabs of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from warpsmith.backend.cuda.large.formats import EMBEDDINGS, SLABS
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.memory.caches import CACHE_ROWS, CacheRows
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.prefill.products import (
    DIRECT_NARROW_TILES,
    DIRECT_SCALED_NARROW_TILES,
    DIRECT_SCALED_WIDE_TILES,
    DIRECT_SLAB_TILES,
    DIRECT_WIDE_TILES,
    LOGITS,
    NARROW_TILES,
    PLAIN,
    QUEUED,
    RESIDUAL,
    SCALED_NARROW_TILES,
    SCALED_WIDE_TILES,
    SILU,
    SLAB_TILES,
    WIDE_TILES,
    AnyTile,
    shared_memory,
)
from warpsmith.backend.cuda.shape import WIDE, tiles_of
from warpsmith.backend.cuda.weights.formats import Bf16, Format
from warpsmith.model.config import Config

SLOTS = ("MIX_IN", "MIX_OUT", "MLP_IN", "MLP_OUT")  # the matrices of a layer, in the order of either stream
ENDINGS = {"MIX_IN": PLAIN, "MIX_OUT": RESIDUAL, "MLP_IN": SILU, "MLP_OUT": RESIDUAL, "HEAD": LOGITS}


@dataclass(frozen=True)
class Matrix:
    """What a product is told of its matrix, and the tiles that it may be cut into."""

    k: int
    row_tiles: int
    tiles: Sequence[AnyTile]
    types: int = 0  # slabs: a bit each; row tiles: the one type's number in a file
    second: int = 0
    third: int = 0
    part_types: int = 0


class PromptStream(Protocol):
    """A model's weights on the device as the kernels of a prompt see them."""

    config: Config
    architecture: str  # that kernels are built for
    embedding_type: int  # EmbeddingType of large/embedding.cuh, where rows are looked up as the file has them
    embedding_format: Format  # else of the stream or the table
    key_rows: CacheRows
    value_rows: CacheRows

    def suits(self) -> bool:
        """Whether the kernels take the model."""

    def vectors(self) -> list[str]:
        """The F32 vectors in their order; a layer's as common.cuh has them."""

    def numbers(self) -> dict[str, int | bool]:
        """What prompt.cuh says of the stream."""

    def matrix(self, slot: str, layer: int) -> Matrix:
        """One of a layer's, or (HEAD) the LM head."""

    def starts(self, slot: str, layer: int) -> np.ndarray:
        """Where its row tiles begin in the stream; slabs: all their superblocks."""

    def heads(self) -> list[tuple[str, dict[str, object]]]:
        """Builds of the LM head."""


class RowTiles:
    """BF16, Q8_0 and Q4_0 in the stream of row tiles."""

    embedding_type = EMBEDDINGS.index(Bf16.type.name)  # not asked for: rows are looked up in the stream's formats

    def __init__(self, layout: Layout, architecture: str = QUEUED) -> None:
        self.layout, self.config, self.architecture = layout, layout.config, architecture
        self.key_rows = self.value_rows = CACHE_ROWS["f16"]
        self.embedding_format = layout.stream.embedding_format
        self._stages = {(stage.slot, stage.layer): stage for stage in layout.schedule.weight_stages}
        self._starts: dict[tuple[str, int | None], np.ndarray] = {}
        self._formats: dict[tuple[str, int | None], set[Format]] = {}
        for held in layout.stream.parts:
            self._formats.setdefault((held.stage.slot, held.stage.layer), set()).add(held.format)

    def suits(self) -> bool:
        """One type a matrix, widths of whole steps."""
        c = self.config
        fits = all(len(formats) == 1 for formats in self._formats.values())
        widths = c.hidden % 256 == 0 and c.ffn % 512 == 0 and c.value_dim % 512 == 0 and c.heads % 2 == 0
        return fits and widths

    def vectors(self) -> list[str]:
        return self.layout.schedule.vectors()

    def numbers(self) -> dict[str, int | bool]:
        return {"SLABS": False, "TIED": self.config.tied, "HEAD_TILES": tiles_of(self.config.vocab, WIDE)}

    def matrix(self, slot: str, layer: int) -> Matrix:
        place = slot, None if slot == "HEAD" else layer
        stage, (held, *_) = self._stages[place], self._formats[place]
        wide: Sequence[AnyTile]
        narrow: Sequence[AnyTile]
        if self.architecture == QUEUED:
            wide, narrow = (SCALED_WIDE_TILES, SCALED_NARROW_TILES) if held.quantised else (WIDE_TILES, NARROW_TILES)
        elif held.quantised:
            wide, narrow = DIRECT_SCALED_WIDE_TILES, DIRECT_SCALED_NARROW_TILES
        else:
            wide, narrow = DIRECT_WIDE_TILES, DIRECT_NARROW_TILES
        return Matrix(stage.k, stage.tiles, narrow if ENDINGS[slot] == RESIDUAL else wide, held.type.ggml_id)

    def starts(self, slot: str, layer: int) -> np.ndarray:
        stream = self.layout.stream
        if not self._starts:
            self._starts = {key: np.zeros(stage.tiles, np.uint64) for key, stage in self._stages.items()}
            for held, part_start in zip(stream.parts, stream.part_start, strict=True):
                first = stream.first_tiles[held.stage.names[-1]]
                tiles = held.part.first_tile + np.arange(held.part.tiles)
                sm = np.searchsorted(first, tiles, side="right") - 1
                before = tiles - np.maximum(first[sm], held.part.first_tile)  # of the part, that the SM has before
                self._starts[held.stage.slot, held.stage.layer][tiles] = part_start[sm] + before * held.tile_bytes
        return self._starts[slot, None if slot == "HEAD" else layer]

    def heads(self) -> list[tuple[str, dict[str, object]]]:
        kind = self.matrix("HEAD", 0).types
        return [("head", {"HEAD_OCTETS": n, "HEAD_TYPE": kind}) for n in sorted({1, head_octets(self)})]


class SlabStream:
    """K-quants and their like in the slabs of the activations-first pass."""

    embedding_format: Format = Bf16()  # not asked for: the table has types of its own

    def __init__(self, layout: LargeLayout, architecture: str = QUEUED) -> None:
        self.layout, self.config, self.architecture = layout, layout.config, architecture
        self.embedding_type = EMBEDDINGS.index(layout.embedding_type)
        self.key_rows, self.value_rows = layout.key_rows, layout.value_rows

    def suits(self) -> bool:
        return True

    def vectors(self) -> list[str]:
        return self.layout.vectors()

    def numbers(self) -> dict[str, int | bool]:
        return {"SLABS": True, "TIED": False, "HEAD_TILES": 0}

    def matrix(self, slot: str, layer: int) -> Matrix:
        stage = self.layout.stages[self._number(slot, layer)]
        types = [SLABS.index(part.type) for part in stage.parts]
        tiles = SLAB_TILES if self.architecture == QUEUED else DIRECT_SLAB_TILES
        ends = [*np.cumsum([part.tiles for part in stage.parts]).tolist(), stage.tiles, stage.tiles]
        return Matrix(
            k=stage.k,
            row_tiles=stage.tiles,
            tiles=tiles[:1] if slot == "HEAD" else tiles,
            types=sum({1 << t for t in types}),
            second=ends[0],
            third=ends[1],
            part_types=sum(t << 8 * i for i, t in enumerate(types)),
        )

    def starts(self, slot: str, layer: int) -> np.ndarray:
        return self.layout.offsets(self._number(slot, layer)).reshape(-1)

    def _number(self, slot: str, layer: int) -> int:
        return 4 * self.config.layers if slot == "HEAD" else 4 * layer + SLOTS.index(slot)

    def heads(self) -> list[tuple[str, dict[str, object]]]:
        return []  # it is a product like the others


def head_octets(stream: PromptStream) -> int:
    """Octets of tokens whose logits are made together: their activations lie in shared memory."""
    return min(8, (shared_memory(stream.architecture) - 4096) // (stream.config.hidden * 16))
