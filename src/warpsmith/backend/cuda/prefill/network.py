"""Every launch of a piece of a prompt, layer by layer, with all of its arguments."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from warpsmith.backend.cuda.memory.driver import Buffer, Device, Pinned
from warpsmith.backend.cuda.prefill.heads import RowTileHead, SlabHead
from warpsmith.backend.cuda.prefill.kernels import PromptKernels
from warpsmith.backend.cuda.prefill.plan import (
    PREP_SHARED,
    ROWS_A_CTA,
    SHORT_SHARED,
    attention_constants,
    scan_shared,
    scans_of,
)
from warpsmith.backend.cuda.prefill.products import QUEUED, SILU, Launcher, Product, Step
from warpsmith.backend.cuda.prefill.streams import ENDINGS, SLOTS, PromptStream, head_octets
from warpsmith.backend.cuda.prefill.structures import Attention, Delta, Embed, Gemm, Head, Piece, Rows, Span
from warpsmith.backend.cuda.shape import STATE_DIM, chunks_of
from warpsmith.model.weights import expected_shapes


class DeviceSequence(Protocol):
    """What is needed of a state on the device."""

    length: int
    context: int
    delta: Buffer
    history: Buffer
    keys: Buffer
    values: Buffer


@dataclass(frozen=True)
class ModelOnDevice:
    """What prompts read of the model, and where their logits go."""

    stream: Buffer
    embedding: Buffer
    vectors: Buffer
    rope: Buffer
    logits: Buffer
    sms: int


@dataclass
class DeltaMixer:
    arguments: Delta
    prep: Step
    scans: dict[int, Step]  # by chunks that are on their way
    output: Step
    short: Step | None  # all of them, of one chunk; none without clusters


@dataclass
class AttentionMixer:
    arguments: Attention
    rows: Step
    steps: dict[tuple[str, int, int], Step] = field(default_factory=dict)  # flash and merge, by their queries


@dataclass
class Layer:
    mixer: DeltaMixer | AttentionMixer
    enter: Product
    leave: Product
    mlp_in: Product
    mlp_out: Product


class Network:
    """The launches. They run on the state that was taken last."""

    def __init__(
        self,
        device: Device,
        weights: PromptStream,
        model: ModelOnDevice,
        buffers: Mapping[str, Buffer],
        kernels: PromptKernels,
        launcher: Launcher,
        piece: Piece,
        asked: Span,
    ) -> None:
        """`buffers`, `piece`: of the piece that is run; `asked`: where its tokens are whose logits are wanted."""
        c = self._config = weights.config
        self._weights, self._model, self._kernels, self._launcher = weights, model, kernels, launcher
        self._piece, self._at = piece, {name: buffer.pointer for name, buffer in buffers.items()}
        self._taken: tuple[int, ...] = ()  # where the state is that launches have
        names, shapes = weights.vectors(), expected_shapes(c)
        ends = np.cumsum([math.prod(shapes[n]) for n in names])
        self._vector = {
            n: model.vectors.pointer + 4 * int(e - math.prod(shapes[n])) for n, e in zip(names, ends, strict=True)
        }
        places = [*((slot, layer) for layer in range(c.layers) for slot in SLOTS), ("HEAD", c.layers)]
        tables = [weights.starts(*place) for place in places]
        self._starts = device.upload(np.concatenate(tables))
        before = np.cumsum([0, *map(len, tables)])
        self._start = {p: self._starts.pointer + 8 * int(first) for p, first in zip(places, before, strict=False)}

        self.embed_arguments = Embed(
            stream=model.stream.pointer,
            head_start=self._start["HEAD", c.layers],
            table=model.embedding.pointer,
            norm=self._vector["blk.0.attn_norm.weight"],
            residual=self._at["residual"],
            out=self._at["x"],
            squares=self._at["squares"],
            best=self._at["best"],
        )
        embed = kernels.get("embed", EMBEDDING_TYPE=weights.embedding_type)
        self.embed = self._step(embed, 128, self.embed_arguments, piece)
        self.layers = [self._layer(number) for number in range(c.layers)]
        self.head: RowTileHead | SlabHead
        if weights.heads():
            best = buffers["best"]
            self.head = self._row_tile_head(best, Pinned(device, np.uint32, best.nbytes // 4))
        else:
            self.head = SlabHead(self._product("HEAD", c.layers, c.vocab, x=self._at["x"]), asked)
        self.rows_arguments = Rows(residual=self._at["residual"], squares=self._at["squares"])
        self.rows = self._step(kernels.get("rows"), 256, self.rows_arguments, piece)
        self.final_norm = self._vector["output_norm.weight"]

    def take(self, state: DeviceSequence) -> None:
        """Have the launches read and write this state. An agent's next turn is short: nothing is set twice. A commit
        leaves a state in other buffers."""
        taken = (state.delta.pointer, state.history.pointer, state.keys.pointer, state.values.pointer, state.context)
        if self._taken == taken:
            return
        self._taken = taken
        c = self._config
        deltas = attentions = 0
        for layer in self.layers:
            mixer = layer.mixer
            if isinstance(mixer, DeltaMixer):
                mixer.arguments.state = state.delta.pointer + deltas * c.value_dim * STATE_DIM * 4
                mixer.arguments.history = state.history.pointer + deltas * 4 * c.conv_channels * 4
                deltas += 1
            else:
                rows = attentions * c.kv_heads * state.context
                mixer.arguments.keys = state.keys.pointer + rows * self._weights.key_rows.row_bytes
                mixer.arguments.values = state.values.pointer + rows * self._weights.value_rows.row_bytes
                mixer.arguments.context = state.context
                attentions += 1

    # -- what there is to launch ----------------------------------------------------------------------------------

    def _step(self, kernel: Any, threads: int, *arguments: ctypes.Structure) -> Step:
        return Step(self._launcher, kernel, threads, *arguments)

    def _product(self, slot: str, layer: int, rows: int, norm: str = "", **others: int) -> Product:
        c, at, matrix, ending = self._config, self._at, self._weights.matrix(slot, layer), ENDINGS[slot]
        gemm = Gemm(
            stream=self._model.stream.pointer,
            start=self._start[slot, layer],
            squares_in=at["squares"],
            squares_out=at["squares"],
            residual=at["residual"],
            norm=self._vector[norm] if norm else 0,
            row_tiles=matrix.row_tiles,
            k_tiles=matrix.k // 32,
            row_groups=-(-rows // 32),
            next_chunks=chunks_of(c.ffn if ending == SILU else c.hidden),
            gates=at["gates"],
            logits=self._model.logits.pointer,
            second=matrix.second,
            third=matrix.third,
            types=matrix.part_types,
            **others,
        )
        sms = self._model.sms
        return Product(self._kernels.product, self._launcher, matrix.tiles, matrix.types, ending, gemm, sms)

    def _layer(self, number: int) -> Layer:
        c, at, block = self._config, self._at, f"blk.{number}."
        after = f"blk.{number + 1}.attn_norm.weight" if number + 1 < c.layers else "output_norm.weight"
        vectors = self._vector[block + "attn_norm.weight"]
        mixer: DeltaMixer | AttentionMixer
        if c.recurrent[number]:
            mixer, rows, gate_rows = self._delta(vectors), c.conv_channels + c.value_dim, 2 * c.value_heads
        else:
            mixer, rows, gate_rows = self._attention(vectors), 2 * (c.heads + c.kv_heads) * c.head_dim, 0
        return Layer(
            mixer=mixer,
            enter=self._product("MIX_IN", number, rows, x=at["x"], out=at["raw"], gate_rows=gate_rows),
            leave=self._product(
                "MIX_OUT", number, c.hidden, block + "post_attention_norm.weight", x=at["y"], out=at["x"]
            ),
            mlp_in=self._product("MLP_IN", number, c.ffn, x=at["x"], out=at["h"]),
            mlp_out=self._product("MLP_OUT", number, c.hidden, after, x=at["h"], out=at["x"]),
        )

    def _delta(self, vectors: int) -> DeltaMixer:
        at, kernel, queued = self._at, self._kernels.get, self._weights.architecture == QUEUED
        names = ("raw", "gates", "n", "b", "q", "o", "fade", "states", "y", "arrived")
        delta = Delta(vectors=vectors, **{n: at[n] for n in names})

        def step(name: str, shared: int = 0, **extra: object) -> Step:
            return self._step(kernel(name, shared, **extra), 256, delta, self._piece)

        return DeltaMixer(
            delta,
            prep=step("delta_prep", PREP_SHARED),
            scans={ahead: step("delta_scan", scan_shared(ahead), AHEAD=ahead) for ahead in scans_of(self._weights)},
            output=step("delta_output"),
            short=step("delta_short", SHORT_SHARED) if queued else None,
        )

    def _attention(self, vectors: int) -> AttentionMixer:
        names = ("raw", "queries", "parts", "stats", "y")
        attention = Attention(vectors=vectors, rope=self._model.rope.pointer, **{n: self._at[n] for n in names})
        rows = self._kernels.get("attention_rows", 0, **attention_constants(self._weights))
        return AttentionMixer(attention, rows=self._step(rows, ROWS_A_CTA * 32, attention, self._piece))

    def _row_tile_head(self, best: Buffer, fetched: Pinned) -> RowTileHead:
        c, weights = self._config, self._weights
        arguments = Head(
            stream=self._model.stream.pointer,
            start=self._start["HEAD", c.layers],
            x=self._at["x"],
            squares=self._at["squares"],
            logits=self._model.logits.pointer,
            best=self._at["best"],
        )
        steps = {}
        for name, extra in weights.heads():
            octets = int(str(extra["HEAD_OCTETS"]))
            kernel = self._kernels.get(name, octets * c.hidden * 16, **extra)
            steps[octets] = self._step(kernel, 512, arguments, self._piece)
        return RowTileHead(head_octets(weights), arguments, best, fetched, steps, self._model.sms)
