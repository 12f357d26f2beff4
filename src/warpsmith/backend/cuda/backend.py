"""The CUDA backend: one persistent kernel for plain decoding and for trees."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from warpsmith.backend.base import (
    ARGMAX,
    LOGITS,
    Backend,
    MemoryPart,
    Output,
    Snapshot,
    State,
    Want,
    check_room,
    check_tokens,
    output_from_logits,
)
from warpsmith.backend.cuda.build.compiler import build, target
from warpsmith.backend.cuda.build.profiles import Profile
from warpsmith.backend.cuda.build.profiles import choose as choose_profile
from warpsmith.backend.cuda.debug.trace import read_stage, stage_number
from warpsmith.backend.cuda.memory.driver import Buffer, Chip, Device, Event, Kernel, Pinned
from warpsmith.backend.cuda.memory.exchange import NOT_YET
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.memory.plan import check_fit, memory_parts
from warpsmith.backend.cuda.sampler import UNDECIDED, DeviceSampler
from warpsmith.backend.cuda.schedule import busy_sms
from warpsmith.backend.cuda.shape import (
    COLUMNS,
    HEAD_DIM,
    LARGEST_HIDDEN,
    MAX_FEATURES,
    MAX_STEPS,
    MAX_STOPS,
    READ_AHEAD,
    STATE_DIM,
    threads_of,
)
from warpsmith.backend.cuda.structures import Draw, Params, Path, Request, Stream
from warpsmith.backend.cuda.top import MAX_TOP, Top
from warpsmith.backend.cuda.weights.loading import Progress, load_weights
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.errors import BadRequest, NoDevice
from warpsmith.model.config import Config

BURST = MAX_STEPS  # tokens a decoding launch makes before it comes back
EVERY_STAGE = 1 << 30
NOT_READY = 600  # what the driver answers while a kernel runs
VARIANTS = (1, 8, 16, 24, 32, 64)  # nodes a build of the kernel takes


class CudaState(State):
    """One sequence on the device."""

    def __init__(self, backend: CudaBackend, context: int) -> None:
        device, layout = backend.device, backend.layout
        self.length, self.context = 0, context
        self.delta = device.zeros(layout.delta_bytes)
        self.history = device.zeros(layout.history_bytes)
        self.keys = device.allocate(layout.cache_bytes(context))
        self.values = device.allocate(layout.cache_bytes(context))
        self.params = backend.params_for(self)  # the same for every launch


class CudaBackend(Backend):
    """Weights packed on one GPU, and the kernels built for it."""

    name = "cuda"

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, Tensor],
        *,
        context: int | None = None,
        progress: Progress | None = None,
        profile: Profile | None = None,
        architecture: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.config, self.device = config, Device()
        check_shape(config)
        self.chip = self.device.chip
        self.chip_profile = profile or choose_profile(self.chip.name, self.chip.capability)[0]
        self.largest_tree = self.chip_profile.largest_tree
        self.architecture = architecture or target(self.chip.capability)
        stored = {name: tensor.type.name for name, tensor in tensors.items()}
        self.layout = layout = Layout(config, min(self.chip.sms, busy_sms(config)), stored)
        self.options = dict(options or {})
        self.context = context or config.context
        check_fit(layout, self.context, self.device.free_memory(), self.chip.name)
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
        self.pending = {n: self.device.allocate(b) for n, b in layout.pending_bytes().items()}
        self.logits = self.device.allocate(MAX_NODES * config.vocab * 4)
        self.features = self.device.allocate(MAX_FEATURES * MAX_NODES * config.hidden * 4)
        self.hidden = self.device.allocate(MAX_NODES * config.hidden * 4)
        self.kept_delta = self.device.allocate(layout.delta_bytes)
        self.kept_history = self.device.allocate(layout.history_bytes)
        self.ring = Pinned(self.device, np.int32, 1 + max(BURST, MAX_NODES))
        marks = int(str(self.options.get("PROFILE", 0)))  # a profiling build keeps that many clocks an SM
        self.profile = self.device.zeros(layout.sms * marks * 8)
        self._top = Top(self.device, top_image.result(), self.logits)
        self._sampler = DeviceSampler(self.device, layout, self.context)
        self.undecided = 0  # sampled tokens that the device left to the host
        self._last: tuple[CudaState, Tree] | None = None

    # -- the contract ---------------------------------------------------------------------------------------------

    def memory(self, context: int) -> list[MemoryPart]:
        return memory_parts(self.layout, context)

    def new_state(self, context: int) -> CudaState:
        if context > self.context:
            raise BadRequest(f"This backend was loaded for a context of {self.context}.", f"Load it with -c {context}.")
        return CudaState(self, context)

    def prefill(self, state: State, ids: Sequence[int], want: Want = ARGMAX) -> Output:
        if not len(ids):
            raise BadRequest("There is nothing to prefill.", "Pass at least one token.")
        check_room(state, len(ids))
        parts = []
        for start in range(0, len(ids), self.largest_tree):
            chunk = ids[start : start + self.largest_tree]
            last = start + len(chunk) == len(ids)
            tokens = want.tokens if want.every_row or last else "none"
            part = self.forward(state, Tree.chain(chunk), Want(tokens, want.top, want.features, want.hidden))
            self.commit(state, range(len(chunk)))
            parts.append(part)
        return _join(parts, want)

    def forward(self, state: State, tree: Tree, want: Want = ARGMAX) -> Output:
        assert isinstance(state, CudaState)
        check_tokens(self.config, tree.tokens)
        check_room(state, int(tree.depths().max()) + 1)
        if len(tree) > self.largest_tree:
            raise BadRequest(f"{len(tree)} nodes are more than the {self.largest_tree} that {self.chip.name} takes.")
        self._launch(state, tree, want)
        self._last = (state, tree)
        n, hidden = len(tree), self.config.hidden
        output = Output()
        if want.tokens == "top" and 1 <= (count := min(want.top, self.config.vocab)) <= MAX_TOP:
            output = self._top.of(n, count)
        elif want.tokens in ("top", "logits"):
            output = output_from_logits(self.logits.read(np.float32, (n, self.config.vocab)), want)
        elif want.tokens == "argmax":
            self.device.synchronize()
            output.argmax = self.ring.array[1 : 1 + n].copy()
        if want.features:
            rows = self.features.read(np.float32, (len(want.features), n, hidden))
            output.features = np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(n, -1)
        if want.hidden:
            output.hidden = self.hidden.read(np.float32, (n, hidden))
        return output

    def commit(self, state: State, path: Sequence[int]) -> None:
        assert isinstance(state, CudaState)
        nodes = list(path)
        if self._last is None or self._last[0] is not state:
            raise BadRequest("There is no forward pass to commit.", "Call forward first; each is committed once.")
        if not nodes or nodes != self._last[1].path(nodes[-1]):
            raise BadRequest(f"{nodes} is not a path of the tree from its root.")
        argument = Path(len(nodes), state.length, (ctypes.c_int * MAX_NODES)(*nodes))
        blocks = self.layout.delta_layers * self.layout.blocks
        blocks += self.layout.attention_layers * self.config.kv_heads
        self._commit.launch(blocks, COLUMNS * 32, state.params, argument)
        self._last = None
        state.length += len(nodes)

    def decode(
        self,
        state: State,
        token: int,
        count: int,
        stop: frozenset[int] = frozenset(),
        sampling: Sampling | None = None,
        history: Sequence[int] = (),
    ) -> Generator[int]:
        assert isinstance(state, CudaState)
        check_tokens(self.config, np.array([token]))
        sampling, text = None if sampling is None or sampling.greedy else sampling, list(history)
        if len(stop) > MAX_STOPS or (sampling is not None and not self._sampler.takes(sampling, text)):
            yield from super().decode(state, token, count, stop, sampling, text)
            return
        self._last = None
        while count > 0:
            burst = min(count, BURST)
            check_room(state, burst)
            for running, kept in self._recurrent(state):
                kept.copy_from(running)
            tokens: list[int] = []
            try:
                for following in self._burst(state, token, burst, stop, sampling, text):
                    tokens.append(following)
                    yield following
            finally:
                self.device.synchronize()
                if len(tokens) < self.ring.array[0]:  # it ran ahead of who listens: go back, and run only that far
                    for running, kept in self._recurrent(state):
                        running.copy_from(kept)
                    if tokens:
                        self._start(state, token, len(tokens), frozenset(), sampling, text)
                        self.device.synchronize()
                state.length += len(tokens)
            if tokens[-1] in stop:
                return
            token = tokens[-1]
            text += tokens
            count -= len(tokens)

    def _recurrent(self, state: CudaState) -> list[tuple[Buffer, Buffer]]:
        """What decoding overwrites, and where its last known good copy is kept. Keys and values only grow."""
        return [(state.delta, self.kept_delta), (state.history, self.kept_history)]

    def _burst(
        self,
        state: CudaState,
        token: int,
        steps: int,
        stop: frozenset[int],
        sampling: Sampling | None,
        text: list[int],
    ) -> Iterator[int]:
        """One launch; ids are handed on as the device writes them. It ends early where one is left to the host."""
        cu, ring = self.device.cu, self.ring.array
        ring[0] = 0
        self._start(state, token, steps, stop, sampling, text)
        seen, running = 0, True
        while running:
            running = int(cu.cuStreamQuery(0)[0]) == NOT_READY
            if not running:
                self.device.synchronize()
            while seen < ring[0]:
                seen += 1
                following = int(ring[seen])
                if following == UNDECIDED:
                    assert sampling is not None
                    self.undecided += 1
                    logits = self.logits.read(np.float32, (self.config.vocab,))
                    past = [*text, *ring[1:seen].tolist()]
                    following = choose(logits, sampling, past, state.length + seen)
                yield following

    def _start(
        self,
        state: CudaState,
        token: int,
        steps: int,
        stop: frozenset[int],
        sampling: Sampling | None,
        text: list[int],
    ) -> None:
        """Queue a launch that decodes."""
        draw, want = None, ARGMAX
        if sampling is not None:
            draw = self._sampler.request(sampling, text, steps)
            want = LOGITS if sampling.temperature > 0 else ARGMAX  # kept for tokens that it leaves to us
        self._launch(state, Tree.chain([token]), want, steps=steps, stop=sorted(stop), draw=draw)

    def snapshot(self, state: State) -> Snapshot:
        assert isinstance(state, CudaState)
        copies = []
        for source in (state.delta, state.history):
            copies.append(self.device.allocate(source.nbytes))
            copies[-1].copy_from(source)
        used = self.layout.cache_bytes(state.length)
        for source in (state.keys, state.values):
            copies.append(self.device.allocate(used))
            if used:
                copies[-1].copy_starts(source, self.layout.caches, used // self.layout.caches)
        return Snapshot(state.length, sum(c.nbytes for c in copies), copies)

    def restore(self, state: State, snapshot: Snapshot) -> None:
        assert isinstance(state, CudaState)
        if snapshot.length > state.context:
            raise BadRequest(
                f"A snapshot of {snapshot.length} tokens does not fit in a context of {state.context}.",
                "Restore it into a state at least as long.",
            )
        delta, history, keys, values = snapshot.data
        state.delta.copy_from(delta)
        state.history.copy_from(history)
        if used := self.layout.cache_bytes(snapshot.length):
            state.keys.copy_starts(keys, self.layout.caches, used // self.layout.caches)
            state.values.copy_starts(values, self.layout.caches, used // self.layout.caches)
        state.length, self._last = snapshot.length, None

    def trace(self, state: State, tree: Tree, stop_after: str) -> dict[str, np.ndarray]:
        """The exchanged buffers after a stage of the plan (`delta_mix.3`), to compare with the reference's."""
        assert isinstance(state, CudaState)
        self._launch(state, tree, ARGMAX, stop_after=stage_number(self.layout.schedule, stop_after))
        self.device.synchronize()
        self._reset_parts()  # a pass that stops inside a layer may leave some behind
        return read_stage(self, stop_after, len(tree))

    def bytes_a_token(self, length: int) -> int:
        layout = self.layout
        weights = layout.stream.bytes + layout.vector_bytes
        return weights + 2 * layout.cache_bytes(length) + 2 * layout.delta_bytes

    def read_bandwidth(self) -> float:
        """Every SM reads its stream and does nothing with it; the median of nine times."""
        image = build("weights/stream.cu", self.architecture, {})
        kernel = self.device.load(image).kernel("read_stream", READ_AHEAD)
        ends = self.device.upload(np.append(self.layout.stream.start, self.layout.stream.bytes).astype(np.uint64))
        request = Stream(bytes=self.stream.pointer, start=ends.pointer)
        begin, end = Event(self.device), Event(self.device)
        times = []
        for _ in range(10):
            begin.record()
            kernel.launch(self.layout.sms, 32, request)
            end.record()
            end.wait()
            times.append(end.seconds_since(begin))
        return self.layout.stream.bytes / median(times[1:])

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
        return build(source, self.architecture, constants)

    def params_for(self, state: CudaState) -> Params:
        """Where everything is that the kernels use, this sequence's too."""

        def at(buffer: Buffer) -> int:
            return buffer.pointer

        pointers = {
            "stream": at(self.stream), "stream_start": at(self.stream_start), "head_start": at(self.head_start),
            "embedding": at(self.embedding), "vectors": at(self.vectors), "rope": at(self.rope),
            "delta": at(state.delta), "history": at(state.history),
            "keys": at(state.keys), "values": at(state.values), "out_count": self.ring.pointer,
            "out_tokens": self.ring.pointer + 4, "out_logits": at(self.logits), "out_features": at(self.features),
            "out_hidden": at(self.hidden), "profile": at(self.profile),
            "exchange": at(self.exchange), "parts": at(self.parts),
        }  # fmt: skip
        pointers |= {name: at(buffer) for name, buffer in self.pending.items()}
        return Params(context=state.context, **pointers)

    def _launch(
        self,
        state: CudaState,
        tree: Tree,
        want: Want,
        steps: int = 0,
        stop: Sequence[int] = (),
        stop_after: int = EVERY_STAGE,
        draw: Draw | None = None,
    ) -> None:
        request = Request(
            nodes=len(tree),
            length=state.length,
            steps=steps,
            stop_after=stop_after,
            stops=len(stop),
            features=len(want.features),
            want_logits=want.tokens in ("top", "logits"),
            want_hidden=want.hidden,
        )
        request.tokens[: len(tree)] = tree.tokens.tolist()
        request.parents[: len(tree)] = tree.parents.tolist()
        request.stop_ids[: len(stop)] = list(stop)
        request.feature_layers[: len(want.features)] = list(want.features)
        self.exchange.fill_starts(NOT_YET, 2, -(-len(tree) // 8) * self.layout.exchange.tile_words)
        arguments = (state.params, request, draw or Draw())  # kernels for trees know of no draw
        self._kernel(len(tree)).launch(self.layout.sms, threads_of(self.architecture), *arguments, cooperative=True)


def build_constants(layout: Layout, chip: Chip, profile: Profile, nodes: int) -> dict[str, object]:
    """What a build for trees of up to `nodes` nodes is told."""
    return layout.headers() | {
        "NODES": nodes,
        "SHARED_MEMORY": chip.shared_memory,
        "IN_FLIGHT": max(1, round(profile.in_flight / layout.stream.slot_bytes)),
    }


def check_shape(config: Config) -> None:
    """The kernels are written for the family's own head shapes."""
    c = config
    fits = c.head_dim == HEAD_DIM and c.rotary_dim == 64 and c.key_head_dim == c.value_head_dim == STATE_DIM
    fits = fits and c.conv_kernel == 4 and c.hidden % 8 == 0 and c.ffn % 4 == 0 and c.layers <= 128
    fits = fits and c.hidden <= LARGEST_HIDDEN and 128 % c.kv_heads == 0 and 128 // c.kv_heads >= 32
    if not fits:
        raise NoDevice("The CUDA kernels do not take this model's shape.", "Use --device cpu.")


def _join(parts: list[Output], want: Want) -> Output:
    def rows(name: str) -> np.ndarray | None:
        arrays = [a for p in parts if (a := getattr(p, name)) is not None]
        if not arrays:
            return None
        joined = np.concatenate(arrays)
        return joined if want.every_row or name in ("features", "hidden") else joined[-1:]

    return Output(**{name: rows(name) for name in Output.__dataclass_fields__})
