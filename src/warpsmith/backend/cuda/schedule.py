"""The plan as the forward kernel runs it: the one place where the order of its stages is written down.

From `model/plan.py` come the stages of a layer, what each takes and publishes, and which tensors make its rows. The
packed stream, the exchange, the traces and the kernels all have it from here; the kernels as generated constants
(`header`). A stage that the plan has and `OPERATIONS` has not, or that has other buffers or weights than it says, is
refused. A stage that is new in both is in the stream and in the kernels' tables, and `forward.cu` asserts that it runs
every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from warpsmith.backend.cuda.memory.exchange import Area, Exchange
from warpsmith.backend.cuda.shape import COLUMNS, NARROW, WIDE, tiles_of
from warpsmith.errors import WarpsmithError
from warpsmith.model import plan
from warpsmith.model.config import Config
from warpsmith.model.weights import expected_shapes


@dataclass(frozen=True)
class Operation:
    """How the kernel runs an operation of the plan. Its slot is the kernel's name, the same for both kinds of layer."""

    slot: str
    reads: tuple[str, ...]  # in the plan's words
    writes: tuple[str, ...]
    takes: str = ""  # from the exchange
    publishes: str = ""
    tile_rows: int = 0  # of a matrix product
    parts: tuple[tuple[str, ...], ...] = ()  # its matrices by their roles: those of a part share row tiles
    woven: bool = False  # a row tile has eight rows of the first matrix, then eight of the second
    vectors: tuple[str, ...] = ()
    table: tuple[str, ...] = ()  # looked up, not multiplied


