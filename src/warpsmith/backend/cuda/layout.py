"""Where everything lies on the device: the host's view of `shape.cuh` and `params.cuh`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from warpsmith.backend.tree import MAX_NODES
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.model.config import Config
from warpsmith.model.weights import expected_shapes

WARPS, CHUNK_K, SLOT_BYTES = 8, 256, 16384
CHAIN, CHUNK_WORDS = 4, 128  # of an exchange
STREAM_TYPES = ("BF16", "Q8_0")  # WeightType of shape.cuh
WIDE, NARROW = 16, 8  # rows of a unit
LARGEST_HIDDEN = 16 * CHUNK_K  # MAX_CHUNKS of shared.cuh: a unit must fit in the registers
COLUMNS, HISTORY, STATE_DIM, HEAD_DIM = 16, 4, 128, 256
MAX_STOPS, MAX_FEATURES = 16, 8
NOT_YET = 0xFFFFFFFF  # what an exchanged word is before it has come
MAX_STEPS, CANDIDATES, ROUNDS, MAX_OWN_LOGITS = 64, 768, 8, 4096  # of candidates.cuh and sample.cuh
MAX_BIASES = 4096
MAX_TOP, SLICES, SLICE_THREADS = 256, 8, 512  # of top.cu
READ_AHEAD = 3 * 32768  # PIECES * PIECE_BYTES of stream.cu


def chunks_of(k: int) -> int:
    return -(-k // CHUNK_K)


def units_of(rows: int, unit_rows: int) -> int:
    return -(-rows // unit_rows)


def threads_of(architecture: str) -> int:
    """Consumers, and the warp that fills the ring; on sm_90a with three idle companions."""
    return WARPS * 32 + (128 if architecture == "sm_90a" else 32)


def busy_sms(config: Config) -> int:
    """An exchange's copy may be reset once every SM has had a part in a layer: more SMs than this many have none."""
    c = config
    delta = units_of(c.conv_channels + c.value_dim + 2 * c.value_heads, WIDE)
    attention = units_of(2 * c.heads * c.head_dim + 2 * c.kv_heads * c.head_dim, WIDE)
    kinds = [delta] * any(c.recurrent) + [attention] * (not all(c.recurrent))
    return min([*kinds, units_of(2 * c.ffn, WIDE)])


@dataclass(frozen=True)
class Piece:
    """A tensor's place in a stage: its rows in order from `first_row`, or woven with its pair (1: gate, 2: up)."""

    tensor: str
    first_row: int = 0
    pattern: int = 0


@dataclass(frozen=True)
class Part:
    """Units of a stage that follow each other and have one type."""

    type: str  # in the stream
    first_unit: int
    units: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class WeightStage:
    """A stage that reads weights: which tensors make its rows, in the order their bytes are streamed."""

    name: str
    k: int
    rows: int
    unit_rows: int
    parts: tuple[Part, ...]

    @property
    def units(self) -> int:
        return units_of(self.rows, self.unit_rows)

    def unit_bytes(self, part: Part) -> int:
        """Every warp's tiles of 32 k, a row being a block where the type has blocks (see weights.cuh)."""
        return chunks_of(self.k) * WARPS * self.unit_rows * TYPES[part.type].row_bytes(32)


def stream_type(stored: Collection[str]) -> str:
    """What rows that share units are in the stream: what they are in the file where the kernel multiplies that, else
    BF16."""
    (one, *others) = set(stored)
    return one if not others and one in STREAM_TYPES else "BF16"


