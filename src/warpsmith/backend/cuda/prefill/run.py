"""Prompts on the GPU: long chains of tokens through kernels of their own (kernels/prefill), on tensor cores.

A prompt runs in pieces, each through all layers and then committed, so any length takes the same memory. Buffers of a
piece begin at a multiple of 64 positions (see prefill/common.cuh); a prompt cut at multiples of 64 gives the same bits
as whole, since nothing that is summed depends on how many tokens run together.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from warpsmith.backend.base import PREFILL_CHUNK, Output, Want, join_outputs
from warpsmith.backend.cuda.build.compiler import build
from warpsmith.backend.cuda.memory.driver import Buffer, Device, Pinned
from warpsmith.backend.cuda.prefill.heads import RowTileHead, SlabHead
from warpsmith.backend.cuda.prefill.kept import Kept
from warpsmith.backend.cuda.prefill.plan import (
    FEW,
    OVERRUN,
    PARTS_BYTES,
    PIECE,
    PREP_SHARED,
    ROWS_A_CTA,
    SHORT_CTAS,
    SHORT_SHARED,
    SLICE,
    attention_constants,
    buffer_bytes,
    flash_shared,
    groups_of,
    header,
    kernels_of,
    scan_shared,
    scans_of,
    segments_of,
)
from warpsmith.backend.cuda.prefill.products import QUEUED, SILU, Launch, Launcher, Product, Step
from warpsmith.backend.cuda.prefill.replay import Replay
from warpsmith.backend.cuda.prefill.streams import ENDINGS, SLOTS, PromptStream, head_octets
from warpsmith.backend.cuda.prefill.structures import (
    Attention,
    Delta,
    Embed,
    Gemm,
    Head,
    Piece,
    Queries,
    Rows,
    Span,
)
from warpsmith.backend.cuda.shape import HEAD_DIM, STATE_DIM, chunks_of
from warpsmith.model.weights import expected_shapes

MOST_REPLAYS = 32  # shapes of short pieces whose launches are kept as graphs

ReadTokens = Callable[[int, Want], Output]


class DeviceSequence(Protocol):
    """What is needed of a state on the device."""

    length: int
    context: int
    delta: Buffer
    history: Buffer
    keys: Buffer
    values: Buffer


class Prefill:
    """The kernels, built for a model, and the buffers of a piece."""

    def __init__(
        self,
        device: Device,
        weights: PromptStream,
        *,
        stream: Buffer,
        embedding: Buffer,
        vectors: Buffer,
        rope: Buffer,
        logits: Buffer,
        sms: int,
        piece: int = PIECE,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """`options`: what every build is told besides, for measuring and checking."""
        self.device, self.weights, self.sms = device, weights, sms
        self.piece_tokens = piece
        self.stream, self.embedding, self.vectors, self.rope, self.logits = stream, embedding, vectors, rope, logits
        c = self.config = weights.config
        self.launcher = Launcher(device, early=int(re.sub(r"\D", "", weights.architecture)) >= 90)
        self._kernels: dict[tuple[str, tuple[tuple[str, object], ...]], Any] = {}
        self._images: dict[tuple[str, tuple[tuple[str, object], ...]], Future[bytes]] = {}
        self._start_builds(options or {})

        self.capacity = (piece + OVERRUN) // 8
        self.attention_in = 2 * (c.heads + c.kv_heads) * c.head_dim
        self.buffers = {name: device.zeros(nbytes) for name, nbytes in buffer_bytes(c, piece).items()}
        self.piece = Piece(capacity=self.capacity)
        self.whole, self.tail, self.asked = (Span(capacity=self.capacity) for _ in range(3))
        self._taken: tuple[int, ...] = ()  # where the state is that launches have
        self._queries: dict[tuple[int, int], Queries] = {}
        self._programs: dict[Shape, list[Launch | int]] = {}
        self._replays: dict[Shape, Replay] = {}  # of what few tokens do
        self._plan()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    # -- kernels --------------------------------------------------------------------------------------------------

    def _start_builds(self, options: Mapping[str, object]) -> None:
        """All at once, side by side."""
        pool = ThreadPoolExecutor(8)
        model = header(self.weights) | dict(options)
        for name, extra in kernels_of(self.weights):
            job = pool.submit(build, f"prefill/{name}.cu", self.weights.architecture, model | extra)
            self._images[name, tuple(extra.items())] = job
        pool.shutdown(wait=False)

    def _kernel(self, name: str, shared: int = 0, **extra: object) -> Any:
        key = (name, tuple(extra.items()))
        if key not in self._kernels:
            self._kernels[key] = self.device.load(self._images[key].result()).kernel(name, shared)
        return self._kernels[key]

    def _product_kernel(self, name: str, shared: int, constants: dict[str, object]) -> Any:
        return self._kernel(name, shared, **constants)

    # -- arguments ------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Every launch of a piece, with all arguments but the state's."""
        c, weights, at = self.config, self.weights, {name: b.pointer for name, b in self.buffers.items()}
        names, shapes = weights.vectors(), expected_shapes(c)
        ends = np.cumsum([math.prod(shapes[n]) for n in names])
        vector = {n: self.vectors.pointer + 4 * int(e - math.prod(shapes[n])) for n, e in zip(names, ends, strict=True)}
        places = [*((slot, layer) for layer in range(c.layers) for slot in SLOTS), ("HEAD", c.layers)]
        matrices = {place: weights.matrix(*place) for place in places}
        tables = [weights.starts(*place) for place in places]
        self._starts = self.device.upload(np.concatenate(tables))
        before = np.cumsum([0, *map(len, tables)])
        start = {place: self._starts.pointer + 8 * int(first) for place, first in zip(places, before, strict=False)}
        piece = self.piece

        def product(slot: str, layer: int, rows: int, norm: str = "", **others: int) -> Product:
            matrix, ending = matrices[slot, layer], ENDINGS[slot]
            gemm = Gemm(
                stream=self.stream.pointer,
                start=start[slot, layer],
                squares_in=at["squares"],
                squares_out=at["squares"],
                residual=at["residual"],
                norm=vector[norm] if norm else 0,
                row_tiles=matrix.row_tiles,
                k_tiles=matrix.k // 32,
                row_groups=-(-rows // 32),
                next_chunks=chunks_of(c.ffn if ending == SILU else c.hidden),
                gates=at["gates"],
                logits=self.logits.pointer,
                second=matrix.second,
                third=matrix.third,
                types=matrix.part_types,
                **others,
            )
            return Product(self._product_kernel, self.launcher, matrix.tiles, matrix.types, ending, gemm, self.sms)

        def step(kernel: Any, threads: int, *arguments: ctypes.Structure) -> Step:
            return Step(self.launcher, kernel, threads, *arguments)

        self.embed_arguments = Embed(
            stream=self.stream.pointer,
            head_start=start["HEAD", c.layers],
            table=self.embedding.pointer,
            norm=vector["blk.0.attn_norm.weight"],
            residual=at["residual"],
            out=at["x"],
            squares=at["squares"],
            best=at["best"],
        )
        embed = self._kernel("embed", EMBEDDING_TYPE=weights.embedding_type)
        self.embed = step(embed, 128, self.embed_arguments, piece)
        self.layers: list[_Layer] = []
        cache, queued = attention_constants(weights), weights.architecture == QUEUED
        for layer, recurrent in enumerate(c.recurrent):
            block = f"blk.{layer}."
            after = f"blk.{layer + 1}.attn_norm.weight" if layer + 1 < c.layers else "output_norm.weight"
            vectors = vector[block + "attn_norm.weight"]
            mixer: _DeltaMixer | _AttentionMixer
            if recurrent:
                delta = Delta(
                    raw=at["raw"],
                    gates=at["gates"],
                    vectors=vectors,
                    **{n: at[n] for n in ("n", "b", "q", "o", "fade", "states", "y", "arrived")},
                )
                mixer = _DeltaMixer(
                    delta,
                    prep=step(self._kernel("delta_prep", PREP_SHARED), 256, delta, piece),
                    scans={
                        ahead: step(self._kernel("delta_scan", scan_shared(ahead), AHEAD=ahead), 256, delta, piece)
                        for ahead in scans_of(weights)
                    },
                    output=step(self._kernel("delta_output"), 256, delta, piece),
                    short=step(self._kernel("delta_short", SHORT_SHARED), 256, delta, piece) if queued else None,
                )
                rows, gate_rows = c.conv_channels + c.value_dim, 2 * c.value_heads
            else:
                names_here = ("raw", "queries", "parts", "stats", "y")
                attention = Attention(vectors=vectors, rope=self.rope.pointer, **{n: at[n] for n in names_here})
                mixer = _AttentionMixer(
                    attention, rows=step(self._kernel("attention_rows", 0, **cache), ROWS_A_CTA * 32, attention, piece)
                )
                rows, gate_rows = self.attention_in, 0
            self.layers.append(
                _Layer(
                    mixer=mixer,
                    enter=product("MIX_IN", layer, rows, x=at["x"], out=at["raw"], gate_rows=gate_rows),
                    leave=product(
                        "MIX_OUT", layer, c.hidden, block + "post_attention_norm.weight", x=at["y"], out=at["x"]
                    ),
                    mlp_in=product("MLP_IN", layer, c.ffn, x=at["x"], out=at["h"]),
                    mlp_out=product("MLP_OUT", layer, c.hidden, after, x=at["h"], out=at["x"]),
                )
            )
        self.head: RowTileHead | SlabHead
        if weights.heads():
            arguments = Head(
                stream=self.stream.pointer,
                start=start["HEAD", c.layers],
                x=at["x"],
                squares=at["squares"],
                logits=self.logits.pointer,
                best=at["best"],
            )
            steps = {}
            for name, extra in weights.heads():
                octets = int(str(extra["HEAD_OCTETS"]))
                steps[octets] = step(self._kernel(name, octets * c.hidden * 16, **extra), 512, arguments, piece)
            best = self.buffers["best"]
            fetched = Pinned(self.device, np.uint32, best.nbytes // 4)
            self.head = RowTileHead(head_octets(weights), arguments, best, fetched, steps, self.sms)
        else:
            self.head = SlabHead(product("HEAD", c.layers, c.vocab, x=at["x"]), self.asked)
        self.rows_arguments = Rows(residual=at["residual"], squares=at["squares"])
        self.rows = step(self._kernel("rows"), 256, self.rows_arguments, piece)
        self.final_norm = vector["output_norm.weight"]

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, state: DeviceSequence, ids: Sequence[int] | np.ndarray, want: Want, read: ReadTokens) -> Output:
        """Run and commit a chain. `read` makes an output of the first rows of `logits`; features and hidden rows stay
        on the device, in memory of their own."""
        parts: list[Output] = []
        features, hidden = self._kept(len(ids), len(want.features)), self._kept(len(ids), int(want.hidden))
        for piece in self.pieces(state, ids, want, features):
            end = piece.first + piece.count
            first = piece.first if want.every_row else end - 1
            while want.tokens != "none" and first < end and (want.every_row or piece.last):
                count = min(end, (first // 8 + self.head.octets) * 8) - first
                self.make_logits(first, count)
                single = want.tokens == "argmax" and not want.every_row
                best = self.head.best(first) if single else None
                parts.append(read(count, want) if best is None else Output(argmax=np.array([best], np.int32)))
                first += count
            if want.hidden:
                hidden.write(0, piece.first, piece.count, normed=True)
        output = parts[0] if len(parts) == 1 and parts[0].logits is None else join_outputs(parts)
        output.features, output.hidden = features.rows(), hidden.rows()
        return output

    def pieces(
        self, state: DeviceSequence, ids: Sequence[int] | np.ndarray, want: Want, features: Kept
    ) -> Iterator[PieceRows]:
        """Piece by piece: when one is yielded it is queued and counted in `state.length`, and what is wanted of it can
        be read before the next. `features` keeps those of the layers that are wanted."""
        tokens = np.ascontiguousarray(ids, dtype=np.int32)
        done = 0
        self._take(state)
        while done < len(tokens):
            lead = state.length % PREFILL_CHUNK
            count = min(len(tokens) - done, self.piece_tokens - lead)
            last = done + count == len(tokens)
            self._give(tokens[done : done + count])
            every = want.every_row or bool(want.features) or want.hidden
            for layer in self._piece(state.length - lead, lead, lead + count, every, last):
                for number, wanted in enumerate(want.features):
                    if wanted == layer:
                        features.write(number, lead, count)
            state.length += count
            done += count
            yield PieceRows(lead, count, last)

    def _give(self, ids: np.ndarray) -> None:
        """Tokens of the next piece: few are an argument of the launch, which saves a copy."""
        arguments = self.embed_arguments
        if few := len(ids) <= PREFILL_CHUNK:
            ctypes.memmove(arguments.few, ids.tobytes(), ids.nbytes)
        else:
            self.buffers["ids"].write(ids)
        arguments.ids = None if few else self.buffers["ids"].pointer

    def _take(self, state: DeviceSequence) -> None:
        """Have the launches read and write this state. An agent's next turn is short: nothing is set twice. A commit
        leaves a state in other buffers."""
        taken = (state.delta.pointer, state.history.pointer, state.keys.pointer, state.values.pointer, state.context)
        if self._taken == taken:
            return
        self._taken = taken
        c = self.config
        deltas = attentions = 0
        for layer in self.layers:
            mixer = layer.mixer
            if isinstance(mixer, _DeltaMixer):
                mixer.arguments.state = state.delta.pointer + deltas * c.value_dim * STATE_DIM * 4
                mixer.arguments.history = state.history.pointer + deltas * 4 * c.conv_channels * 4
                deltas += 1
            else:
                rows = attentions * c.kv_heads * state.context
                mixer.arguments.keys = state.keys.pointer + rows * self.weights.key_rows.row_bytes
                mixer.arguments.values = state.values.pointer + rows * self.weights.value_rows.row_bytes
                mixer.arguments.context = state.context
                attentions += 1

    def _piece(self, base: int, lead: int, end: int, every: bool, last: bool) -> Iterator[int]:
        """Queue a piece; the number of a layer after its last launch."""
        piece, octets = self.piece, -(-end // 8)
        piece.base, piece.lead, piece.end = base, lead, end
        self.whole.first, self.whole.octets = 0, octets
        self.tail.first, self.tail.octets = octets - 1, 1
        shape = Shape(octets, segments_of(base + end), every, last)
        known = shape in self._programs
        if not known:
            self._programs[shape] = list(self._program(shape))
        if known and octets * 8 <= PREFILL_CHUNK and not every:
            self._again(shape)
            return
        for each in self._programs[shape]:
            if isinstance(each, int):
                yield each
            else:
                self.launcher.launch(each)

    def _again(self, shape: Shape) -> None:
        """Queue a short piece of a shape that has come before, so that it may well come again."""
        if shape not in self._replays:
            if len(self._replays) == MOST_REPLAYS:
                del self._replays[next(iter(self._replays))]
            launches = [each for each in self._programs[shape] if not isinstance(each, int)]
            self._replays[shape] = Replay(self.launcher, launches)
        self._replays[shape].queue()

    def _program(self, shape: Shape) -> Iterator[Launch | int]:
        """The launches of a piece, and the number of each layer after its last."""
        c, octets = self.config, shape.octets
        yield self.embed.on(octets * 8)
        for number, layer in enumerate(self.layers):
            ends = number == c.layers - 1 and not shape.every
            yield layer.enter.on(self.whole, octets)
            if isinstance(layer.mixer, _DeltaMixer):
                if layer.mixer.short is not None and octets <= PREFILL_CHUNK // 8:
                    yield layer.mixer.short.on(c.value_heads * SHORT_CTAS)
                else:
                    items, scans = -(-octets // 8) * c.value_heads, layer.mixer.scans
                    yield layer.mixer.prep.on(items)
                    scan = scans[FEW if octets <= 8 * FEW else max(scans)]
                    yield scan.on(c.value_heads * (STATE_DIM // SLICE))
                    yield layer.mixer.output.on(items)
            else:
                yield layer.mixer.rows.on(octets * -(-(c.heads + 2 * c.kv_heads) // ROWS_A_CTA))
                if not ends or shape.last:
                    yield from self._attend(layer.mixer, shape, octets - 1 if ends else 0)
            if not ends or shape.last:  # of the last layer nobody asks for more than the states and the last token
                span, here = (self.tail, 1) if ends else (self.whole, octets)
                yield layer.leave.on(span, here)
                yield layer.mlp_in.on(span, here)
                yield layer.mlp_out.on(span, here)
            yield number

    def _attend(self, mixer: _AttentionMixer, shape: Shape, first_octet: int) -> Iterator[Launch]:
        """Attention of the tokens from an octet on, as many at a time as parts have room for."""
        c, end, cache = self.config, shape.octets * 8, attention_constants(self.weights)
        most = max(8, PARTS_BYTES // (shape.segments * c.heads * HEAD_DIM * 2) // 8 * 8)
        for first in range(first_octet * 8, end, most):
            count = min(most, end - first)
            queries = self._queries.setdefault((first, count), Queries(first, count))
            rows = count * (c.heads // c.kv_heads)
            items = c.kv_heads * shape.segments
            known = groups_of(self.weights)
            groups = known[-1] if math.ceil(rows / 128) * items >= self.sms else known[0]
            for name, threads, grid, shared, extra in (
                (
                    "attention_flash",
                    groups * 128,
                    math.ceil(rows / (64 * groups)) * items,
                    flash_shared(groups, self.weights),
                    {"GROUPS": groups, **cache},
                ),
                ("attention_merge", c.heads * 32, count // 8 * 4, 0, cache),
            ):
                key = (f"{name}{groups}", first, count)
                if key not in mixer.steps:
                    kernel = self._kernel(name, shared, **extra)
                    mixer.steps[key] = Step(self.launcher, kernel, threads, mixer.arguments, self.piece, queries)
                yield mixer.steps[key].on(grid)

    def make_logits(self, first: int, count: int) -> None:
        """Queue the head for tokens of the piece, into the first rows of `logits`."""
        self.launcher.launch(self.head.on(first, count))

    def _kept(self, tokens: int, layers: int) -> Kept:
        return Kept(self.device, self.config.hidden, tokens, layers, self._write_rows)

    def _write_rows(self, first: int, count: int, to: int, stride: int, normed: bool = False) -> None:
        """Queue copying the residual stream of tokens of the piece, as it is now, row by row to an address."""
        arguments = self.rows_arguments
        arguments.first, arguments.norm = first, self.final_norm if normed else None
        arguments.out, arguments.stride = to, stride
        self.launcher.launch(self.rows.on(count))


@dataclass(frozen=True)
class Shape:
    """What the launches of a piece depend on."""

    octets: int
    segments: int  # of keys
    every: bool  # all tokens go through the last layer
    last: bool  # piece of a prompt


@dataclass
class _DeltaMixer:
    arguments: Delta
    prep: Step
    scans: dict[int, Step]  # by chunks that are on their way
    output: Step
    short: Step | None  # all of them, of one chunk; none without clusters


@dataclass
class _AttentionMixer:
    arguments: Attention
    rows: Step
    steps: dict[tuple[str, int, int], Step] = field(default_factory=dict)  # flash and merge, by their queries


@dataclass
class _Layer:
    mixer: _DeltaMixer | _AttentionMixer
    enter: Product
    leave: Product
    mlp_in: Product
    mlp_out: Product


@dataclass
class PieceRows:
    """The piece that was queued last: where its tokens are in the buffers."""

    first: int
    count: int
    last: bool
