"""Where everything lies on the device: the host's view of `shape.cuh` and `params.cuh`."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from warpsmith.backend.tree import MAX_NODES
from warpsmith.model.config import Config
from warpsmith.model.weights import expected_shapes

WARPS, CHUNK_K, GROUP_BYTES, SLOT_BYTES = 8, 256, 4096, 16384
WIDE, NARROW = 16, 8  # rows of a unit
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
class WeightStage:
    """A stage that reads weights: which tensors make its rows, in the order their bytes are streamed."""

    name: str
    k: int
    rows: int
    unit_rows: int
    pieces: tuple[Piece, ...]

    @property
    def units(self) -> int:
        return units_of(self.rows, self.unit_rows)

    @property
    def unit_bytes(self) -> int:
        return chunks_of(self.k) * (self.unit_rows // 8) * GROUP_BYTES


class Layout:
    """Sizes and offsets for one model on one number of SMs."""

    def __init__(self, config: Config, sms: int) -> None:
        self.config, self.sms = config, sms
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
            block = f"blk.{layer}."
            if recurrent:
                rows = {
                    "attn_qkv": c.conv_channels,
                    "attn_gate": c.value_dim,
                    "ssm_beta": c.value_heads,
                    "ssm_alpha": c.value_heads,
                }
                out, out_k = "ssm_out", c.value_dim
            else:
                kv = c.kv_heads * c.head_dim
                rows = {"attn_q": 2 * c.heads * c.head_dim, "attn_k": kv, "attn_v": kv}
                out, out_k = "attn_output", c.heads * c.head_dim
            pieces, first = [], 0
            for name, count in rows.items():
                pieces.append(Piece(f"{block}{name}.weight", first))
                first += count
            stages += [
                WeightStage(f"in.{layer}", c.hidden, first, WIDE, tuple(pieces)),
                WeightStage(f"mix_out.{layer}", out_k, c.hidden, NARROW, (Piece(f"{block}{out}.weight"),)),
                WeightStage(
                    f"mlp_in.{layer}",
                    c.hidden,
                    2 * c.ffn,
                    WIDE,
                    (Piece(f"{block}ffn_gate.weight", pattern=1), Piece(f"{block}ffn_up.weight", pattern=2)),
                ),
                WeightStage(f"mlp_out.{layer}", c.ffn, c.hidden, NARROW, (Piece(f"{block}ffn_down.weight"),)),
            ]
        head = "token_embd.weight" if c.tied else "output.weight"
        return [*stages, WeightStage("head", c.hidden, c.vocab, WIDE, (Piece(head),))]

    def units_before(self, units: int) -> np.ndarray:
        """First unit of every SM, and the total at the end: [sms + 1]."""
        return np.arange(self.sms + 1, dtype=np.int64) * units // self.sms

    @cached_property
    def stage_bytes(self) -> np.ndarray:
        """[stages, sms]: what each SM reads in each stage."""
        return np.stack([np.diff(self.units_before(s.units)) * s.unit_bytes for s in self.stages])

    @cached_property
    def stream_start(self) -> np.ndarray:
        """[sms]: where each SM's stream begins."""
        return np.concatenate([[0], np.cumsum(self.stage_bytes.sum(axis=0))[:-1]])

    @cached_property
    def stage_start(self) -> np.ndarray:
        """[stages, sms]: where each SM's share of each stage begins."""
        inside = np.cumsum(self.stage_bytes, axis=0) - self.stage_bytes
        return self.stream_start + inside

    @property
    def stream_bytes(self) -> int:
        return int(self.stage_bytes.sum())

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
    def exchanged(self) -> dict[str, range]:
        """The words of every exchange inside a node's share of a copy (see shape.cuh)."""
        c = self.config
        sizes = {
            "x": c.hidden // 2,
            "x_squares": units_of(c.hidden, NARROW),
            "mid": c.hidden // 2,
            "mid_squares": units_of(c.hidden, NARROW),
            "h": c.ffn // 2,
            "delta_in": WIDE * units_of(c.conv_channels + c.value_dim + 2 * c.value_heads, WIDE),
            "delta_y": c.value_dim // 2,
            "delta_squares": self.blocks,
            "attention_in": WIDE * units_of(2 * (c.heads + c.kv_heads) * c.head_dim, WIDE),
            "attention_y": c.heads * c.head_dim // 2,
            "stats": 2 * c.heads * self.splits,
            "best": 2 * self.sms,
        }
        places, at = {}, 0
        for name, words in sizes.items():
            places[name] = range(at, at + words)
            at += -(-words // 4) * 4
        return places

    @property
    def node_words(self) -> int:
        return -(-self.exchanged["best"].stop // 4) * 4

    @property
    def exchange_bytes(self) -> int:
        return 2 * MAX_NODES * self.node_words * 4

    @property
    def parts_bytes(self) -> int:
        """Attention's partial sums."""
        return MAX_NODES * self.config.heads * self.splits * HEAD_DIM * 4

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
        return {
            "HIDDEN": c.hidden, "FFN": c.ffn, "VOCAB": c.vocab, "LAYERS": c.layers, "RECURRENT_MASK": f"{mask:#x}ull",
            "HEADS": c.heads, "KV_HEADS": c.kv_heads, "KEY_HEADS": c.key_heads, "VALUE_HEADS": c.value_heads,
            "EPS": f"{c.eps!r}f", "SMS": self.sms,
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
        ("stage_start", ctypes.c_void_p),
        ("first_row", ctypes.c_int),
        ("offset", ctypes.c_int),
        ("count", ctypes.c_int),
        ("k", ctypes.c_int),
        ("units", ctypes.c_int),
        ("unit_rows", ctypes.c_int),
        ("pattern", ctypes.c_int),
    ]
