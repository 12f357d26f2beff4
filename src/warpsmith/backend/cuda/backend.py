"""The CUDA backend: one persistent kernel for plain decoding and for trees."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median

import numpy as np

from warpsmith.backend.base import (
    ARGMAX,
    PREFILL_CHUNK,
    Backend,
    Batch,
    Listener,
    MemoryPart,
    Output,
    Snapshot,
    State,
    Want,
    drafted,
    join_outputs,
    keep_drafted,
    take_drafted,
    walk,
)
from warpsmith.backend.block_draft import BlockDraft
from warpsmith.backend.candidates import candidates_needed, choose_among
from warpsmith.backend.checks import check_batch, check_ids, check_room, check_tokens
from warpsmith.backend.cuda.build.compiler import build, target
from warpsmith.backend.cuda.build.profiles import Profile
from warpsmith.backend.cuda.build.profiles import choose as choose_profile
from warpsmith.backend.cuda.builds import VARIANTS, build_constants, build_options, check_shape
from warpsmith.backend.cuda.debug.trace import read_stage, stage_number
from warpsmith.backend.cuda.decoding import Decoder
from warpsmith.backend.cuda.draft.layout import DraftLayout
from warpsmith.backend.cuda.draft.layout import takes as draft_fits
from warpsmith.backend.cuda.draft.lent import HeadProgram, Lent, lend_copies, lendable
from warpsmith.backend.cuda.draft.mtp import MtpProgram, block_config
from warpsmith.backend.cuda.draft.network import CudaDraft
from warpsmith.backend.cuda.draft.plan import draft_parts
from warpsmith.backend.cuda.memory.driver import Buffer, Device, Event, Kernel
from warpsmith.backend.cuda.memory.exchange import NOT_YET
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.memory.plan import check_fit, memory_parts
from warpsmith.backend.cuda.outputs import Outputs
from warpsmith.backend.cuda.prefill import Prefill, RowTiles
from warpsmith.backend.cuda.prefill.network import ModelOnDevice
from warpsmith.backend.cuda.prefill.streams import PromptStream
from warpsmith.backend.cuda.requests import at_row, fill_request
from warpsmith.backend.cuda.rows import CudaRows
from warpsmith.backend.cuda.sampler import DeviceSampler
from warpsmith.backend.cuda.schedule import busy_sms
from warpsmith.backend.cuda.shape import COLUMNS, MAX_STOPS, READ_AHEAD, threads_of
from warpsmith.backend.cuda.state import CudaState, bring_back, take_snapshot
from warpsmith.backend.cuda.structures import Commit, Draw, Params, Path, Request, Stream
from warpsmith.backend.cuda.top import MAX_TOP
from warpsmith.backend.cuda.tree import TreeOnDevice, WalkedOnDevice
from warpsmith.backend.cuda.weights.loading import Progress, load_weights
from warpsmith.backend.cuda.weights.stream import EMBEDDING
from warpsmith.backend.rows import HostRows
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.blocks import dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config

EVERY_STAGE = 1 << 30


class CudaBackend(Backend):
    """Weights packed on one GPU, and the kernels built for it."""

    name = "cuda"
    cache_types: tuple[str, str] = ("f16", "f16")  # of keys and of values
    _prompts: Prefill | None = None  # where the model suits its kernels
    _lent: Lent | None = None  # these once a draft has asked
    _draft: DraftLayout | None = None
    _head: HeadProgram | None = None
    _mtp: MtpProgram | None = None
    _rows_of_table: np.ndarray | None = None  # the embedding's, in the file

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
        self.config, self.device = config, Device(limit=memory_limit)
        check_shape(config)
        self.chip = self.device.chip
        self.chip_profile = profile or choose_profile(self.chip.name, self.chip.capability)[0]
        self.largest_tree = self.largest_launch = self.chip_profile.largest_tree
        self.architecture = architecture or target(self.chip.capability)
        stored = {name: tensor.type.name for name, tensor in tensors.items()}
        self.layout = layout = Layout(config, min(self.chip.sms, busy_sms(config)), stored)
        self.options = dict(options or {})
        self.context = context or config.context
        check_fit(layout, self.context, self.device.room())
        self._kernels: dict[int, Kernel] = {}
        compilers = ThreadPoolExecutor(1 + len(VARIANTS))  # side by side, and while the weights are copied
        sizes = [n for n in VARIANTS if n <= self.largest_tree]
        self._images = {n: compilers.submit(self._image, "forward/forward.cu", n) for n in sizes}
        top_image = compilers.submit(self._image, "sample/top.cu")
        compilers.shutdown(wait=False)
        pack = self.device.load(self._image("weights/pack.cu")).kernel("pack")
        self._commit = self.device.load(self._image("forward/commit.cu")).kernel("commit")

        self.stream, self.embedding = load_weights(self.device, pack, layout.stream, tensors, progress)
        self.vectors = self.device.upload(
            np.concatenate([tensors[n].float32().reshape(-1) for n in layout.schedule.vectors()])
        )
        self.rope = self.device.upload(layout.rope_table(self.context))
        self.stream_start = self.device.upload(layout.stream.start.astype(np.uint64))
        self.head_start = self.device.upload(layout.stream.part_start[-1].astype(np.uint64))
        self.exchange = self.device.allocate(layout.exchange.bytes)
        self.parts = self.device.allocate(layout.parts_bytes)
        self._reset_parts()
        self.branch_state = self.device.allocate(layout.pending_bytes()["branch_state"])
        marks = int(str(self.options.get("PROFILE", 0)))  # a profiling build keeps that many clocks an SM
        self.profile = self.device.zeros(layout.sms * marks * 8)
        self.outputs = outputs = Outputs(self.device, config, top_image.result())
        sampler = DeviceSampler(self.device, layout.sms, self.context, layout.samples)
        self._decoder = Decoder(self.device, sampler, outputs.ring, outputs.logits, config.vocab)
        self._prepare_prompts(RowTiles(layout, self.architecture))
        self.undecided = 0  # sampled tokens that the device left to the host
        self._weight_types = " ".join(sorted(set(stored.values())))
        self._lendable = lendable(config, tensors)

    def _prepare_prompts(self, weights: PromptStream) -> None:
        if weights.suits():
            model = ModelOnDevice(
                self.stream, self.embedding, self.vectors, self.rope, self.outputs.logits, self.chip.sms
            )
            self._prompts = Prefill(self.device, weights, model, options=self.options)

    # -- the contract ---------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, int | str]:
        return {
            "device": self.name,
            "gpu": self.chip.name,
            "sms": self.layout.sms,
            "architecture": self.architecture,
            "profile": repr(self.chip_profile),
            "type_k": self.cache_types[0],
            "type_v": self.cache_types[1],
            "weight_types": self._weight_types,
            **{name: str(value) for name, value in self.options.items()},
        }

    def memory(self, context: int, sequences: int = 1, snapshots: int = 0) -> list[MemoryPart]:
        parts = memory_parts(self.layout, context, sequences, snapshots)
        return parts + self._drafts_memory(context, sequences)

    def _drafts_memory(self, context: int, sequences: int) -> list[MemoryPart]:
        """Of the draft that was last made."""
        if self._draft is None or self._lent is None:
            return []
        return draft_parts(self._draft, context, sequences, self._lent.copied_bytes)

    def free_memory(self) -> int:
        return self.device.free_memory()

    def snapshot_bytes(self, length: int) -> int:
        return self.layout.delta_bytes + self.layout.history_bytes + sum(self.layout.cache_bytes(length))

    def new_state(self, context: int) -> CudaState:
        if context > self.context:
            raise BadRequest(f"This backend was loaded for a context of {self.context}.", f"Load it with -c {context}.")
        return CudaState(self, context)

    def prefill(self, state: State, ids: Sequence[int], want: Want = ARGMAX) -> Output:
        if not len(ids):
            raise BadRequest("There is nothing to prefill.", "Pass at least one token.")
        check_room(state, len(ids))
        if self._prompts is not None:
            assert isinstance(state, CudaState)
            if len(ids) <= PREFILL_CHUNK:
                check_ids(self.config, ids)
            else:
                check_tokens(self.config, np.asarray(ids))
            state.drafted = None
            self.overwrite_outputs()
            return self._prompts.run(state, ids, want, self.outputs.tokens_of)
        parts = []
        for start in range(0, len(ids), self.largest_launch):
            chunk = ids[start : start + self.largest_launch]
            last = start + len(chunk) == len(ids)
            tokens = want.tokens if want.every_row or last else "none"
            wanted = Want(tokens, want.top, want.features, want.hidden)
            part = self.forward([(state, Tree.chain(chunk))], wanted)
            self.commit(state, range(len(chunk)))
            parts.append(join_outputs([part]) if len(ids) > self.largest_launch else part)  # over before the next one's
        output = join_outputs(parts) if len(parts) > 1 else parts[0]
        if not want.every_row:
            of_tokens = replace(output, features=None, hidden=None)[-1:]
            output = replace(of_tokens, features=output.features, hidden=output.hidden)
        return output

    def forward(self, batch: Batch, want: Want = ARGMAX) -> Output:
        check_batch(self, batch)
        row = 0
        for state, tree in batch:
            assert isinstance(state, CudaState)
            self.launch(state, tree, want, row=row)
            row += len(tree)
        return keep_drafted(batch, self.outputs.of_trees([len(tree) for _, tree in batch], want))

    def overwrite_outputs(self) -> Callable[[], bool]:
        """Before a launch that writes logits and the like. Tells later whether they are still those of this launch."""
        self._decoder.let_go_of_ring()
        return self.outputs.overwrite()

    def verify(
        self, state: State, tree: Tree, sampling: Sampling | None = None, history: Sequence[int] = ()
    ) -> tuple[list[int], list[int]]:
        count = None if sampling is None or sampling.greedy else candidates_needed(sampling, history, len(tree))
        if sampling is None or count is None or count > min(MAX_TOP, self.config.vocab):
            return super().verify(state, tree, sampling, history)
        logits = drafted(state, tree).output.logits
        assert isinstance(logits, CudaRows)
        assert logits.buffer is self.outputs.logits
        best = self.outputs.top.of(len(tree), count, int(logits.offsets[0, 0]))
        assert best.top_ids is not None
        assert best.top_logits is not None
        assert best.logsumexp is not None
        rows = list(zip(best.top_ids, best.top_logits, best.logsumexp.tolist(), strict=True))

        def choose_at(node: int, text: list[int], position: int) -> int:
            token = choose_among(*rows[node], sampling, text, position)
            if token is None:
                self.undecided += 1
                token = choose(logits.row(node), sampling, text, position)
            return token

        return walk(tree, choose_at, history, state.length)

    def verifies_unseen(self, sampling: Sampling | None, stop: frozenset[int]) -> bool:
        if len(stop) > MAX_STOPS:
            return False
        return sampling is None or sampling.greedy or self.best_needed(sampling) is not None

    def best_needed(self, sampling: Sampling) -> int | None:
        """How many of a node's best logits the device draws from; None where the host has to."""
        if sampling.penalised or sampling.logit_bias:
            return None
        count = candidates_needed(sampling, (), 0)
        return None if count is None or count > min(MAX_TOP, self.config.vocab) else count

    def commit(self, state: State, path: Sequence[int]) -> None:
        assert isinstance(state, CudaState)
        run = state.drafted
        nodes = take_drafted(state, path)
        if not (isinstance(run, WalkedOnDevice) and run.path == nodes):  # else it was queued with the walk
            if isinstance(run, WalkedOnDevice) and run.overwritten:
                self.launch(state, run.tree, Want("none"))
            self.queue_commit(state, Commit(path=Path(len(nodes), (ctypes.c_int * MAX_NODES)(*nodes))))
        state.take_new()
        state.length += len(nodes)

    def queue_commit(self, state: CudaState, commit: Commit) -> None:
        """Queue writing what a path makes of the state; it is the state's once that takes it."""
        commit.delta, commit.history = state.kept_delta.pointer, state.kept_history.pointer
        commit.length = state.length
        self._launch_commit(state, commit)

    def _launch_commit(self, state: CudaState, commit: Commit) -> None:
        blocks = self.layout.delta_layers * self.layout.blocks
        blocks += self.layout.attention_layers * self.config.kv_heads
        self._commit.launch(blocks, COLUMNS * 32, state.params, commit)

    def block_draft(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], capacity: Sequence[int]
    ) -> BlockDraft | None:
        if self.architecture != "sm_90a" or not draft_fits(config, self.config.vocab):
            return None
        made = CudaDraft(self, config, tensors, capacity, self.lend)
        self._draft = made.layout
        return made

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        if self.architecture != "sm_90a":
            return super().embed(tokens)  # it would have to lend its LM head too
        if self._rows_of_table is None:
            self._rows_of_table = self._lendable[EMBEDDING].raw()  # which is looked through whole
        return dequantize(self._lendable[EMBEDDING].type, self._rows_of_table[list(tokens)])

    def head(self, hidden: np.ndarray, want: Want = ARGMAX) -> Output:
        return self._head_program().of(HostRows(hidden), want)

    def _head_program(self) -> HeadProgram:
        if self.architecture != "sm_90a":
            raise BadRequest("On this GPU the model does not lend its LM head.", "Use --draft ngram.")
        if self._head is None:
            self._head = HeadProgram(self, self.lend())
        return self._head

    @property
    def runs_mtp(self) -> bool:
        from warpsmith.backend.cuda.large.layout import takes

        return self.architecture == "sm_90a" and takes(block_config(self.config)) and self.config.vocab % 4 == 0

    def mtp(
        self, state: State, tokens: Sequence[int], hidden: np.ndarray, position: int, want: Want = ARGMAX
    ) -> Output:
        if not self.runs_mtp or not self.config.mtp_layers:
            return super().mtp(state, tokens, hidden, position, want)
        assert isinstance(state, CudaState)
        check_tokens(self.config, np.asarray(tokens))
        if self._mtp is None:
            from warpsmith.backend.cuda.large.backend import LargeBackend

            def make(config: Config, tensors: Mapping[str, Tensor]) -> CudaBackend:
                return LargeBackend(
                    config, tensors, context=self.context, options=self.options, prompts=False, device=self.device
                )

            self._mtp = MtpProgram(self, self._lendable, self._head_program(), make)
        return self._mtp.run(state, tokens, hidden, position, want)

    def lend(self) -> Lent:
        """What a draft needs of the model."""
        if self._lent is None:
            self._lent = lend_copies(self, self._lendable)
        return self._lent

    def decode(
        self,
        state: State,
        token: int,
        count: int,
        stop: frozenset[int] = frozenset(),
        sampling: Sampling | None = None,
        history: Sequence[int] = (),
        listener: Listener | None = None,
    ) -> Generator[int]:
        assert isinstance(state, CudaState)
        check_tokens(self.config, np.array([token]))
        if self._decoder.takes(stop, sampling, history):
            yield from self._decoder.run(self, state, token, count, stop, sampling, history, listener)
        else:
            yield from super().decode(state, token, count, stop, sampling, history, listener)

    def snapshot(self, state: State) -> Snapshot:
        assert isinstance(state, CudaState)
        return take_snapshot(state, self.device, self.layout)

    def restore(self, state: State, snapshot: Snapshot) -> None:
        assert isinstance(state, CudaState)
        bring_back(state, snapshot, self.layout)
        self.device.synchronize()  # whoever has the time taken of what follows does not wait for the copies

    def trace(self, state: State, tree: Tree, stop_after: str) -> dict[str, np.ndarray]:
        """The exchanged buffers after a stage of the plan (`delta_mix.3`), to compare with the reference's."""
        assert isinstance(state, CudaState)
        self.launch(state, tree, ARGMAX, stop_after=stage_number(self.layout.schedule, stop_after))
        state.drafted = None
        self.device.synchronize()
        self._reset_parts()  # a pass that stops inside a layer may leave some behind
        return read_stage(self, state, stop_after, len(tree))

    def bytes_a_token(self, length: int) -> int:
        layout = self.layout
        weights = layout.stream.bytes + layout.vector_bytes
        return weights + sum(layout.cache_bytes(length)) + 2 * layout.delta_bytes

    def read_bandwidth(self) -> float:
        """Every SM reads its stream and does nothing with it; the median of nine times."""
        image = build("weights/stream.cu", self.architecture, {})
        kernel = self.device.load(image).kernel("read_stream", READ_AHEAD)
        bounds = self._stream_bounds()
        ends = self.device.upload(bounds.astype(np.uint64))
        request = Stream(bytes=self.stream.pointer, start=ends.pointer)
        begin, end = Event(self.device), Event(self.device)
        times = []
        for _ in range(10):
            begin.record()
            kernel.launch(self.layout.sms, 32, request)
            end.record()
            end.wait()
            times.append(end.seconds_since(begin))
        return int(bounds[-1]) / median(times[1:])

    def _stream_bounds(self) -> np.ndarray:
        """Where each SM's stream begins, and where the last one's ends."""
        return np.append(self.layout.stream.start, self.layout.stream.bytes)

    def _reset_parts(self) -> None:
        self.parts.fill_starts(NOT_YET, 1, self.parts.nbytes // 4)

    # -- launching ------------------------------------------------------------------------------------------------

    def _kernel(self, nodes: int) -> Kernel:
        size = next(n for n in VARIANTS if nodes <= n)
        if size not in self._kernels:
            module = self.device.load(self._images[size].result())
            self._kernels[size] = module.kernel("forward", self.chip.shared_memory)
        return self._kernels[size]

    def _image(self, source: str, nodes: int = 1) -> bytes:
        constants = build_constants(self.layout, self.chip, self.chip_profile, nodes) | self.options
        return build(source, self.architecture, constants, build_options(source, self.layout, self.architecture))

    def params_for(self, state: CudaState) -> Params:
        """Where everything is that the kernels use, this sequence's too."""

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
        steps: int = 0,
        stop: Sequence[int] = (),
        stop_after: int = EVERY_STAGE,
        draw: Draw | None = None,
        row: int = 0,
        after: int = 0,
    ) -> None:
        """Queue a pass whose first node's outputs are row number `row` of all that is computed together, on what the
        state will be when a commit of `after` tokens that is queued already is taken."""
        self.overwrite_outputs()
        # before the rest is made ready: the device does it meanwhile
        self.exchange.fill_starts(NOT_YET, 2, -(-len(tree) // 8) * self.layout.exchange.tile_words)
        params = at_row(state.params_after() if after else state.params, row, self.config, want)
        request = Request(
            nodes=len(tree),
            length=state.length + after,
            steps=steps,
            stop_after=stop_after,
            stops=len(stop),
            features=len(want.features),
            want_logits=want.tokens in ("top", "logits"),
            want_hidden=want.hidden,
        )
        fill_request(request, tree, stop, want)
        arguments = (params, request, draw or Draw())  # kernels for trees know of no draw
        self._kernel(len(tree)).launch(self.layout.sms, threads_of(self.architecture), *arguments, cooperative=True)
