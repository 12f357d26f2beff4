"""Where everything lies on the device: the host's view of `shape.cuh`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from warpsmith.backend.cuda.memory.exchange import Area, Exchange
from warpsmith.backend.cuda.shape import (
    CANDIDATES,
    COLUMNS,
    HEAD_DIM,
    HISTORY,
    MAX_OWN_LOGITS,
    NARROW,
    STATE_DIM,
    STREAM_TYPES,
    WARPS,
    WIDE,
    chunks_of,
    units_of,
)
from warpsmith.backend.tree import MAX_NODES
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.model.config import Config
from warpsmith.model.weights import expected_shapes

MAX_BIASES = 4096  # of a launch that samples


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
                "x": Area(c.hidden, units_of(c.hidden, NARROW)),
                "mid": Area(c.hidden, units_of(c.hidden, NARROW)),
                "h": Area(c.ffn, self.sms),
                "delta": Area(c.value_dim, self.blocks),
                "attention": Area(c.heads * c.head_dim, 0),
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
            "HIDDEN": c.hidden, "FFN": c.ffn, "VOCAB": c.vocab, "LAYERS": c.layers, 
            "RECURRENT_LOW": f"{mask % 2**64:#x}ull", "RECURRENT_HIGH": f"{mask >> 64:#x}ull",
            "HEADS": c.heads, "KV_HEADS": c.kv_heads, "KEY_HEADS": c.key_heads, "VALUE_HEADS": c.value_heads,
            "EPS": f"{c.eps!r}f", "SMS": self.sms, "LAYER_TYPES": f'"{"".join(layers)}"', "HEAD_TYPE": head,
            "TIED": int(c.tied), "EMBEDDING_TYPE": STREAM_TYPES.index(self.embedding_type),
        }  # fmt: skip
