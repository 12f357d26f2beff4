"""The reference backend: interprets the plan stage by stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from warpsmith.backend.base import (
    ARGMAX,
    PREFILL_CHUNK,
    Backend,
    Batch,
    MemoryPart,
    Output,
    Snapshot,
    State,
    Want,
    join_outputs,
    keep_drafted,
    output_from_logits,
    take_drafted,
)
from warpsmith.backend.checks import check_batch, check_room, check_snapshot, check_tokens
from warpsmith.backend.cores import usable_cores
from warpsmith.backend.host_memory import check_fits
from warpsmith.backend.reference import ops
from warpsmith.backend.reference.mixers import BatchMixer, Buffers, ChunkMixer, LayerState, Mixer, TreeMixer
from warpsmith.backend.rows import HostRows
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config
from warpsmith.model.plan import Stage, forward_plan, mtp_plan

Project = Callable[[np.ndarray, np.ndarray], np.ndarray]


def project_rows(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [T, in] times weight [out, in], one row at a time: a row's bits do not depend on the rows beside it."""
    return np.stack([weight @ row for row in x])


def project_chunk(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x @ weight.T


class ReferenceState(State):
    """Per-layer memory, and the last tree's rows until one of its paths is committed."""

    def __init__(self, config: Config, context: int, dtype: np.dtype) -> None:
        self.length, self.context = 0, context
        self.pending: TreeMixer | None = None
        self.layers: dict[int, LayerState] = {}
        attention = [*config.attention_layers, *range(config.layers, config.layers + config.mtp_layers)]
        for layer in attention:
            shape = (context, config.kv_heads, config.head_dim)
            self.layers[layer] = LayerState(keys=np.zeros(shape, dtype), values=np.zeros(shape, dtype))
        for layer in config.recurrent_layers:
            self.layers[layer] = LayerState(
                conv=np.zeros((config.conv_kernel - 1, config.conv_channels), dtype),
                delta=np.zeros((config.value_heads, config.key_head_dim, config.value_head_dim), dtype),
            )


class ReferenceBackend(Backend):
    """Numpy in float32 (or float64). Weights are dequantised when first used and kept."""

    name = "reference"

    def __init__(self, config: Config, tensors: Mapping[str, Tensor], dtype: type = np.float32) -> None:
        self.config, self.tensors, self.dtype = config, tensors, np.dtype(dtype)
        self.plan = forward_plan(config)
        self.mtp_plan = mtp_plan(config) if config.mtp_layers else []
        self._weights: dict[str, np.ndarray] = {}
        width, c = self.dtype.itemsize, config
        states = c.value_heads * c.key_head_dim * c.value_head_dim + (c.conv_kernel - 1) * c.conv_channels
        self._recurrent_bytes = len(c.recurrent_layers) * states * width
        self._kv_bytes = 2 * (len(c.attention_layers) + c.mtp_layers) * c.kv_heads * c.head_dim * width  # of a token

    # -- the contract ---------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, int | str]:
        return {"device": self.name, "type": self.dtype.name, "n_threads": usable_cores()}

    def memory(self, context: int, sequences: int = 1, snapshots: int = 0) -> list[MemoryPart]:
        weights = sum(t.elements for t in self.tensors.values()) * self.dtype.itemsize
        return [
            MemoryPart("weights", weights),
            MemoryPart("keys and values", sequences * context * self._kv_bytes),
            MemoryPart("DeltaNet states", sequences * self._recurrent_bytes),
            MemoryPart("snapshots", snapshots),
        ]

    def snapshot_bytes(self, length: int) -> int:
        return length * self._kv_bytes + self._recurrent_bytes

    def new_state(self, context: int) -> ReferenceState:
        check_fits(sum(part.nbytes for part in self.memory(context)[1:]), f"A context of {context} tokens")
        return ReferenceState(self.config, context, self.dtype)

    def prefill(self, state: State, ids: Sequence[int], want: Want = ARGMAX) -> Output:
        assert isinstance(state, ReferenceState)
        tokens = np.asarray(ids, dtype=np.int32)
        if not len(tokens):
            raise BadRequest("There is nothing to prefill.", "Pass at least one token.")
        check_tokens(self.config, tokens)
        check_room(state, len(tokens))
        state.drafted = state.pending = None
        parts: list[Output] = []
        # chunk by chunk through the whole model, so that a split at a chunk boundary changes nothing
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            mixer = ChunkMixer(self.config, state.layers, state.length, len(chunk))
            last = start + len(chunk) == len(tokens)
            rows = slice(None) if want.every_row else slice(-1, None) if last else slice(0)
            parts.append(self._run(self.plan, {"tokens": chunk}, mixer, project_chunk, want, rows))
            state.length += len(chunk)
        return join_outputs(parts)

    def forward(self, batch: Batch, want: Want = ARGMAX) -> Output:
        check_batch(self, batch)
        mixers = []
        for state, tree in batch:
            assert isinstance(state, ReferenceState)
            state.pending = TreeMixer(self.config, state.layers, state.length, tree)
            mixers.append(state.pending)
        tokens = np.concatenate([tree.tokens for _, tree in batch])
        output = self._run(self.plan, {"tokens": tokens}, BatchMixer(mixers), project_rows, want, slice(None))
        return keep_drafted(batch, output)

    def commit(self, state: State, path: Sequence[int]) -> None:
        assert isinstance(state, ReferenceState)
        nodes = take_drafted(state, path)
        assert state.pending is not None
        state.pending.commit(nodes)
        state.pending = None
        state.length += len(nodes)

    def snapshot(self, state: State) -> Snapshot:
        assert isinstance(state, ReferenceState)
        layers = {
            i: LayerState(s.keys[: state.length].copy(), s.values[: state.length].copy(), s.conv.copy(), s.delta.copy())
            for i, s in state.layers.items()
        }
        nbytes = sum(a.nbytes for s in layers.values() for a in (s.keys, s.values, s.conv, s.delta))
        return Snapshot(state.length, nbytes, layers)

    def restore(self, state: State, snapshot: Snapshot) -> None:
        assert isinstance(state, ReferenceState)
        check_snapshot(state, snapshot)
        for i, saved in snapshot.data.items():
            layer = state.layers[i]
            layer.keys[: len(saved.keys)], layer.values[: len(saved.values)] = saved.keys, saved.values
            layer.conv, layer.delta = saved.conv.copy(), saved.delta.copy()
        state.length, state.drafted, state.pending = snapshot.length, None, None

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        ids = np.asarray(tokens, dtype=np.int32)
        check_tokens(self.config, ids)
        return self._embed(self.plan[0], ids).astype(np.float32)

    def head(self, hidden: np.ndarray, want: Want = ARGMAX) -> Output:
        weight = self.weight(self.plan[-1].weights["head"])
        return output_from_logits(project_chunk(hidden.astype(self.dtype), weight).astype(np.float32), want)

    def mtp(
        self, state: State, tokens: Sequence[int], hidden: np.ndarray, position: int, want: Want = ARGMAX
    ) -> Output:
        if not self.mtp_plan:
            return super().mtp(state, tokens, hidden, position, want)
        assert isinstance(state, ReferenceState)
        ids = np.asarray(tokens, dtype=np.int32)
        check_tokens(self.config, ids)
        mixer = ChunkMixer(self.config, state.layers, position, len(ids))
        buffers: Buffers = {"tokens": ids, "hidden": np.asarray(hidden, dtype=self.dtype)}
        rows = slice(None) if want.every_row else slice(-1, None)
        return self._run(self.mtp_plan, buffers, mixer, project_chunk, want, rows)

    def trace(self, state: State, tree: Tree, stop_after: str) -> Buffers:
        """Every buffer after the named stage (`delta_mix.3`): what a kernel's buffers are compared with."""
        assert isinstance(state, ReferenceState)
        names = [stage.name for stage in self.plan]
        if stop_after not in names:
            raise BadRequest(f"There is no stage {stop_after!r}.", f"Stages run from {names[0]} to {names[-1]}.")
        mixer = TreeMixer(self.config, copy.deepcopy(state.layers), state.length, tree)
        buffers: Buffers = {"tokens": tree.tokens}
        for stage in self.plan[: names.index(stop_after) + 1]:
            self._stage(stage, buffers, mixer, project_rows)
        return buffers

    # -- the interpreter ------------------------------------------------------------------------------------------

    def _run(
        self,
        plan: list[Stage],
        buffers: Buffers,
        mixer: Mixer,
        project: Project,
        want: Want,
        rows: slice,
    ) -> Output:
        """Run a plan; logits only for `rows`, which are all that cost of a large vocabulary is paid for."""
        features: dict[int, np.ndarray] = {}
        output = Output()
        with np.errstate(over="ignore", invalid="ignore"):  # the logits tell: see backend/finite.py
            for stage in plan:
                if stage.op == "head":
                    break
                self._stage(stage, buffers, mixer, project)
                if stage.op == "mlp_out" and stage.layer in want.features:
                    features[stage.layer] = buffers["x"].astype(np.float32)
            hidden = buffers["hidden"]
            if want.tokens != "none" and len(hidden[rows]):
                head = self.weight(plan[-1].weights["head"])
                output = output_from_logits(project(hidden[rows], head).astype(np.float32), want)
        if want.features:
            output.features = HostRows(np.concatenate([features[i] for i in want.features], axis=1))
        if want.hidden:
            output.hidden = HostRows(hidden.astype(np.float32))
        return output

    def _stage(self, stage: Stage, b: Buffers, mixer: Mixer, project: Project) -> None:
        w = {role: self.weight(name) for role, name in stage.weights.items() if role != "embedding"}
        eps = self.config.eps
        match stage.op:
            case "embed":
                b["x"] = self._embed(stage, b["tokens"])
            case "delta_in":
                x = ops.rms_norm(b["x"], w["norm"], eps)
                for name in ("qkv", "z", "beta", "alpha"):
                    b[name] = project(x, w[name])
            case "attention_in":
                x = ops.rms_norm(b["x"], w["norm"], eps)
                for name in ("q", "k", "v"):
                    b[name] = project(x, w[name])
            case "delta_mix":
                assert stage.layer is not None
                b["y"] = mixer.delta(stage.layer, b, w)
            case "attention_mix":
                assert stage.layer is not None
                b["y"] = mixer.attention(stage.layer, b, w)
            case "mix_out":
                b["x"] = b["x"] + project(b["y"], w["project"])
            case "mlp_in":
                x = ops.rms_norm(b["x"], w["norm"], eps)
                b["h"] = ops.silu(project(x, w["gate"])) * project(x, w["up"])
            case "mlp_out":
                b["x"] = b["x"] + project(b["h"], w["project"])
            case "mtp_in":
                token = ops.rms_norm(self._embed(stage, b["tokens"]), w["embedding_norm"], eps)
                past = ops.rms_norm(b["hidden"], w["hidden_norm"], eps)
                b["x"] = project(np.concatenate([token, past], axis=1), w["project"])
            case "final_norm":
                b["hidden"] = ops.rms_norm(b["x"], w["norm"], eps)
            case "head":
                b["logits"] = project(b["hidden"], w["head"])
            case _:
                raise NotImplementedError(stage.op)

    def _embed(self, stage: Stage, tokens: np.ndarray) -> np.ndarray:
        table = self.tensors[stage.weights["embedding"]]
        return dequantize(table.type, table.raw()[tokens]).astype(self.dtype)

    def weight(self, name: str) -> np.ndarray:
        if name not in self._weights:
            self._weights[name] = np.ascontiguousarray(self.tensors[name].float32(), dtype=self.dtype)
        return self._weights[name]
