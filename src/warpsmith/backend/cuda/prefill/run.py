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
from dataclasses import dataclass

import numpy as np

from warpsmith.backend.base import PREFILL_CHUNK, Output, Want, join_outputs
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.backend.cuda.prefill.kept import Kept
from warpsmith.backend.cuda.prefill.kernels import PromptKernels
from warpsmith.backend.cuda.prefill.network import AttentionMixer, DeltaMixer, DeviceSequence, ModelOnDevice, Network
from warpsmith.backend.cuda.prefill.plan import (
    FEW,
    OVERRUN,
    PARTS_BYTES,
    PIECE,
    ROWS_A_CTA,
    SHORT_CTAS,
    SLICE,
    attention_constants,
    buffer_bytes,
    flash_shared,
    groups_of,
    segments_of,
)
from warpsmith.backend.cuda.prefill.products import Launch, Launcher, Step
from warpsmith.backend.cuda.prefill.replay import Replay
from warpsmith.backend.cuda.prefill.streams import PromptStream
from warpsmith.backend.cuda.prefill.structures import Piece, Queries, Span
from warpsmith.backend.cuda.shape import HEAD_DIM, STATE_DIM

MOST_REPLAYS = 32  # shapes of short pieces whose launches are kept as graphs

ReadTokens = Callable[[int, Want], Output]


class Prefill:
    """The kernels, built for a model, and the buffers of a piece."""

    def __init__(
        self,
        device: Device,
        weights: PromptStream,
        model: ModelOnDevice,
        *,
        piece: int = PIECE,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """`options`: what every build is told besides, for measuring and checking."""
        self.device, self.weights, self.config, self.sms = device, weights, weights.config, model.sms
        self.piece_tokens, self.capacity = piece, (piece + OVERRUN) // 8
        self.launcher = Launcher(device, early=int(re.sub(r"\D", "", weights.architecture)) >= 90)
        self.kernels = PromptKernels(device, weights, options or {})
        self.buffers = {name: device.zeros(nbytes) for name, nbytes in buffer_bytes(self.config, piece).items()}
        self.piece = Piece(capacity=self.capacity)
        self.whole, self.tail, asked = (Span(capacity=self.capacity) for _ in range(3))
        self.network = Network(device, weights, model, self.buffers, self.kernels, self.launcher, self.piece, asked)
        self._queries: dict[tuple[int, int], Queries] = {}
        self._programs: dict[Shape, list[Launch | int]] = {}
        self._replays: dict[Shape, Replay] = {}  # of what few tokens do

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def run(self, state: DeviceSequence, ids: Sequence[int] | np.ndarray, want: Want, read: ReadTokens) -> Output:
        """Run and commit a chain. `read` makes an output of the first rows of `logits`; features and hidden rows stay
        on the device, in memory of their own."""
        parts: list[Output] = []
        features, hidden = self._kept(len(ids), len(want.features)), self._kept(len(ids), int(want.hidden))
        for piece in self.pieces(state, ids, want, features):
            end = piece.first + piece.count
            first = piece.first if want.every_row else end - 1
            while want.tokens != "none" and first < end and (want.every_row or piece.last):
                count = min(end, (first // 8 + self.network.head.octets) * 8) - first
                self.make_logits(first, count)
                single = want.tokens == "argmax" and not want.every_row
                best = self.network.head.best(first) if single else None
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
        self.network.take(state)
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
        arguments = self.network.embed_arguments
        if few := len(ids) <= PREFILL_CHUNK:
            ctypes.memmove(arguments.few, ids.tobytes(), ids.nbytes)
        else:
            self.buffers["ids"].write(ids)
        arguments.ids = None if few else self.buffers["ids"].pointer

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
        yield self.network.embed.on(octets * 8)
        for number, layer in enumerate(self.network.layers):
            ends = number == c.layers - 1 and not shape.every
            yield layer.enter.on(self.whole, octets)
            if isinstance(layer.mixer, DeltaMixer):
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

    def _attend(self, mixer: AttentionMixer, shape: Shape, first_octet: int) -> Iterator[Launch]:
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
                    kernel = self.kernels.get(name, shared, **extra)
                    mixer.steps[key] = Step(self.launcher, kernel, threads, mixer.arguments, self.piece, queries)
                yield mixer.steps[key].on(grid)

    def make_logits(self, first: int, count: int) -> None:
        """Queue the head for tokens of the piece, into the first rows of `logits`."""
        self.launcher.launch(self.network.head.on(first, count))

    def _kept(self, tokens: int, layers: int) -> Kept:
        return Kept(self.device, self.config.hidden, tokens, layers, self._write_rows)

    def _write_rows(self, first: int, count: int, to: int, stride: int, normed: bool = False) -> None:
        """Queue copying the residual stream of tokens of the piece, as it is now, row by row to an address."""
        arguments = self.network.rows_arguments
        arguments.first, arguments.norm = first, self.network.final_norm if normed else None
        arguments.out, arguments.stride = to, stride
        self.launcher.launch(self.network.rows.on(count))


@dataclass(frozen=True)
class Shape:
    """What the launches of a piece depend on."""

    octets: int
    segments: int  # of keys
    every: bool  # all tokens go through the last layer
    last: bool  # piece of a prompt


@dataclass
class PieceRows:
    """The piece that was queued last: where its tokens are in the buffers."""

    first: int
    count: int
    last: bool