OPERATIONS = {
    "embed": Operation("EMBED", ("tokens",), ("x",), publishes="x", table=("embedding",)),
    "delta_in": Operation(
        slot="MIX_IN", reads=("x",), writes=("qkv", "z", "beta", "alpha"), takes="x", publishes="delta_in",
        tile_rows=WIDE, parts=(("qkv",), ("z",), ("beta", "alpha")), vectors=("norm",),
    ),
    "delta_mix": Operation(
        slot="MIX", reads=("qkv", "z", "beta", "alpha"), writes=("y",), takes="delta_in", publishes="delta",
        vectors=("conv", "dt", "a", "norm"),
    ),
    "attention_in": Operation(
        slot="MIX_IN", reads=("x",), writes=("q", "k", "v"), takes="x", publishes="attention_in",
        tile_rows=WIDE, parts=(("q",), ("k",), ("v",)), vectors=("norm",),
    ),
    "attention_mix": Operation(
        slot="MIX", reads=("q", "k", "v"), writes=("y",), takes="attention_in", publishes="attention",
        vectors=("q_norm", "k_norm"),
    ),
    "mix_out": Operation(  # takes what its layer's mixer has published
        slot="MIX_OUT", reads=("x", "y"), writes=("x",), publishes="mid", tile_rows=NARROW, parts=(("project",),),
    ),
    "mlp_in": Operation(
        slot="MLP_IN", reads=("x",), writes=("h",), takes="mid", publishes="h",
        tile_rows=WIDE, parts=(("gate", "up"),), woven=True, vectors=("norm",),
    ),
    "mlp_out": Operation(
        slot="MLP_OUT", reads=("x", "h"), writes=("x",), takes="h", publishes="x",
        tile_rows=NARROW, parts=(("project",),),
    ),
    "final_norm": Operation("HEAD", ("x",), ("hidden",), takes="x", vectors=("norm",)),
    "head": Operation("HEAD", ("hidden",), ("logits",), publishes="best", tile_rows=WIDE, parts=(("head",),)),
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A tensor's place in a stage: its rows in order from `first_row`, or woven with its pair (1: first, 2: second)."""

    tensor: str
    first_row: int = 0
    weave: int = 0


@dataclass(frozen=True)
class Part:
    """Row tiles of a stage that follow each other and are stored in one format."""

    first_tile: int
    tiles: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Stage:
    """A stage of the kernel: one of the plan, or several that follow each other in one slot."""

    names: tuple[str, ...]  # in the plan: `delta_in.3`
    slot: str
    layer: int | None
    takes: str
    publishes: str
    vectors: dict[str, str]  # role: tensor
    k: int
    rows: int
    tile_rows: int
    parts: tuple[Part, ...]

    @property
    def tiles(self) -> int:
        return tiles_of(self.rows, self.tile_rows) if self.parts else 0


class Schedule:
    """The stages of one model, dealt to so many SMs."""

    def __init__(self, config: Config, sms: int) -> None:
        self.config, self.sms = config, sms
        self.stages = kernel_stages(config)
        # One layer of each kind: sizes are the same in all of them, whether the model has such layers or not.
        both = kernel_stages(replace(config, layers=2, recurrent=(True, False), mtp_layers=0))
        self.delta, self.attention = ([s for s in both if s.layer == layer] for layer in (0, 1))
        self.head = both[-1]
        self.slots = [stage.slot for stage in self.delta]
        expected = ["EMBED", *self.slots * config.layers, "HEAD"]
        if [s.slot for s in self.attention] != self.slots or [s.slot for s in self.stages] != expected:
            raise WarpsmithError(
                "The CUDA kernels run the same slots in every layer, and this plan does not.",
                "Give its stages slots in backend/cuda/schedule.py.",
            )

    # -- work -----------------------------------------------------------------------------------------------------

    @property
    def weight_stages(self) -> list[Stage]:
        """Those that read matrices, in the order of the stream."""
        return [stage for stage in self.stages if stage.parts]

    def number(self, name: str) -> int | None:
        """What the kernel counts a stage of the plan as; the head has none."""
        return next((i for i, s in enumerate(self.stages[:-1]) if name in s.names), None)

    # -- small weights --------------------------------------------------------------------------------------------

    def vectors(self) -> list[str]:
        """The F32 vectors in the order the kernel expects them: layer by layer, norms of products first."""
        layers = [_vectors(list(stages)) for _, stages in groupby(self.stages[1:-1], lambda s: s.layer)]
        return [tensor for layer in layers for tensor in layer.values()] + list(self.head.vectors.values())

    def layer_vectors(self, stages: Sequence[Stage]) -> tuple[dict[tuple[str, str], int], int]:
        """Where each vector of such a layer begins, by its slot and role, and floats of all of them."""
        shapes = expected_shapes(replace(self.config, layers=2, recurrent=(True, False)))
        starts: dict[tuple[str, str], int] = {}
        at = 0
        for key, tensor in _vectors(stages).items():
            starts[key] = at
            at += math.prod(shapes[tensor])
        return starts, at

    # -- exchanges ------------------------------------------------------------------------------------------------

    @cached_property
    def exchange(self) -> Exchange:
        c = self.config
        splits = 128 // c.kv_heads

        def whole_tiles(stages: list[Stage]) -> int:
            return stages[0].tiles * stages[0].tile_rows

        owned = tiles_of(c.hidden, NARROW)  # a sum of squares of each row tile of the residual stream
        return Exchange(
            rows={
                "delta_in": whole_tiles(self.delta),
                "attention_in": whole_tiles(self.attention),
                "stats": 2 * c.heads * splits,
                "attention_rows": (c.heads + 2 * c.kv_heads) * c.head_dim // 2,
                "best": 2 * self.sms,
            },
            areas={
                "x": Area(c.hidden, owned),
                "mid": Area(c.hidden, owned),
                "h": Area(c.ffn, self.sms),
                "delta": Area(c.value_dim, c.value_dim // COLUMNS),
                "attention": Area(c.heads * c.head_dim, 0),
            },
        )

    # -- for the kernels ------------------------------------------------------------------------------------------

    def header(self) -> str:
        """`schedule.cuh`."""
        return "\n".join(
            [
                "// Generated by schedule.py for one model on one chip.",
                "#pragma once",
                '#include "common/tiles.cuh"',
                *self._model(),
                *self._exchange(),
                *self._vector_places(),
                *self._stages(),
                "",
            ]
        )

    def _model(self) -> Iterable[str]:
        c = self.config
        mask = sum(1 << i for i, recurrent in enumerate(c.recurrent) if recurrent)
        numbers = {
            "HIDDEN": c.hidden, "FFN": c.ffn, "VOCAB": c.vocab, "LAYERS": c.layers, "HEADS": c.heads,
            "KV_HEADS": c.kv_heads, "KEY_HEADS": c.key_heads, "VALUE_HEADS": c.value_heads, "SMS": self.sms,
        }  # fmt: skip
        yield from _constants(numbers)
        yield f"constexpr bool TIED = {str(c.tied).lower()};"
        yield f"constexpr float EPS = {c.eps!r}f;"
        yield f"constexpr u64 RECURRENT_LOW = {mask % 2**64:#x}ull, RECURRENT_HIGH = {mask >> 64:#x}ull;"

    def _exchange(self) -> Iterable[str]:
        e = self.exchange
        yield from _constants({f"{name.upper()}_AT": at for name, at in e.row_starts.items()})
        for name, area in e.areas.items():
            at, places = 8 * e.node_words + e.area_starts[name], name.upper()
            squares = {f"{places}_K": area.k, f"{places}_SQUARES": area.squares, f"{places}_SQUARES_AT": at}
            yield from _constants({**squares, f"{places}_VALUES_AT": at + area.square_words})
        yield from _constants({"NODE_WORDS": e.node_words, "NODE_TILE_WORDS": e.tile_words})

    def _vector_places(self) -> Iterable[str]:
        for kind, stages in (("DELTA", self.delta), ("ATTENTION", self.attention)):
            starts, floats = self.layer_vectors(stages)
            named = {f"{kind}_{slot}_{role.upper()}": at for (slot, role), at in starts.items()}
            yield from _constants({**named, f"{kind}_VECTORS": floats})

    def _stages(self) -> Iterable[str]:
        yield f"enum Slot {{ {', '.join(self.slots)}, LAYER_SLOTS, HEAD = LAYER_SLOTS }};"
        yield "template <Slot> struct StageOf;"
        first_part = 0
        pairs = [*zip(self.delta, self.attention, strict=True), (self.head, self.head)]
        products = [(delta, attention) for delta, attention in pairs if delta.parts]
        for delta, attention in products:
            parts = len(delta.parts)
            if (parts, delta.tile_rows) != (len(attention.parts), attention.tile_rows):
                raise WarpsmithError(f"{delta.slot} differs in parts or row tiles between kinds of layer.")
            yield f"template <> struct StageOf<{delta.slot}> {{"
            yield f"    static constexpr Slot SLOT = {delta.slot};"
            yield f"    static constexpr int TILE_ROWS = {delta.tile_rows}, FIRST_PART = {first_part}, PARTS = {parts};"
            values = {"k": (delta.k, attention.k), "tiles": (delta.tiles, attention.tiles)}
            for i, part in enumerate(zip(delta.parts, attention.parts, strict=True)):
                values[f"part{i}"] = (part[0].first_tile, part[1].first_tile)
            for name, (one, other) in values.items():
                value = str(one) if one == other else f"recurrent ? {one} : {other}"
                yield f"    static __host__ __device__ constexpr int {name}(bool recurrent) {{ return {value}; }}"
            for kind, stage in (("InDelta", delta), ("InAttention", attention)):
                area = stage.takes.upper()
                takes = f"Takes<{area}_K, {area}_SQUARES, {area}_VALUES_AT, {self._used_in(stage.takes)}>"
                yield f"    typedef {takes} {kind};"
            yield "};"
            first_part += parts
        yield f"constexpr int LAYER_PARTS = {first_part - len(self.head.parts)};"
        yield "// visit(stage, layer) for every stage that reads weights, in the order of the stream; false ends it."
        yield "template <class Visit>"
        yield "__device__ __forceinline__ bool every_weight_stage(Visit visit) {"
        yield "#pragma unroll 1"
        yield "    for (int layer = 0; layer < LAYERS; layer++) {"
        for delta, _ in products[:-1]:
            yield f"        if (!visit(StageOf<{delta.slot}>(), layer)) return false;"
        yield "    }"
        yield "    return visit(StageOf<HEAD>(), LAYERS);"
        yield "}"

    def _used_in(self, area: str) -> str:
        """The layers that publish it."""
        delta, attention = (area in {s.publishes for s in stages} for stages in (self.delta, self.attention))
        return "IN_EVERY_LAYER" if delta and attention else "IN_DELTA_LAYERS" if delta else "IN_ATTENTION_LAYERS"


def kernel_stages(config: Config) -> list[Stage]:
    """The plan, every stage of it checked, as the kernel runs it."""
    shapes = expected_shapes(config)
    stages: list[Stage] = []
    slots = groupby(plan.forward_plan(config), lambda s: (s.layer, _operation(s).slot))
    for (layer, slot), planned in slots:
        group = list(planned)
        operations = [OPERATIONS[s.op] for s in group]
        parts, k, rows, tile_rows = _parts(group, shapes)
        # what is projected back comes from the mixer before
        takes = next((o.takes for o in operations if o.takes), stages[-1].publishes if stages else "")
        stages.append(
            Stage(
                names=tuple(s.name for s in group),
                slot=slot,
                layer=layer,
                takes=takes,
                publishes=operations[-1].publishes,
                vectors={r: s.weights[r] for s, o in zip(group, operations, strict=True) for r in o.vectors},
                k=k,
                rows=rows,
                tile_rows=tile_rows,
                parts=parts,
            )
        )
    return stages


def _operation(stage: plan.Stage) -> Operation:
    """How a stage runs, if it is what the kernel thinks it is."""
    known = OPERATIONS.get(stage.op)
    if known:
        weights = {role for part in known.parts for role in part} | {*known.vectors, *known.table}
        if (stage.reads, stage.writes, set(stage.weights)) == (known.reads, known.writes, weights):
            return known
    raise WarpsmithError(
        f"The CUDA kernels have no stage {stage.name} as the plan has it.",
        "Describe it in OPERATIONS of backend/cuda/schedule.py and write its kernel.",
    )


def _parts(group: list[plan.Stage], shapes: dict[str, tuple[int, ...]]) -> tuple[tuple[Part, ...], int, int, int]:
    """The parts of a stage, its k, its rows, and how many of them a row tile has."""
    parts: list[Part] = []
    k = first = tile_rows = 0
    for stage in group:
        operation = OPERATIONS[stage.op]
        tile_rows = operation.tile_rows or tile_rows
        for roles in operation.parts:
            tensors = [stage.weights[role] for role in roles]
            begin, pieces = first, []
            for i, tensor in enumerate(tensors):
                rows, k = shapes[tensor]
                pieces.append(Piece(tensor, 0, i + 1) if operation.woven else Piece(tensor, first))
                first += rows
            parts.append(Part(begin // tile_rows, tiles_of(first, tile_rows) - begin // tile_rows, tuple(pieces)))
    return tuple(parts), k, first, tile_rows


def _vectors(stages: Sequence[Stage]) -> dict[tuple[str, str], str]:
    """A layer's vectors by slot and role, norms of products first: they are at the same places in every layer."""
    ordered = sorted(stages, key=lambda s: not s.parts)
    return {(s.slot, role): tensor for s in ordered for role, tensor in s.vectors.items()}


def _constants(values: dict[str, int]) -> Iterable[str]:
    return (f"constexpr int {name} = {value};" for name, value in values.items())


def deal(sizes: np.ndarray, sms: int) -> np.ndarray:
    """Things of some sizes in their order to SMs, so that these have nearly the same and each has one at least, if
    there are as many: [sms + 1], the first of every SM and the number of all. Equal sizes are dealt as `first_of` of
    shape.cuh does."""
    ends = np.cumsum(sizes, dtype=np.int64)
    bounds = np.searchsorted(ends * sms, np.arange(sms + 1, dtype=np.int64) * ends[-1], side="right")
    if len(sizes) >= sms:
        number = np.arange(sms + 1)
        bounds = np.maximum.accumulate(bounds - number) + number
        bounds = np.minimum(bounds, len(sizes) - sms + number)
    return bounds


def busy_sms(config: Config) -> int:
    """An exchange's copy may be reset once every SM has had a part in a layer: more SMs than this many have none."""
    return min(stage.tiles for stage in kernel_stages(config) if stage.layer is not None and stage.tile_rows == WIDE)
