"""A DFlash draft inside the CPU engine: on the model's threads, with its embeddings and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warpsmith.backend.base import Output, Want
from warpsmith.backend.block_draft import BlockDraft, BlockMemory
from warpsmith.backend.cpu import _cpu, loading
from warpsmith.backend.rows import HostRows, Rows
from warpsmith.backend.tree import MAX_NODES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.model.config import Config

_TOKENS = {"none": 0, "top": 2}


@dataclass
class CpuMemory(BlockMemory):
    """The last few rows wait, so that one call can append them and fill a block."""

    native: _cpu.DraftMemory
    waiting: tuple[np.ndarray, int] | None = None  # (features, position)


class CpuDraft(BlockDraft):
    """Weights on the engine's side."""

    def __init__(
        self,
        engine: _cpu.Engine,
        target: Config,
        config: DFlashConfig,
        tensors: Mapping[str, Tensor],
        capacity: Sequence[int],
    ) -> None:
        self._target, self._native = target, _cpu.Draft(engine, config, list(capacity))
        matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 2}
        kinds = {name: loading.packed_type(tensor) for name, tensor in matrices.items()}
        self._native.reserve(sum(_cpu.packed_bytes(kinds[name], *tensor.shape) for name, tensor in matrices.items()))
        for name, tensor in tensors.items():
            if name not in matrices:
                self._native.add_vector(name, np.ascontiguousarray(tensor.float32(), np.float32))
                continue
            stored = tensor.raw() if kinds[name] == tensor.type.name else loading.held(tensor)
            rows, cols = tensor.shape
            self._native.add_matrix(name, kinds[name], rows, cols, np.ascontiguousarray(stored))
        self._native.finish()

    @staticmethod
    def runs(config: DFlashConfig) -> bool:
        """Kernels work on whole vectors; every published draft has widths that allow it."""
        return not (config.hidden % 16 or config.ffn % 16 or config.head_dim % 32) and config.block <= MAX_NODES

    def new_memory(self) -> CpuMemory:
        return CpuMemory(_cpu.DraftMemory(self._native))

    def append(self, memory: BlockMemory, features: Rows, position: int) -> None:
        assert isinstance(memory, CpuMemory)
        self._settle(memory)
        rows = np.ascontiguousarray(features.numpy(), np.float32)
        last = (len(rows) - 1) // MAX_NODES * MAX_NODES
        for start in range(0, last, MAX_NODES):
            self._native.append(memory.native, rows[start : start + MAX_NODES], position + start)
        memory.waiting = rows[last:], position + last

    def fill(self, memory: BlockMemory, root: int, position: int, rows: int, want: Want) -> Output:
        assert isinstance(memory, CpuMemory)
        output, hidden = Output(), None
        if want.tokens == "top":
            output.argmax = np.empty(rows, np.int32)
            output.top_ids = np.empty((rows, want.top), np.int32)
            output.top_logits = np.empty((rows, want.top), np.float32)
            output.logsumexp = np.empty(rows, np.float32)
        if want.hidden:
            hidden = np.empty((rows + 1, self._target.hidden), np.float32)
            output.hidden = HostRows(hidden)
        native = _cpu.Want(
            tokens=_TOKENS[want.tokens],
            top=want.top,
            rows=[],
            layers=[],
            argmax=output.argmax,
            top_ids=output.top_ids,
            top_logits=output.top_logits,
            logsumexp=output.logsumexp,
            hidden=hidden,
        )
        features, at = memory.waiting or (None, 0)
        memory.waiting = None
        self._native.propose(memory.native, features, at, root, position, rows, native)
        return output

    def forget(self, memory: BlockMemory) -> None:
        assert isinstance(memory, CpuMemory)
        memory.waiting = None
        memory.native.forget()

    def snapshot(self, memory: BlockMemory) -> np.ndarray:
        assert isinstance(memory, CpuMemory)
        self._settle(memory)
        saved = np.empty(memory.native.snapshot_bytes(), np.uint8)
        memory.native.save(saved)
        return saved

    def restore(self, memory: BlockMemory, saved: Any) -> None:
        assert isinstance(memory, CpuMemory)
        memory.waiting = None
        memory.native.load(saved)

    def _settle(self, memory: CpuMemory) -> None:
        if memory.waiting is not None:
            self._native.append(memory.native, *memory.waiting)
            memory.waiting = None
