"""The activations-first forward pass behind the contract: the weights' place, launches, commits."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from warpsmith.backend.base import MemoryPart, Want
from warpsmith.backend.cuda.backend import CudaBackend
from warpsmith.backend.cuda.build.compiler import build
from warpsmith.backend.cuda.build.profiles import Profile
from warpsmith.backend.cuda.draft.lent import LentEmbedding, LentHead
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.large.loading import load_weights
from warpsmith.backend.cuda.large.plan import large_parts, variants_for
from warpsmith.backend.cuda.large.rounds import rounds_of
from warpsmith.backend.cuda.large.stream import PARCEL_UNIT
from warpsmith.backend.cuda.large.structures import LargeParams, LargeRequest
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.backend.cuda.memory.exchange import NOT_YET
from warpsmith.backend.cuda.memory.layout import rope_table
from warpsmith.backend.cuda.memory.plan import refuse_what_does_not_fit
from warpsmith.backend.cuda.prefill import SlabStream
from warpsmith.backend.cuda.requests import ONE_PASS, Asked, at_row, fill_request
from warpsmith.backend.cuda.state import CudaState
from warpsmith.backend.cuda.structures import Commit, Draw, Path
from warpsmith.backend.cuda.tree import TreeOnDevice
from warpsmith.backend.cuda.weights.loading import Progress
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.model.config import Config

THREADS = 384
COMMITTED_COLUMNS = 64  # of a DeltaNet layer's state, by a block of commit.cu
# Up to so many tokens, by columns of a build, attention makes do with one team of warps, and one chunk of values in
# shared memory.
SHORT_CONTEXT = {1: 16384, 8: 8192, 16: 8192, 24: 8192}
# Copies of weights on their way to an SM while it multiplies and before it does, for one node and for trees. All that
# SMs exchange waits behind them: where an SM has few bytes of a layer, fewer are faster. With more bytes than that,
# memory would be idle between two. What trees wait for is a full ring.
IN_FLIGHT, FEW_IN_FLIGHT, FEW_BYTES = ((3, 2), (5, 5)), ((2, 1), (4, 4)), 1_400_000


class LargeBackend(CudaBackend):
    """Weights packed in slabs, dealt to SMs by bytes, and the kernels built for them."""

    layout: LargeLayout

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, Tensor],
        *,
        context: int | None = None,
        progress: Progress | None = None,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        memory_limit: int | None = None,
        profile: Profile | None = None,
        options: Mapping[str, object] | None = None,
        prompts: bool = True,
        architecture: str | None = None,
        device: Device | None = None,
    ) -> None:
        """`prompts`: kernels of their own for long chains are made ready too. `architecture`: what to build for instead
        of this chip (`options` may name another SHARED_MEMORY). `device`: another backend's, whose plan and memory
        limit are for both."""
        alone = device is None
        super().__init__(
            config,
            tensors,
            device or Device(limit=memory_limit),
            context=context,
            profile=profile,
            architecture=architecture,
            options=options,
        )
        device = self.device
        self.shared_memory = int(str(self.options.get("SHARED_MEMORY", self.chip.shared_memory)))
        variants = variants_for(self.shared_memory)
        self.largest_tree, self.largest_launch = MAX_NODES, variants[-1]
        self.cache_types = (cache_type_k, cache_type_v)
        self.layout = layout = LargeLayout(config, self.chip.sms, self.stored, self.cache_types)
        if alone:
            refuse_what_does_not_fit(self.memory, self.context, device.room())
        self._begin_builds("large/forward.cu", variants)
        pack = device.load(build("large/pack.cu", self.architecture, {})).kernel("pack")
        self._commit = device.load(self._image("large/commit.cu")).kernel("commit")
        self.stream, self.embedding = load_weights(device, pack, layout, tensors, progress)
        self.vectors = device.upload(np.concatenate([tensors[n].float32().reshape(-1) for n in layout.vectors()]))
        self.rope = device.upload(rope_table(config, self.context))
        self.parcels = device.upload(layout.parcels)
        self.first_parcel, self.first_head_parcel = (
            device.upload(layout.first_parcel[stage].astype(np.uint32)) for stage in (0, -1)
        )
        self.tables = [device.upload(table) for table in layout.tables]
        self.recurrent = device.upload(np.array(config.recurrent, np.uint8))
        self.scratch = {name: device.zeros(size) for name, size in layout.scratch_bytes(self.largest_launch).items()}
        for name in ("words", "sums"):
            self.scratch[name].fill_starts(NOT_YET, 1, self.scratch[name].nbytes // 4)
        self._make_outputs()
        if prompts:
            self._prepare_prompts(SlabStream(layout, self.architecture))

    def memory(self, context: int, sequences: int = 1, snapshots: int = 0) -> list[MemoryPart]:
        parts = large_parts(self.layout, context, sequences, snapshots, self.largest_launch)
        return parts + self._drafts_memory(context, sequences)

    def _launch_commit(self, state: CudaState, commit: Commit) -> None:
        blocks = self.layout.delta_layers * (self.config.value_dim // COMMITTED_COLUMNS) + self.layout.caches
        self._commit.launch(blocks, 256, state.params, commit)

    def lend_head(self) -> LentHead:
        return LentHead(self.stream, self.layout.deals[-1], self.parcels, self.first_head_parcel)

    def lend_embedding(self) -> LentEmbedding:
        return LentEmbedding(self.embedding, self.layout.embedding_type)

    def _stream_bounds(self) -> np.ndarray:
        units = self.layout.stream_bytes // PARCEL_UNIT
        return np.arange(self.layout.sms + 1) * units // self.layout.sms * PARCEL_UNIT

    # -- launching ------------------------------------------------------------------------------------------------

    def constants(self, nodes: int) -> dict[str, object]:
        """What the kernels for so many nodes are built with."""
        few = self.layout.stream_bytes < FEW_BYTES * self.config.layers * self.layout.sms
        in_flight, between = (FEW_IN_FLIGHT if few else IN_FLIGHT)[nodes > 1]
        own = {
            "IN_FLIGHT": in_flight,
            "BETWEEN": between,
            "SHARED_MEMORY": self.shared_memory,
            "SAMPLES": int(nodes == 1 and self.layout.samples),  # the build that decodes
            "SHORT_CONTEXT": int(self.context <= SHORT_CONTEXT[nodes]),
        }
        return self.layout.constants(nodes) | own | self.options

    def _image(self, source: str, nodes: int = 1) -> bytes:
        return build(source, self.architecture, self.constants(nodes))

    def params_for(self, state: CudaState) -> LargeParams:
        outputs = self.outputs
        stages, runs, tiles = (table.pointer for table in self.tables)
        shared = {name: buffer.pointer for name, buffer in self.scratch.items()}
        own = {name: buffer.pointer for name, buffer in state.pending.items()}
        return LargeParams(
            stream=self.stream.pointer, parcels=self.parcels.pointer, first_parcel=self.first_parcel.pointer,
            stages=stages, runs=runs, tiles=tiles, recurrent=self.recurrent.pointer, embedding=self.embedding.pointer,
            vectors=self.vectors.pointer, rope=self.rope.pointer, delta=state.delta.pointer,
            history=state.history.pointer, keys=state.keys.pointer, values=state.values.pointer, context=state.context,
            out_count=outputs.ring.pointer, out_tokens=outputs.ring.pointer + 4, out_logits=outputs.logits.pointer,
            out_features=outputs.features.pointer, out_hidden=outputs.hidden.pointer, profile=self.profile.pointer,
            **shared, **own,
        )  # fmt: skip

    def launch(self, state: CudaState, tree: Tree | TreeOnDevice, want: Want, asked: Asked = ONE_PASS) -> None:
        self.overwrite_outputs()
        if not isinstance(tree, Tree) or len(tree) <= self.largest_launch:
            return self._launch(state, tree, want, LargeRequest(), asked)
        for part in rounds_of(tree.parents.tolist(), self.largest_launch):
            if part.path:
                self.queue_commit(state, Commit(path=Path(len(part.path), (ctypes.c_int * MAX_NODES)(*part.path))))
            some, here = Tree(tree.tokens[part.nodes], np.array(part.parents)), replace(asked, after=len(part.path))
            self._launch(state, some, want, LargeRequest(whole=len(tree)), here, part.nodes)
        return None

    def _launch(self, state: CudaState, tree: Tree | TreeOnDevice, want: Want, request: LargeRequest, asked: Asked,
                places: Sequence[int] = range(MAX_NODES)) -> None:  # fmt: skip
        """One launch. `places`: the numbers of these nodes in the request's whole tree."""
        own = cast(LargeParams, state.params_after() if asked.after else state.params)
        params = at_row(own, asked.row, self.config, want)
        fill_request(request, state, tree, want, asked)
        request.place[: len(places)] = list(places)
        self.scratch["counter"].fill_starts(0, 1, self.scratch["counter"].nbytes // 4)
        arguments = (params, request, asked.draw or Draw())
        self._kernel(len(tree)).launch(self.layout.sms, THREADS, *arguments, cooperative=True)