class Exchange:
    """Where eight nodes' activations lie while SMs exchange them (see shape.cuh): f32 `rows` of so many words a node,
    then `areas` of (bf16 values, sums of squares) a node."""

    def __init__(self, rows: Mapping[str, int], areas: Mapping[str, tuple[int, int]]) -> None:
        self.rows, self.areas = rows, areas
        self.row_starts, self.node_words = _places({name: _on_lines(words) for name, words in rows.items()})
        words = {n: 8 * _square_stride(s) + chunks_of(k) * WARPS * CHUNK_WORDS for n, (k, s) in areas.items()}
        self.area_starts, area_words = _places(words)
        self.octet_words = 8 * self.node_words + area_words

    @property
    def bytes(self) -> int:
        return 2 * MAX_NODES // 8 * self.octet_words * 4

    def row(self, copy: np.ndarray, name: str, nodes: int) -> np.ndarray:
        """What one copy, as words, has of a kind of row: [nodes, words]."""
        node = np.arange(nodes)[:, None]
        at = self._octet(node) + node % 8 * self.node_words + self.row_starts[name]
        return copy[at + np.arange(self.rows[name])]

    def squares(self, copy: np.ndarray, name: str, nodes: int) -> np.ndarray:
        node, count = np.arange(nodes)[:, None], self.areas[name][1]
        return copy[self._area(name, node) + node % 8 * _square_stride(count) + np.arange(count)]

    def values(self, copy: np.ndarray, name: str, nodes: int) -> np.ndarray:
        """[nodes, k] in float32, out of the order of the mma's operands."""
        node, (k_all, squares) = np.arange(nodes)[:, None], self.areas[name]
        chunks, pair = chunks_of(k_all), np.arange(0, k_all, 2)
        warp, chunk = pair // 32 // chunks, pair // 32 % chunks
        before = chunk // CHAIN * CHAIN
        place = before * WARPS + warp * np.minimum(CHAIN, chunks - before) + chunk - before
        at = self._area(name, node) + 8 * _square_stride(squares) + node % 8 * 16
        words = np.ascontiguousarray(copy[at + place * CHUNK_WORDS + pair % 32 // 2])
        return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def _octet(self, node: np.ndarray) -> np.ndarray:
        return node // 8 * self.octet_words

    def _area(self, name: str, node: np.ndarray) -> np.ndarray:
        return self._octet(node) + 8 * self.node_words + self.area_starts[name]


def _on_lines(words: int) -> int:
    return -(-words // 32) * 32


def _square_stride(squares: int) -> int:
    return _on_lines(squares) + 16 if squares else 0


def _places(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each begins that lie one behind the other, and where the last one ends."""
    starts, at = {}, 0
    for name, size in sizes.items():
        starts[name] = at
        at += size
    return starts, at


class Layout:
    """Sizes and offsets for one model on one number of SMs. `stored` has the types of its tensors in the file, BF16
    where nothing is said."""

    def __init__(self, config: Config, sms: int, stored: Mapping[str, str] | None = None) -> None:
        self.config, self.sms, self.stored = config, sms, stored or {}
        c = config
        self.blocks = c.value_dim // COLUMNS
        self.splits = 128 // c.kv_heads
        self.delta_layers = len(c.recurrent_layers)
        self.attention_layers = len(c.attention_layers)

    # -- the weight stream ----------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> list[WeightStage]:
        c = self.config
        stages: list[WeightStage] = []
        for layer, recurrent in enumerate(c.recurrent):
            if recurrent:
                rows = [
                    {"attn_qkv": c.conv_channels},
                    {"attn_gate": c.value_dim},
                    {"ssm_beta": c.value_heads, "ssm_alpha": c.value_heads},
                ]
                out, out_k = "ssm_out", c.value_dim
            else:
                kv = c.kv_heads * c.head_dim
                rows = [{"attn_q": 2 * c.heads * c.head_dim}, {"attn_k": kv}, {"attn_v": kv}]
                out, out_k = "attn_output", c.heads * c.head_dim

            def piece(name: str, first_row: int = 0, pattern: int = 0, block: str = f"blk.{layer}.") -> Piece:
                return Piece(f"{block}{name}.weight", first_row, pattern)

            groups, first = [], 0
            for names in rows:
                pieces = []
                for name, count in names.items():
                    pieces.append(piece(name, first))
                    first += count
                groups.append(pieces)
            mlp = [piece("ffn_gate", pattern=1), piece("ffn_up", pattern=2)]
            stages += [
                self._stage(f"in.{layer}", c.hidden, first, WIDE, *groups),
                self._stage(f"mix_out.{layer}", out_k, c.hidden, NARROW, [piece(out)]),
                self._stage(f"mlp_in.{layer}", c.hidden, 2 * c.ffn, WIDE, mlp),
                self._stage(f"mlp_out.{layer}", c.ffn, c.hidden, NARROW, [piece("ffn_down")]),
            ]
        head = "token_embd.weight" if c.tied else "output.weight"
        return [*stages, self._stage("head", c.hidden, c.vocab, WIDE, [Piece(head)])]

    def _stage(self, name: str, k: int, rows: int, unit_rows: int, *groups: list[Piece]) -> WeightStage:
        """A part for each group of tensors, whose first rows begin units."""
        starts = [group[0].first_row // unit_rows for group in groups]
        ends = [*starts[1:], units_of(rows, unit_rows)]
        parts = (
            Part(stream_type([self._stored(p.tensor) for p in group]), start, end - start, tuple(group))
            for group, start, end in zip(groups, starts, ends, strict=True)
        )
        return WeightStage(name, k, rows, unit_rows, tuple(parts))

    def _stored(self, tensor: str) -> str:
        return self.stored.get(tensor, "BF16")

    @property
    def parts(self) -> list[tuple[WeightStage, Part]]:
        """The parts of all stages in the order of the stream."""
        return [(stage, part) for stage in self.stages for part in stage.parts]

    def units_before(self, units: int) -> np.ndarray:
        """First unit of every SM, and the total at the end: [sms + 1]."""
        return np.arange(self.sms + 1, dtype=np.int64) * units // self.sms

    @cached_property
    def part_bytes(self) -> np.ndarray:
        """[parts, sms]: what each SM reads of each part."""
        rows = []
        for stage, part in self.parts:
            bounds = self.units_before(stage.units).clip(part.first_unit, part.first_unit + part.units)
            rows.append(np.diff(bounds) * stage.unit_bytes(part))
        return np.stack(rows)

    @cached_property
    def stream_start(self) -> np.ndarray:
        """[sms]: where each SM's stream begins."""
        return np.concatenate([[0], np.cumsum(self.part_bytes.sum(axis=0))[:-1]])

    @cached_property
    def part_start(self) -> np.ndarray:
        """[parts, sms]: where each SM's share of each part begins."""
        inside = np.cumsum(self.part_bytes, axis=0) - self.part_bytes
        return self.stream_start + inside

    @property
    def stream_bytes(self) -> int:
        return int(self.part_bytes.sum())

    @property
    def embedding_type(self) -> str:
        return stream_type([self._stored("token_embd.weight")])

    @property
    def embedding_bytes(self) -> int:
        """The embedding's own table; none where the LM head's weights are it."""
        c = self.config
        return 0 if c.tied else c.vocab * TYPES[self.embedding_type].row_bytes(c.hidden)

    # -- small weights --------------------------------------------------------------------------------------------

    def vector_names(self) -> list[str]:
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

    def vector_start(self, name: str) -> int:
        """Floats before a vector."""
        names, shapes = self.vector_names(), expected_shapes(self.config)
        return sum(math.prod(shapes[n]) for n in names[: names.index(name)])

    @property
    def vector_bytes(self) -> int:
        shapes = expected_shapes(self.config)
        return sum(math.prod(shapes[name]) for name in self.vector_names()) * 4

    def rope_bytes(self, context: int) -> int:
        return (64 + context // 64 + 1) * (self.config.rotary_dim // 2) * 8

    def rope_table(self, context: int) -> np.ndarray:
        """cos and sin of a position's low six bits [64, 32], then of the rest [context / 64 + 1, 32]."""
        half = self.config.rotary_dim // 2
        frequencies = self.config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        positions = np.concatenate([np.arange(64), np.arange(context // 64 + 1) * 64]).astype(np.float64)
        angles = positions[:, None] * frequencies
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)

    # -- exchanges ------------------------------------------------------------------------------------------------

    @cached_property
    def exchange(self) -> Exchange:
        c = self.config
        return Exchange(
            rows={
                "delta_in": WIDE * units_of(c.conv_channels + c.value_dim + 2 * c.value_heads, WIDE),
                "attention_in": WIDE * units_of(2 * (c.heads + c.kv_heads) * c.head_dim, WIDE),
                "stats": 2 * c.heads * self.splits,
                "attention_rows": (c.heads + 2 * c.kv_heads) * c.head_dim // 2,
                "best": 2 * self.sms,
            },
            areas={
                "x": (c.hidden, units_of(c.hidden, NARROW)),
                "mid": (c.hidden, units_of(c.hidden, NARROW)),
                "h": (c.ffn, 0),
                "delta": (c.value_dim, self.blocks),
                "attention": (c.heads * c.head_dim, 0),
            },
        )

    @property
    def parts_bytes(self) -> int:
        """Attention's means of every split, in fp16."""
        return MAX_NODES * self.config.heads * self.splits * HEAD_DIM * 2

    @property
    def samples(self) -> bool:
        """Whether an SM has room for its logits while a token is drawn (see candidates.cuh)."""
        return -(-units_of(self.config.vocab, WIDE) // self.sms) * WIDE <= MAX_OWN_LOGITS

    @property
    def list_bytes(self) -> int:
        """What SMs tell each other while a token is drawn: records of 16 bytes (see sample.cuh)."""
        return 16 * (1 + self.sms * (1 + CANDIDATES))

    def drawing_bytes(self, context: int) -> int:
        return self.list_bytes + context * 4 + MAX_BIASES * 8

    # -- per sequence, in bytes -----------------------------------------------------------------------------------

    @property
    def delta_bytes(self) -> int:
        return self.delta_layers * self.blocks * COLUMNS * STATE_DIM * 4

    @property
    def history_bytes(self) -> int:
        return self.delta_layers * HISTORY * self.config.conv_channels * 4

    @property
    def caches(self) -> int:
        """Key heads of all layers, each with a contiguous cache of its own."""
        return self.attention_layers * self.config.kv_heads

    def cache_bytes(self, context: int) -> int:
        """Keys, or values."""
        return self.caches * context * HEAD_DIM * 2

    def pending_bytes(self) -> dict[str, int]:
        nodes = self.delta_layers * MAX_NODES * 4
        rows = nodes * self.blocks
        kv = self.attention_layers * self.config.kv_heads * MAX_NODES * HEAD_DIM * 2
        return {
            "pending_raw": nodes * self.config.conv_channels,
            "pending_key": nodes * self.config.key_heads * STATE_DIM,
            "pending_write": rows * COLUMNS,
            "pending_fade": rows,
            "pending_keys": kv,
            "pending_values": kv,
            "branch_state": self.blocks * MAX_NODES * COLUMNS * STATE_DIM * 4,
        }

    # -- compile-time constants -----------------------------------------------------------------------------------

    def constants(self) -> dict[str, object]:
        c = self.config
        mask = sum(1 << i for i, recurrent in enumerate(c.recurrent) if recurrent)
        *layers, head = [str(STREAM_TYPES.index(part.type)) for _, part in self.parts]
        return {
            "HIDDEN": c.hidden, "FFN": c.ffn, "VOCAB": c.vocab, "LAYERS": c.layers, "RECURRENT_MASK": f"{mask:#x}ull",
            "HEADS": c.heads, "KV_HEADS": c.kv_heads, "KEY_HEADS": c.key_heads, "VALUE_HEADS": c.value_heads,
            "EPS": f"{c.eps!r}f", "SMS": self.sms, "LAYER_TYPES": f'"{"".join(layers)}"', "HEAD_TYPE": head,
            "TIED": int(c.tied), "EMBEDDING_TYPE": STREAM_TYPES.index(self.embedding_type),
        }  # fmt: skip


class Request(ctypes.Structure):
    """`Request` of params.cuh."""

    _fields_ = [
        ("nodes", ctypes.c_int),
        ("length", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("stop_after", ctypes.c_int),
        ("stops", ctypes.c_int),
        ("features", ctypes.c_int),
        ("want_logits", ctypes.c_int),
        ("want_hidden", ctypes.c_int),
        ("zero", ctypes.c_uint),
        ("tokens", ctypes.c_int * MAX_NODES),
        ("parents", ctypes.c_int * MAX_NODES),
        ("stop_ids", ctypes.c_int * MAX_STOPS),
        ("feature_layers", ctypes.c_int * MAX_FEATURES),
    ]


class Draw(ctypes.Structure):
    """`Draw` of decide.cuh."""

    _fields_ = [
        ("window", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("lists", ctypes.c_void_p),
        ("inverse_temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("log_min_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("serial", ctypes.c_uint32),
        ("sampled", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("windowed", ctypes.c_int),
        ("last_n", ctypes.c_int),
        ("biased", ctypes.c_int),
        ("repeat", ctypes.c_float),
        ("frequency", ctypes.c_float),
        ("presence", ctypes.c_float),
    ]


POINTERS_BEFORE_CONTEXT = (
    "stream",
    "stream_start",
    "head_start",
    "embedding",
    "vectors",
    "rope",
    "delta",
    "history",
    "keys",
    "values",
)
POINTERS_AFTER_CONTEXT = (
    "exchange", "parts",
    "pending_raw", "pending_key", "pending_write", "pending_fade", "pending_keys", "pending_values", "branch_state",
    "out_tokens", "out_count", "out_logits", "out_features", "out_hidden", "profile",
)  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of params.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS_BEFORE_CONTEXT),
        ("context", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in POINTERS_AFTER_CONTEXT),
    ]


class Path(ctypes.Structure):
    """`Path` of commit.cu."""

    _fields_ = [("count", ctypes.c_int), ("length", ctypes.c_int), ("node", ctypes.c_int * MAX_NODES)]


class TopRequest(ctypes.Structure):
    """`Top` of top.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "keys", "sums", "arrived", "out")),
        ("count", ctypes.c_int),
    ]


def top_bytes() -> dict[str, int]:
    """The buffers of top.cu."""
    slices = MAX_NODES * SLICES
    return {
        "keys": slices * MAX_TOP * 8,
        "sums": slices * 8,
        "arrived": MAX_NODES * 4,
        "out": MAX_NODES * (2 * MAX_TOP + 1) * 4,
    }


class Stream(ctypes.Structure):
    """`Stream` of stream.cu."""

    _fields_ = [("bytes", ctypes.c_void_p), ("start", ctypes.c_void_p)]


class Pack(ctypes.Structure):
    """`Pack` of pack.cu."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("part_start", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("part_unit", ctypes.c_int),
        ("first_row", ctypes.c_int),
        ("offset", ctypes.c_int),
        ("count", ctypes.c_int),
        ("k", ctypes.c_int),
        ("units", ctypes.c_int),
        ("unit_rows", ctypes.c_int),
        ("pattern", ctypes.c_int),
    ]
