"""A DFlash draft on the device: what it remembers of sequences, and its launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from warpsmith.backend.base import Output, Want
from warpsmith.backend.block_draft import BlockDraft, BlockMemory, GrowingTree
from warpsmith.backend.cuda.build.compiler import build
from warpsmith.backend.cuda.draft.formats import HELD, handed_over
from warpsmith.backend.cuda.draft.layout import ABREAST, COLUMNS, DIM, DraftLayout, DraftStream
from warpsmith.backend.cuda.draft.lent import THREADS, copied_head
from warpsmith.backend.cuda.draft.plan import held_head
from warpsmith.backend.cuda.draft.step import Ahead, CudaGrowingTree, StepProgram, growth
from warpsmith.backend.cuda.draft.structures import DraftParams, DraftRequest, Gather
from warpsmith.backend.cuda.large.formats import EMBEDDINGS
from warpsmith.backend.cuda.large.loading import copies_of, load_slabs
from warpsmith.backend.cuda.memory.driver import Buffer, Device
from warpsmith.backend.cuda.memory.exchange import NOT_YET
from warpsmith.backend.cuda.memory.layout import turns
from warpsmith.backend.cuda.memory.room import gib
from warpsmith.backend.cuda.rows import CudaRows
from warpsmith.backend.cuda.top import Top, top_image
from warpsmith.backend.cuda.weights.loading import STAGING_BYTES, StagedRows, held_bytes
from warpsmith.backend.rows import Rows
from warpsmith.backend.tree import MAX_NODES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.errors import DoesNotFit

if TYPE_CHECKING:
    from warpsmith.backend.cuda.backend import CudaBackend

# Copies of weights on their way to an SM while it multiplies, and between: of 8 bits or more, for which memory is the
# limit, and of fewer.
WIDE_COPIES: dict[str, object] = {"IN_FLIGHT": 4, "BETWEEN": 1}
NARROW_COPIES: dict[str, object] = {"IN_FLIGHT": 6, "BETWEEN": 2}
POLLED = ("words", "sums", "parts", "part_stats")  # what SMs exchange, and look at before it has come


class CudaMemory(BlockMemory):
    """Rings of keys and values, and one of features of the last rows, which wait to be projected."""

    def __init__(self, network: CudaDraft) -> None:
        sizes = network.layout.memory_bytes()
        self.buffers = {name: network.device.allocate(size) for name, size in sizes.items()}
        self.params = network.params_for(self)
        self.appended = 0  # rows that went into the rings so far
        self.waiting = 0
        self.group = 0  # where the first is that waits
        self.position = 0  # of that
        self.ahead: Ahead | None = None
        self.asked: tuple[float, ...] = ()  # what kind of tree was last asked for


@dataclass(frozen=True)
class Saved:
    """A copy of a memory, of the rings only the rows in use."""

    buffers: dict[str, Buffer]
    appended: int

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())


class CudaDraft(BlockDraft):
    """A draft's weights beside a target's. Matrices of 16 and of 32 bits are held as Q8_0, unless `held` is None."""

    at_once = True

    def __init__(
        self,
        backend: CudaBackend,
        config: DFlashConfig,
        tensors: Mapping[str, Tensor],
        capacity: Sequence[int],
        held: str | None = HELD,
    ) -> None:
        self.backend, self.config, self.device = backend, config, backend.device
        device, sms = self.device, backend.chip.sms
        types = {name: tensor.type.name for name, tensor in tensors.items()}
        stored = {name: handed_over(kind, held) for name, kind in types.items()}
        stream = DraftStream(config, sms, stored)
        copied = copies_of(stream, tensors)
        rings = 2 * config.layers * config.kv_heads * max(capacity) * DIM * 2  # of one sequence
        head = held_head(backend.config, backend.stored, sms, config, types)
        needed = stream.stream_bytes + (head.nbytes if head else 0) + rings + STAGING_BYTES
        check_draft_fits(device, needed, config)
        self._embedding = backend.lend_embedding()
        self.layout = layout = DraftLayout(config, stream, head or backend.lend_head().deal, max(capacity))
        constants = layout.constants(EMBEDDINGS.index(self._embedding.type))
        constants |= copies_for(stream) | {"SHARED_MEMORY": backend.chip.shared_memory} | backend.options
        sizes = {"HIDDEN": config.hidden, "FEATURES": len(config.target_layers), "NODES": COLUMNS}
        with ThreadPoolExecutor(3) as compilers:
            image = compilers.submit(build, "draft/draft.cu", backend.architecture, constants)
            gather = compilers.submit(build, "draft/gather.cu", backend.architecture, sizes)
            pack = compilers.submit(build, "large/pack.cu", backend.architecture, {})
            rows = StagedRows(device, sum(held_bytes(*each) for each in copied), None)
            self.stream = load_slabs(device, device.load(pack.result()).kernel("pack"), stream, tensors, rows)
        if head is None:
            self._head, self.top = backend.lend_head(), backend.outputs.top
        else:
            self._head = copied_head(backend, head, tensors if config.own_head else backend.lendable)
            image_of_top = top_image(backend.architecture, layout.vocab)
            self.top = Top(device, image_of_top, backend.outputs.logits, layout.vocab)
        self._kernel = device.load(image.result()).kernel("draft", backend.chip.shared_memory)
        self._gather = device.load(gather.result()).kernel("gather")
        self._vectors = device.upload(np.concatenate([tensors[n].float32().reshape(-1) for n in layout.vectors()]))
        self._rope = device.upload(turns(DIM // 2, config.rope_theta, backend.context + COLUMNS))
        self._parcels, self._first_parcel = device.upload(stream.parcels), device.upload(layout.first_parcel)
        self._tables = [device.upload(table) for table in layout.tables]
        self._scratch = {name: device.zeros(size) for name, size in layout.scratch_bytes().items()}
        for name in POLLED:
            self._scratch[name].fill_starts(NOT_YET, 1, self._scratch[name].nbytes // 4)
        self._from_host: Buffer | None = None
        self._step: StepProgram | None = None  # once trees grow on the device
        windows = [window or 0 for window in config.windows]
        self._request = DraftRequest(
            window=tuple(windows), causal=tuple(map(int, config.causal)), context=tuple(stream.context_order)
        )

    @property
    def _logits_at(self) -> int:
        """Where its logits begin among the backend's, behind a tree's; nobody asks about the root."""
        return MAX_NODES * self.backend.config.vocab + self.layout.vocab

    # -- memory ---------------------------------------------------------------------------------------------------

    def new_memory(self) -> CudaMemory:
        return CudaMemory(self)

    def params_for(self, memory: CudaMemory) -> DraftParams:
        """Where everything is that the kernel uses. Stages are counted from the block's first."""
        stages, runs, tiles = (table.pointer for table in self._tables)
        pointers = {name: buffer.pointer for name, buffer in (self._scratch | memory.buffers).items()}
        return DraftParams(
            stream=self.stream.pointer, parcels=self._parcels.pointer, first_parcel=self._first_parcel.pointer,
            stages=stages + 2 * 16,
            runs=runs + 2 * self.layout.sms * 48, tiles=tiles, embedding=self._embedding.rows.pointer,
            vectors=self._vectors.pointer, rope=self._rope.pointer, capacity=self.layout.capacity,
            head_stream=self._head.stream.pointer, head_parcels=self._head.parcels.pointer,
            first_head_parcel=self._head.first_parcel.pointer,
            out_logits=self.backend.outputs.logits.pointer + 4 * MAX_NODES * self.backend.config.vocab,
            out_hidden=self.backend.outputs.hidden.pointer, profile=self.backend.profile.pointer, **pointers,
        )  # fmt: skip

    def forget(self, memory: BlockMemory) -> None:
        assert isinstance(memory, CudaMemory)
        memory.appended = memory.waiting = 0
        memory.ahead = None

    def snapshot(self, memory: BlockMemory) -> Saved:
        assert isinstance(memory, CudaMemory)
        while memory.waiting:
            self.project(memory)
        used, pieces = min(memory.appended, self.layout.capacity), self.config.layers * self.config.kv_heads
        copies = {"positions": self.device.allocate(memory.buffers["positions"].nbytes)}
        copies["positions"].copy_from(memory.buffers["positions"])
        for name in ("keys", "values"):
            copies[name] = self.device.allocate(used * pieces * DIM * 2)
            if used:
                copies[name].copy_starts(memory.buffers[name], pieces, used * DIM * 2)
        return Saved(copies, memory.appended)

    def restore(self, memory: BlockMemory, saved: Any) -> None:
        assert isinstance(memory, CudaMemory)
        used, pieces = min(saved.appended, self.layout.capacity), self.config.layers * self.config.kv_heads
        memory.buffers["positions"].copy_from(saved.buffers["positions"])
        for name in ("keys", "values"):
            if used:
                memory.buffers[name].copy_starts(saved.buffers[name], pieces, used * DIM * 2)
        memory.appended, memory.waiting, memory.ahead = saved.appended, 0, None

    # -- the contract ---------------------------------------------------------------------------------------------

    def append(self, memory: BlockMemory, features: Rows, position: int) -> None:
        assert isinstance(memory, CudaMemory)
        ahead, memory.ahead = memory.ahead, None
        if ahead is not None and isinstance(features, CudaRows) and features.begins(ahead.rows):
            memory.appended += len(features)  # the others are written over
            if len(features) == len(ahead.rows):
                memory.ahead = replace(ahead, appended=True)
            return
        if not isinstance(features, CudaRows):
            for first in range(0, len(features), ABREAST):
                self._append(memory, self._brought(features[first : first + ABREAST]), position + first)
        else:
            self._append(memory, features, position)

    def fill(self, memory: BlockMemory, root: int, position: int, rows: int, want: Want) -> Output:
        assert isinstance(memory, CudaMemory)
        backend = self.backend
        valid = backend.overwrite_outputs()
        self.launch(memory, self.request(root, position, want))
        output = Output()
        if want.tokens != "none":
            output = self.top.tokens_of(rows, want, offset=self._logits_at)
        if want.hidden:
            width = self.config.hidden
            output.hidden = CudaRows(backend.outputs.hidden, np.arange(rows + 1)[:, None] * width, width, valid)
        return output

    def grow(
        self, memory: BlockMemory, root: int, position: int, rows: int, width: int, nodes: int, verified: int,
        least: Sequence[float],
    ) -> GrowingTree | None:  # fmt: skip
        assert isinstance(memory, CudaMemory)
        grow = growth(root, rows, width, nodes, verified, least)
        if grow is None or grow.verified > self.backend.largest_launch:
            return None
        if self._step is None:
            self._step = StepProgram(self.backend)
        asked, memory.asked = memory.asked, (rows, width, nodes, verified, *least)
        again = asked == memory.asked
        ahead, memory.ahead = memory.ahead, None
        holds = ahead is not None and self._holds(ahead, root, position, width)
        if holds and again and ahead is not None and ahead.growing is not None:
            return ahead.growing
        if not holds:
            self.backend.overwrite_outputs()
            self.launch(memory, self.request(root, position, Want(tokens="top")))
            self.top.queue(rows, width, offset=self._logits_at)
        return CudaGrowingTree(self, memory, self._step, grow, again, follows=holds)

    def _holds(self, ahead: Ahead, root: int, position: int, width: int) -> bool:
        """Whether what was queued ahead is what is asked for, and still there."""
        same = (ahead.root, ahead.position, ahead.width) == (root, position, width)
        return same and ahead.appended and ahead.launches == self.backend.outputs.launches

    def queue_ahead(self, memory: CudaMemory, length: int, want: Want, program: StepProgram, width: int) -> bool:
        """Behind a walk whose path begins at `length`, queue projecting its rows and the next block. False where the
        host has to do that when it knows the path."""
        if want.features != self.config.target_layers or memory.waiting or self.layout.capacity < COLUMNS:
            return False
        path, tree, features = program.path.pointer, program.tree.pointer, self.backend.outputs.features.pointer
        times = program.times.pointer
        gather = self._gathering(memory, features)
        gather.path, gather.tree, gather.times = path, tree, times
        self._gather.launch(COLUMNS * len(want.features), 128, gather)
        request = self.request(0, 0, Want(tokens="top"))
        request.path, request.first_position, request.appended = path, length, memory.appended
        self._run(memory, request)
        request.path = None
        self.top.queue(self.config.block - 1, width, offset=self._logits_at)
        return True

    # -- launching ------------------------------------------------------------------------------------------------

    def _brought(self, rows: Rows) -> CudaRows:
        """Rows of the host on the device, until the next are."""
        width, count = self.config.hidden, len(self.config.target_layers)
        if self._from_host is None:
            self._from_host = self.device.allocate(ABREAST * count * width * 4)
        self._from_host.write(np.ascontiguousarray(rows.numpy(), np.float32))
        offsets = np.arange(len(rows) * count).reshape(len(rows), count) * width
        return CudaRows(self._from_host, offsets, width, lambda: True)

    def _append(self, memory: CudaMemory, features: CudaRows, position: int) -> None:
        """Rows wait together as long as they follow each other and there is room for them."""
        done, room = 0, self.layout.groups * self.layout.group_rows
        if memory.position + memory.waiting != position:
            while memory.waiting:
                self.project(memory)
        while done < len(features):
            count = min(ABREAST, room, len(features) - done)
            while memory.waiting + count > room:
                self.project(memory)
            if not memory.waiting:
                memory.position = position + done
            some = features[done : done + count]
            request = self._gathering(memory, some.buffer.pointer)
            request.apart = int(some.offsets[0, -1] - some.offsets[0, 0]) // max(1, some.offsets.shape[1] - 1)
            request.offsets[:count] = some.offsets[:, 0].tolist()
            self._gather.launch(count * len(self.config.target_layers), 128, request)
            memory.waiting += count
            done += count

    def _gathering(self, memory: CudaMemory, source: int) -> Gather:
        """Of rows behind those that wait."""
        waiting, layout = memory.buffers["waiting"].pointer, self.layout
        return Gather(
            waiting=waiting, source=source, groups=layout.groups, rows=layout.group_rows, group=memory.group,
            first=memory.waiting,
        )  # fmt: skip

    def request(self, root: int, position: int, want: Want) -> DraftRequest:
        request, c = self._request, self.config
        request.nodes, request.position, request.want_hidden = c.block, position, want.hidden
        request.want_logits = want.tokens != "none"
        request.tokens[: c.block] = (root, *[c.mask_token] * (c.block - 1))
        return request

    def project(self, memory: CudaMemory) -> None:
        """Queue the first of what waits."""
        self._request.nodes = 0
        self._launch(memory, self._request, min(memory.waiting, self.layout.group_rows))

    def catch_up(self, memory: BlockMemory) -> None:
        assert isinstance(memory, CudaMemory)
        while memory.waiting > self.layout.group_rows:
            self.project(memory)

    def launch(self, memory: CudaMemory, request: DraftRequest) -> None:
        """Queue what waits, and what is requested."""
        nodes = request.nodes
        self.catch_up(memory)
        request.nodes = nodes
        self._launch(memory, request, memory.waiting)

    def _launch(self, memory: CudaMemory, request: DraftRequest, rows: int) -> None:
        request.rows, request.first_position, request.appended = rows, memory.position, memory.appended
        self._run(memory, request)
        memory.appended += rows
        memory.position += rows
        memory.waiting -= rows
        memory.group = (memory.group + 1) % self.layout.groups

    def _run(self, memory: CudaMemory, request: DraftRequest) -> None:
        memory.params.waiting = memory.buffers["waiting"].pointer + memory.group * self.layout.group_bytes
        self._kernel.launch(self.layout.sms, THREADS, memory.params, request, cooperative=True)


def copies_for(stream: DraftStream) -> dict[str, object]:
    kinds = {part.type for stage in stream.stages for part in stage.parts}
    return NARROW_COPIES if kinds <= {"Q4_K", "Q5_K", "Q6_K"} else WIDE_COPIES


def check_draft_fits(device: Device, needed: int, config: DFlashConfig) -> None:
    if needed > (room := device.room()).free:
        raise DoesNotFit(
            f"The draft {config.source} needs {gib(needed)}, and {room}.", "Use --draft none or --draft ngram."
        )
