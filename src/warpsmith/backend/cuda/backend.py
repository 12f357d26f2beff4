"""The CUDA backend: the contract, for both forward passes."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

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
from warpsmith.backend.cuda.decoding import Decoder
from warpsmith.backend.cuda.draft.layout import DraftLayout
from warpsmith.backend.cuda.draft.layout import takes as draft_fits
from warpsmith.backend.cuda.draft.lent import HeadProgram, LentEmbedding, LentHead, lendable
from warpsmith.backend.cuda.draft.mtp import MtpProgram, block_config
from warpsmith.backend.cuda.draft.network import CudaDraft
from warpsmith.backend.cuda.draft.plan import draft_parts
from warpsmith.backend.cuda.memory.driver import Buffer, Device, Event, Kernel
from warpsmith.backend.cuda.memory.sizes import Sizes
from warpsmith.backend.cuda.outputs import Outputs
from warpsmith.backend.cuda.prefill import Prefill
from warpsmith.backend.cuda.prefill.network import ModelOnDevice
from warpsmith.backend.cuda.prefill.streams import PromptStream
from warpsmith.backend.cuda.requests import ONE_PASS, Asked
from warpsmith.backend.cuda.rows import CudaRows
from warpsmith.backend.cuda.sampler import DeviceSampler
from warpsmith.backend.cuda.shape import MAX_STOPS, READ_AHEAD
from warpsmith.backend.cuda.state import CudaState, bring_back, take_snapshot
from warpsmith.backend.cuda.structures import Commit, Path, Stream
from warpsmith.backend.cuda.top import MAX_TOP, top_image
from warpsmith.backend.cuda.tree import TreeOnDevice, WalkedOnDevice
from warpsmith.backend.cuda.weights.stream import EMBEDDING
from warpsmith.backend.rows import HostRows
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.blocks import dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config


class CudaBackend(Backend):
    """What both forward passes have in common: drafts, prompts, sampling, snapshots. A pass has its weights, its
    launches and its memory (weights_first.py, large/backend.py)."""

    name = "cuda"
    cache_types: tuple[str, str] = ("f16", "f16")  # of keys and of values
    layout: Sizes
    shared_memory: int  # of an SM
    largest_launch: int  # nodes
    variants: Sequence[int]  # nodes that builds of the pass take
    stream: Buffer  # of weights
    embedding: Buffer
    vectors: Buffer
    rope: Buffer
    profile: Buffer  # clocks, in a profiling build
    outputs: Outputs
    _commit: Kernel
    _decoder: Decoder
    _prompts: Prefill | None = None  # where the model suits its kernels
    # these once a draft has asked
    _draft: DraftLayout | None = None
    _head: HeadProgram | None = None
    _mtp: MtpProgram | None = None
    _rows_of_table: np.ndarray | None = None  # the embedding's, in the file

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, Tensor],
        device: Device,
        *,
        context: int | None,
        profile: Profile | None,
        architecture: str | None,
        options: Mapping[str, object] | None,
    ) -> None:
        self.config, self.device, self.chip = config, device, device.chip
        self.context = context or config.context
        self.chip_profile = profile or choose_profile(self.chip.name, self.chip.capability)[0]
        self.architecture = architecture or target(self.chip.capability)
        self.options = dict(options or {})
        self.undecided = 0  # sampled tokens that the device left to the host
        self.stored = {name: tensor.type.name for name, tensor in tensors.items()}
        self.lendable = lendable(config, tensors)
        self._images: dict[int, Future[bytes]] = {}
        self._kernels: dict[int, Kernel] = {}

    def _begin_builds(self, source: str, sizes: Sequence[int]) -> None:
        """Of the pass for trees of up to so many nodes: side by side, and while the weights are copied."""
        self.variants = sizes
        compilers = ThreadPoolExecutor(1 + len(sizes))
        self._images = {nodes: compilers.submit(self._image, source, nodes) for nodes in sizes}
        self._top_image = compilers.submit(top_image, self.architecture, self.config.vocab)
        compilers.shutdown(wait=False)

    def _make_outputs(self) -> None:
        """Where a pass writes, and what draws tokens from it."""
        marks = int(str(self.options.get("PROFILE", 0)))  # a profiling build keeps that many clocks an SM
        sms, samples = self.layout.sms, self.layout.samples
        self.profile = self.device.zeros(sms * marks * 8)
        self.outputs = outputs = Outputs(self.device, self.config, self._top_image.result())
        sampler = DeviceSampler(self.device, sms, self.context, samples)
        self._decoder = Decoder(self.device, sampler, outputs.ring, outputs.logits, self.config.vocab)

    def _prepare_prompts(self, weights: PromptStream) -> None:
        if weights.suits():
            model = ModelOnDevice(
                self.stream, self.embedding, self.vectors, self.rope, self.outputs.logits, self.chip.sms
            )
            self._prompts = Prefill(self.device, weights, model, options=self.options)

    # -- what a pass does in its own way --------------------------------------------------------------------------

    @abstractmethod
    def _image(self, source: str, nodes: int = 1) -> bytes:
        """A build of a kernel of the pass."""

    @abstractmethod
    def params_for(self, state: CudaState) -> Any:
        """Where everything is that the kernels use, this sequence's too."""

    @abstractmethod
    def launch(self, state: CudaState, tree: Tree | TreeOnDevice, want: Want, asked: Asked = ONE_PASS) -> None:
        """Queue a pass."""

    @abstractmethod
    def _launch_commit(self, state: CudaState, commit: Commit) -> None: ...

    @abstractmethod
    def lend_head(self) -> LentHead:
        """For drafts that have none."""

    @abstractmethod
    def lend_embedding(self) -> LentEmbedding: ...

    def lent_copies(self) -> int:
        """Bytes of what is lent that the model's own pass does not use."""
        return 0

    @abstractmethod
    def _stream_bounds(self) -> np.ndarray:
        """Where each SM's stream begins, and where the last one's ends."""

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
            "weight_types": " ".join(sorted(set(self.stored.values()))),
            **{name: str(value) for name, value in self.options.items()},
        }

    def _drafts_memory(self, context: int, sequences: int) -> list[MemoryPart]:
        """Of the draft that was last made."""
        if self._draft is None:
            return []
        return draft_parts(self._draft, context, sequences, self.lent_copies())

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
            return self._prompts.run(state, ids, want, self.outputs.top.tokens_of)
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
            self.launch(state, tree, want, Asked(row=row))
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

    def block_draft(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], capacity: Sequence[int]
    ) -> BlockDraft | None:
        if self.architecture != "sm_90a" or not draft_fits(config, self.config.vocab):
            return None
        made = CudaDraft(self, config, tensors, capacity)
        self._draft = made.layout
        return made

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        if self.architecture != "sm_90a":
            return super().embed(tokens)  # it would have to lend its LM head too
        if self._rows_of_table is None:
            self._rows_of_table = self.lendable[EMBEDDING].raw()  # which is looked through whole
        return dequantize(self.lendable[EMBEDDING].type, self._rows_of_table[list(tokens)])

    def head(self, hidden: np.ndarray, want: Want = ARGMAX) -> Output:
        return self._head_program().of(HostRows(hidden), want)

    def _head_program(self) -> HeadProgram:
        if self.architecture != "sm_90a":
            raise BadRequest("On this GPU the model does not lend its LM head.", "Use --draft ngram.")
        if self._head is None:
            self._head = HeadProgram(self, self.lend_head())
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

            self._mtp = MtpProgram(self, self.lendable, self._head_program(), make)
        return self._mtp.run(state, tokens, hidden, position, want)

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

    def bytes_a_token(self, length: int) -> int:
        layout = self.layout
        weights = layout.stream_bytes + layout.vector_bytes
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

    def _kernel(self, nodes: int) -> Kernel:
        size = next(n for n in self.variants if nodes <= n)
        if size not in self._kernels:
            module = self.device.load(self._images[size].result())
            self._kernels[size] = module.kernel("forward", self.shared_memory)
        return self._kernels[size]
