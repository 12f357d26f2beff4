"""The weights-first forward pass behind the contract: the weights' place, launches, commits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from warpsmith.backend.base import ARGMAX, MemoryPart, State, Want
from warpsmith.backend.cuda.backend import CudaBackend
from warpsmith.backend.cuda.build.compiler import build
from warpsmith.backend.cuda.build.profiles import Profile
from warpsmith.backend.cuda.builds import VARIANTS, build_constants, build_options, check_shape
from warpsmith.backend.cuda.debug.trace import read_stage, stage_number
from warpsmith.backend.cuda.draft.lent import LentEmbedding, LentHead, copied_embedding, copied_head
from warpsmith.backend.cuda.draft.plan import head_stream
from warpsmith.backend.cuda.memory.driver import Buffer, Device
from warpsmith.backend.cuda.memory.exchange import NOT_YET
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.memory.plan import check_fit, weights_first_parts
from warpsmith.backend.cuda.prefill import RowTiles
from warpsmith.backend.cuda.requests import ONE_PASS, Asked, at_row, fill_request
from warpsmith.backend.cuda.schedule import busy_sms
from warpsmith.backend.cuda.shape import COLUMNS, threads_of
from warpsmith.backend.cuda.state import CudaState
from warpsmith.backend.cuda.structures import Commit, Draw, Params, Request
from warpsmith.backend.cuda.tree import TreeOnDevice
from warpsmith.backend.cuda.weights.loading import Progress, load_weights
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.model.config import Config

EVERY_STAGE = 1 << 30


class WeightsFirstBackend(CudaBackend):
    """Weights packed in row tiles, and the kernels built for them."""

    layout: Layout
    # copies, once a draft has asked
    _lent_head: LentHead | None = None
    _lent_embedding: LentEmbedding | None = None

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, Tensor],
        *,
        context: int | None = None,
        progress: Progress | None = None,
        memory_limit: int | None = None,
        profile: Profile | None = None,
        architecture: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        device = Device(limit=memory_limit)
        check_shape(config)
        super().__init__(
            config,
            tensors,
            device,
            context=context,
            profile=profile,
            architecture=architecture,
            options=options,
        )
        self.largest_tree = self.largest_launch = self.chip_profile.largest_tree
        self.shared_memory = self.chip.shared_memory
        self.layout = layout = Layout(config, min(self.chip.sms, busy_sms(config)), self.stored)
        check_fit(layout, self.context, device.room())
        self._begin_builds("forward/forward.cu", [n for n in VARIANTS if n <= self.largest_tree])
        pack = device.load(self._image("weights/pack.cu")).kernel("pack")
        self._commit = device.load(self._image("forward/commit.cu")).kernel("commit")
        self.stream, self.embedding = load_weights(device, pack, layout.stream, tensors, progress)
        self.vectors = device.upload(np.concatenate([tensors[n].float32().reshape(-1) for n in layout.vectors()]))
        self.rope = device.upload(layout.rope_table(self.context))
        self.stream_start = device.upload(layout.stream.start.astype(np.uint64))
        self.head_start = device.upload(layout.stream.part_start[-1].astype(np.uint64))
        self.exchange = device.allocate(layout.exchange.bytes)
        self.parts = device.allocate(layout.parts_bytes)
        self._reset_parts()
        self.branch_state = device.allocate(layout.branch_bytes)
        self._make_outputs()
        self._prepare_prompts(RowTiles(layout, self.architecture))

    def memory(self, context: int, sequences: int = 1, snapshots: int = 0) -> list[MemoryPart]:
        parts = weights_first_parts(self.layout, context, sequences, snapshots)
        return parts + self._drafts_memory(context, sequences)

    def lend_head(self) -> LentHead:
        if self._lent_head is None:
            head = head_stream(self.config, self.stored, self.chip.sms)
            self._lent_head = copied_head(self, head, self.lendable)
        return self._lent_head

    def lend_embedding(self) -> LentEmbedding:
        if self._lent_embedding is None:
            self._lent_embedding = copied_embedding(self)
        return self._lent_embedding

    def lent_copies(self) -> int:
        head, embedding = self._lent_head, self._lent_embedding
        return (head.nbytes if head else 0) + (embedding.rows.nbytes if embedding else 0)

    def trace(self, state: State, tree: Tree, stop_after: str) -> dict[str, np.ndarray]:
        """The exchanged buffers after a stage of the plan (`delta_mix.3`), to compare with the reference's."""
        assert isinstance(state, CudaState)
        self.launch(state, tree, ARGMAX, stop_after=stage_number(self.layout.schedule, stop_after))
        state.drafted = None
        self.device.synchronize()
        self._reset_parts()  # a pass that stops inside a layer may leave some behind
        return read_stage(self, state, stop_after, len(tree))

    def _stream_bounds(self) -> np.ndarray:
        return np.append(self.layout.stream.start, self.layout.stream_bytes)

    def _reset_parts(self) -> None:
        self.parts.fill_starts(NOT_YET, 1, self.parts.nbytes // 4)

    # -- launching ------------------------------------------------------------------------------------------------

    def _image(self, source: str, nodes: int = 1) -> bytes:
        constants = build_constants(self.layout, self.chip, self.chip_profile, nodes) | self.options
        return build(source, self.architecture, constants, build_options(source, self.layout, self.architecture))

    def params_for(self, state: CudaState) -> Params:
        def at(buffer: Buffer) -> int:
            return buffer.pointer

        outputs = self.outputs
        pointers = {
            "stream": at(self.stream), "stream_start": at(self.stream_start), "head_start": at(self.head_start),
            "embedding": at(self.embedding), "vectors": at(self.vectors), "rope": at(self.rope),
            "delta": at(state.delta), "history": at(state.history),
            "keys": at(state.keys), "values": at(state.values), "out_count": outputs.ring.pointer,
            "out_tokens": outputs.ring.pointer + 4, "out_logits": at(outputs.logits),
            "out_features": at(outputs.features), "out_hidden": at(outputs.hidden), "profile": at(self.profile),
            "exchange": at(self.exchange), "parts": at(self.parts), "branch_state": at(self.branch_state),
        }  # fmt: skip
        pointers |= {name: at(buffer) for name, buffer in state.pending.items()}
        return Params(context=state.context, **pointers)

    def launch(
        self,
        state: CudaState,
        tree: Tree | TreeOnDevice,
        want: Want,
        asked: Asked = ONE_PASS,
        stop_after: int = EVERY_STAGE,
    ) -> None:
        self.overwrite_outputs()
        # before the rest is made ready: the device does it meanwhile
        self.exchange.fill_starts(NOT_YET, 2, -(-len(tree) // 8) * self.layout.exchange.tile_words)
        params = at_row(state.params_after() if asked.after else state.params, asked.row, self.config, want)
        request = Request(stop_after=stop_after)
        fill_request(request, state, tree, want, asked)
        arguments = (params, request, asked.draw or Draw())  # kernels for trees know of no draw
        self._kernel(len(tree)).launch(self.layout.sms, threads_of(self.architecture), *arguments, cooperative=True)

    def _launch_commit(self, state: CudaState, commit: Commit) -> None:
        blocks = self.layout.delta_layers * self.layout.blocks + self.layout.caches
        self._commit.launch(blocks, COLUMNS * 32, state.params, commit)
