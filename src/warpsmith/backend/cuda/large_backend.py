"""The CUDA backend for large and K-quantised models: the activations-first forward pass behind the contract."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from warpsmith.backend.base import ARGMAX, Output, State, Want, check_room, check_tokens, output_from_logits
from warpsmith.backend.cuda.compiler import build, target
from warpsmith.backend.cuda.driver import Buffer, Device, Kernel, Pinned
from warpsmith.backend.cuda.large import (
    COLUMNS,
    MAX_FEATURES,
    SOURCES,
    TAILS,
    LargeLayout,
    LargePack,
    LargeParams,
    LargeRequest,
)
from warpsmith.backend.cuda.structures import Path
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config
from warpsmith.model.weights import expected_shapes

STEPS = 64
STAGING_BYTES = 32 << 20


class LargeState(State):
    def __init__(self, backend: LargeBackend, context: int) -> None:
        c, device = backend.config, backend.device
        layout = backend.layout
        self.length, self.context = 0, context
        self.delta = device.zeros(layout.delta_layers * c.value_dim * c.value_head_dim * 4)
        self.history = device.zeros(layout.delta_layers * 4 * c.conv_channels * 4)
        cache = layout.attention_layers * c.kv_heads * context * c.head_dim * 2
        self.keys, self.values = device.allocate(cache), device.allocate(cache)
        self.params = backend.params_for(self)


class LargeBackend:
    name = "cuda"

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, Tensor],
        *,
        context: int = 4096,
        columns: Sequence[int] = COLUMNS,
        options: Mapping[str, object] | None = None,
        sms: int | None = None,
    ) -> None:
        self.config, self.device = config, Device()
        self.chip = self.device.chip
        self.architecture = target(self.chip.capability)
        stored = {name: tensor.type.name for name, tensor in tensors.items()}
        self.layout = layout = LargeLayout(config, sms or self.chip.sms, stored)
        self.context, self.columns = context, tuple(columns)
        self.options = {"IN_FLIGHT": 3, "SHARED_MEMORY": self.chip.shared_memory} | dict(options or {})
        self.options |= {"DELTA_LAYER_COUNT": layout.delta_layers}
        compilers = ThreadPoolExecutor(len(self.columns))
        self._images = {n: compilers.submit(self._image, "large.cu", n) for n in self.columns}
        self._kernels: dict[int, Kernel] = {}
        device = self.device
        self.stream = device.zeros(layout.stream_bytes)
        self._pack(tensors)
        embedding = tensors["token_embd.weight"].raw()
        self.embedding = device.upload(embedding)
        self._commit = device.load(self._image("large_commit.cu", self.columns[0])).kernel("commit")
        self.vectors = device.upload(np.concatenate([tensors[n].float32().reshape(-1) for n in self.vector_names()]))
        self.rope = device.upload(rope_table(config, context))
        self.stream_start = device.upload(layout.stream_start.astype(np.uint64))
        stages, runs, tiles = layout.tables
        self.stages, self.runs, self.tiles = device.upload(stages), device.upload(runs), device.upload(tiles)
        self.recurrent = device.upload(np.array(config.recurrent, np.uint8))
        self.scratch = {name: device.zeros(size) for name, size in self.scratch_bytes().items()}
        self.ring = Pinned(device, np.int32, 1 + max(STEPS, MAX_NODES))
        marks = int(str(self.options.get("PROFILE", 0)))
        self.profile = device.zeros(layout.sms * marks * 8)
        self._last: tuple[LargeState, Tree] | None = None

    def vector_names(self) -> list[str]:
        names: list[str] = []
        for layer, recurrent in enumerate(self.config.recurrent):
            block = f"blk.{layer}."
            names += [block + "attn_norm.weight", block + "post_attention_norm.weight"]
            if recurrent:
                names += [block + n for n in ("ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_norm.weight")]
            else:
                names += [block + "attn_q_norm.weight", block + "attn_k_norm.weight"]
        return [*names, "output_norm.weight"]

    def scratch_bytes(self) -> dict[str, int]:
        c, layout = self.config, self.layout
        nodes, most = self.columns[-1], self.columns[-1]
        y = max(c.value_dim, c.heads * c.head_dim)
        parts = layout.splits + TAILS
        per_node = layout.delta_layers * MAX_NODES * 4
        kv = layout.attention_layers * c.kv_heads * MAX_NODES * c.head_dim * 2
        return {
            "counter": 128,
            "sums": layout.results * most * 64 * 4,
            "x": nodes * c.hidden * 2,
            "x_squares": nodes * layout.sms * 4,
            "y": nodes * y * 2,
            "y_squares": nodes * c.value_dim // 8 * 4,
            "h": nodes * c.ffn * 2,
            "queries": nodes * c.heads * c.head_dim * 2,
            "parts": nodes * c.heads * parts * c.head_dim * 2,
            "part_stats": nodes * c.heads * parts * 8,
            "best": nodes * layout.sms * 8,
            "pending_raw": per_node * c.conv_channels,
            "pending_key": per_node * c.key_heads * 128,
            "pending_write": per_node * c.value_dim,
            "pending_fade": per_node * c.value_dim // 16,
            "pending_keys": kv,
            "pending_values": kv,
            "branch_state": c.value_dim * nodes * 128 * 4,
            "out_logits": nodes * c.vocab * 4,
            "out_features": MAX_FEATURES * nodes * c.hidden * 4,
            "out_hidden": nodes * c.hidden * 4,
        }

    def _image(self, source: str, nodes: int) -> bytes:
        return build(source, self.architecture, self.layout.constants(nodes) | self.options, ("-fmad=false",))

    def _pack(self, tensors: Mapping[str, Tensor]) -> None:
        pack = self.device.load(self._image("large_pack.cu", self.columns[0])).kernel("pack")
        staging = self.device.allocate(STAGING_BYTES)
        for index, stage in enumerate(self.layout.stages):
            offsets = self.device.upload(self.layout.offsets(index))
            for piece in (piece for part in stage.parts for piece in part.pieces):
                tensor, kind = tensors[piece.tensor], TYPES[piece.source]
                raw = tensor.raw()
                row_bytes = kind.row_bytes(stage.k)
                step = STAGING_BYTES // row_bytes
                for first in range(0, len(raw), step):
                    rows = raw[first : first + step]
                    if tensor.type != kind:
                        rows = quantize(kind, dequantize(tensor.type, rows))
                    staging.write(rows)
                    request = LargePack(
                        rows=staging.pointer, stream=self.stream.pointer, offsets=offsets.pointer,
                        source=SOURCES[piece.source][1], first_row=piece.first_row, offset=first, count=len(rows),
                        blocks=stage.blocks, row_bytes=row_bytes, pattern=piece.pattern,
                    )  # fmt: skip
                    pack.launch(2 * self.chip.sms, 256, request)
                    self.device.synchronize()

    def params_for(self, state: LargeState) -> LargeParams:
        at = {name: buffer.pointer for name, buffer in self.scratch.items()}
        return LargeParams(
            stream=self.stream.pointer, stream_start=self.stream_start.pointer, stages=self.stages.pointer,
            runs=self.runs.pointer, tiles=self.tiles.pointer, recurrent=self.recurrent.pointer,
            embedding=self.embedding.pointer, vectors=self.vectors.pointer, rope=self.rope.pointer,
            delta=state.delta.pointer, history=state.history.pointer, keys=state.keys.pointer,
            values=state.values.pointer, context=state.context, out_count=self.ring.pointer,
            out_tokens=self.ring.pointer + 4, profile=self.profile.pointer, **at,
        )  # fmt: skip

    def new_state(self, context: int) -> LargeState:
        return LargeState(self, context)

    def _kernel(self, nodes: int) -> Kernel:
        size = next(n for n in self.columns if nodes <= n)
        if size not in self._kernels:
            module = self.device.load(self._images[size].result())
            self._kernels[size] = module.kernel("forward", self.chip.shared_memory)
        return self._kernels[size]

    def launch(self, state: LargeState, tree: Tree, want: Want, steps: int = 0, stop: Sequence[int] = ()) -> None:
        n = len(tree)
        request = LargeRequest(
            nodes=n, length=state.length, steps=steps, stops=len(stop), features=len(want.features),
            want_logits=want.tokens in ("top", "logits"), want_hidden=want.hidden,
        )  # fmt: skip
        request.tokens[:n] = tree.tokens.tolist()
        request.parents[:n] = tree.parents.tolist()
        request.stop_ids[: len(stop)] = list(stop)
        request.feature_layers[: len(want.features)] = list(want.features)
        self.scratch["counter"].fill_starts(0, 1, 32)
        self._kernel(n).launch(self.layout.sms, 384, state.params, request, cooperative=True)

    def forward(self, state: LargeState, tree: Tree, want: Want = ARGMAX) -> Output:
        check_tokens(self.config, tree.tokens)
        check_room(state, int(tree.depths().max()) + 1)
        self.launch(state, tree, want)
        self._last = (state, tree)
        n, hidden = len(tree), self.config.hidden
        self.device.synchronize()
        output = Output()
        if want.tokens in ("top", "logits"):
            logits = self.scratch["out_logits"].read(np.float32, (n, self.config.vocab))
            output = output_from_logits(logits, want)
        elif want.tokens == "argmax":
            output.argmax = self.ring.array[1 : 1 + n].copy()
        if want.features:
            rows = self.scratch["out_features"].read(np.float32, (len(want.features), n, hidden))
            output.features = np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(n, -1)
        if want.hidden:
            output.hidden = self.scratch["out_hidden"].read(np.float32, (n, hidden))
        return output

    def commit(self, state: LargeState, path: Sequence[int]) -> None:
        nodes = list(path)
        if self._last is None or self._last[0] is not state or nodes != self._last[1].path(nodes[-1]):
            raise BadRequest(f"{nodes} is not a path of the last tree from its root.")
        argument = Path(len(nodes), state.length, (ctypes.c_int * MAX_NODES)(*nodes))
        c = self.config
        blocks = self.layout.delta_layers * (c.value_dim // 8) + self.layout.attention_layers * c.kv_heads
        self._commit.launch(blocks, 256, state.params, argument)
        self._last = None
        state.length += len(nodes)

    def decode(self, state: LargeState, token: int, count: int) -> list[int]:
        self.ring.array[0] = 0
        self.launch(state, Tree.chain([token]), ARGMAX, steps=count)
        self.device.synchronize()
        state.length += count
        return self.ring.array[1 : 1 + count].tolist()


def rope_table(config: Config, context: int) -> np.ndarray:
    half = config.rotary_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    positions = np.concatenate([np.arange(64), np.arange(context // 64 + 1) * 64]).astype(np.float64)
    angles = positions[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


__all__ = ["Buffer", "LargeBackend", "expected_shapes"]
