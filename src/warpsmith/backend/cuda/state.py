"""A sequence on the device, and copies of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warpsmith.backend.base import Snapshot, State
from warpsmith.backend.checks import check_snapshot
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.backend.cuda.memory.sizes import Sizes

if TYPE_CHECKING:
    from warpsmith.backend.cuda.backend import CudaBackend


class CudaState(State):
    """One sequence on the device: its past, what of a tree is needed to commit a path, and a copy of what decoding
    overwrites, to come back to if that runs ahead of who listens."""

    def __init__(self, backend: CudaBackend, context: int) -> None:
        device, layout = backend.device, backend.layout
        self.length, self.context = 0, context
        self.delta = device.zeros(layout.delta_bytes)
        self.history = device.zeros(layout.history_bytes)
        self.keys, self.values = map(device.allocate, layout.cache_bytes(context))
        self.pending = {name: device.allocate(nbytes) for name, nbytes in layout.pending_bytes().items()}
        self.kept_delta = device.allocate(layout.delta_bytes)
        self.kept_history = device.allocate(layout.history_bytes)
        self.params = backend.params_for(self)  # the same for every launch
        self.mtp: CudaState | None = None  # of the MTP block, once it has run

    def params_after(self) -> Any:
        """`params` as they will be when what a commit has written is taken."""
        after = type(self.params).from_buffer_copy(self.params)
        after.delta, after.history = self.kept_delta.pointer, self.kept_history.pointer
        return after

    def take_new(self) -> None:
        """Go on from what a commit has written beside the state before it, which may be needed no more."""
        self.delta, self.kept_delta = self.kept_delta, self.delta
        self.history, self.kept_history = self.kept_history, self.history
        self.params.delta, self.params.history = self.delta.pointer, self.history.pointer


def take_snapshot(state: CudaState, device: Device, layout: Sizes) -> Snapshot:
    """Copies of a state, of keys and values only the rows in use."""
    copies = []
    for source in (state.delta, state.history):
        copies.append(device.allocate(source.nbytes))
        copies[-1].copy_from(source)
    for source, used in zip((state.keys, state.values), layout.cache_bytes(state.length), strict=True):
        copies.append(device.allocate(used))
        if used:
            copies[-1].copy_starts(source, layout.caches, used // layout.caches)
    return Snapshot(state.length, sum(c.nbytes for c in copies), copies)


def bring_back(state: CudaState, snapshot: Snapshot, layout: Sizes) -> None:
    """Queue the copies back; the state is then as it was."""
    check_snapshot(state, snapshot)
    delta, history, keys, values = snapshot.data
    state.delta.copy_from(delta)
    state.history.copy_from(history)
    if snapshot.length:
        key_bytes, value_bytes = layout.cache_bytes(snapshot.length)
        state.keys.copy_starts(keys, layout.caches, key_bytes // layout.caches)
        state.values.copy_starts(values, layout.caches, value_bytes // layout.caches)
    state.length, state.drafted = snapshot.length, None
