"""The CUDA backend: one persistent kernel for plain decoding and for trees."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from warpsmith.backend.base import (
    ARGMAX,
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
from warpsmith.backend.cuda.compiler import build, target
from warpsmith.backend.cuda.driver import Buffer, Chip, Device, Event, Kernel, Pinned
from warpsmith.backend.cuda.layout import (
    COLUMNS,
    HEAD_DIM,
    MAX_FEATURES,
    MAX_STOPS,
    PACKET_BYTES,
    READ_AHEAD,
    SLOT_BYTES,
    STATE_DIM,
    THREADS,
    WARPS,
    Layout,
    Params,
    Path,
    Request,
    Stream,
)
from warpsmith.backend.cuda.memory import check_fit, memory_parts
from warpsmith.backend.cuda.packing import Progress, pack_stream
from warpsmith.backend.cuda.profiles import Profile, choose
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.errors import BadRequest, DoesNotFit, NoDevice
from warpsmith.model.config import Config

LAST_TAG = 0xFFFF
BURST = 64  # tokens a decoding launch makes before it comes back
EVERY_STAGE = 1 << 30
NOT_READY = 600  # what the driver answers while a kernel runs
VARIANTS = (1, 8, 16, 32, 64)  # nodes a build of the kernel takes


class CudaState(State):
    """One sequence on the device."""

    def __init__(self, backend: CudaBackend, context: int) -> None:
        device, layout = backend.device, backend.layout
        self.length, self.context = 0, context
        self.delta = device.zeros(layout.delta_bytes)
        self.history = device.zeros(layout.history_bytes)
        self.keys = device.allocate(layout.cache_bytes(context))
        self.values = device.allocate(layout.cache_bytes(context))


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
        architecture: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.config, self.device = config, Device()
        check_shape(config)
        self.chip = self.device.chip
        self.chip_profile = choose(self.chip.name, self.chip.capability)[0]
        self.largest_tree = self.chip_profile.largest_tree
        self.architecture = architecture or target(self.chip.capability)
        self.layout = layout = Layout(config, self.chip.sms)
        self.options = dict(options or {})
        self.context = context or config.context
        check_fit(layout, self.context, self.device.free_memory(), self.chip.name)
        self._kernels: dict[int, Kernel] = {}
        compilers = ThreadPoolExecutor(len(VARIANTS))  # side by side, and while the weights are copied
        sizes = [n for n in VARIANTS if n <= self.largest_tree]
        self._images = {n: compilers.submit(self._image, "forward.cu", n) for n in sizes}
        compilers.shutdown(wait=False)
        pack = self.device.load(self._image("pack.cu")).kernel("pack")
        self._commit = self.device.load(self._image("commit.cu")).kernel("commit")

        self.stream = pack_stream(self.device, pack, layout, tensors, progress)
        self.vectors = self.device.upload(
            np.concatenate([tensors[n].float32().reshape(-1) for n in layout.vector_names()])
        )
        self.rope = self.device.upload(layout.rope_table(self.context))
        self.stream_start = self.device.upload(layout.stream_start.astype(np.uint64))
        self.head_start = self.device.upload(layout.stage_start[-1].astype(np.uint64))
        self.packets = {n: self.device.zeros(c * MAX_NODES * PACKET_BYTES) for n, c in layout.packet_counts.items()}
        self.pending = {n: self.device.allocate(b) for n, b in layout.pending_bytes().items()}
        self.logits = self.device.allocate(MAX_NODES * config.vocab * 4)
        self.features = self.device.allocate(MAX_FEATURES * MAX_NODES * config.hidden * 4)
        self.hidden = self.device.allocate(MAX_NODES * config.hidden * 4)
        self.kept_delta = self.device.allocate(layout.delta_bytes)
        self.kept_history = self.device.allocate(layout.history_bytes)
        self.ring = Pinned(self.device, np.int32, 1 + max(BURST, MAX_NODES))
        marks = int(str(self.options.get("PROFILE", 0)))  # a profiling build keeps that many clocks an SM
        self.profile = self.device.zeros(self.chip.sms * marks * 8)
        self.tag = 1
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
        if want.tokens in ("top", "logits"):
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
        self._commit.launch(blocks, COLUMNS * 32, self._params(state), argument)
        self._last = None
        state.length += len(nodes)

    def decode(self, state: State, token: int, count: int, stop: frozenset[int] = frozenset()) -> Generator[int]:
        assert isinstance(state, CudaState)
        check_tokens(self.config, np.array([token]))
        if len(stop) > MAX_STOPS:
            yield from super().decode(state, token, count, stop)
            return
        self._last = None
        while count > 0:
            burst = min(count, BURST)
            check_room(state, burst)
            for running, kept in self._recurrent(state):
                kept.copy_from(running)
            tokens: list[int] = []
            try:
                for following in self._burst(state, token, burst, stop):
                    tokens.append(following)
                    yield following
            finally:
                self.device.synchronize()
                if len(tokens) < self.ring.array[0]:  # it ran ahead of who listens: go back, and run only that far
                    for running, kept in self._recurrent(state):
                        running.copy_from(kept)
                    if tokens:
                        self._launch(state, Tree.chain([token]), ARGMAX, steps=len(tokens))
                        self.device.synchronize()
                state.length += len(tokens)
            if tokens[-1] in stop:
                return
            token = tokens[-1]
            count -= burst

    def _recurrent(self, state: CudaState) -> list[tuple[Buffer, Buffer]]:
        """What decoding overwrites, and where its last known good copy is kept. Keys and values only grow."""
        return [(state.delta, self.kept_delta), (state.history, self.kept_history)]

    def _burst(self, state: CudaState, token: int, steps: int, stop: frozenset[int]) -> Iterator[int]:
        """One launch; ids are handed on as the device writes them."""
        cu, ring = self.device.cu, self.ring.array
        ring[0] = 0
        self._launch(state, Tree.chain([token]), ARGMAX, steps=steps, stop=sorted(stop))
        seen = 0
        while True:
            running = int(cu.cuStreamQuery(0)[0]) == NOT_READY
            while seen < ring[0]:
                seen += 1
                yield int(ring[seen])
            if not running:
                break
        self.device.synchronize()
        for i in range(seen, int(ring[0])):
            yield int(ring[i + 1])

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
        op, _, layer = stop_after.partition(".")
        order = ["in", "mix", "mix_out", "mlp_in", "mlp_out"]
        kind = {"delta_in": "in", "attention_in": "in", "delta_mix": "mix", "attention_mix": "mix"}.get(op, op)
        number = 0 if op == "embed" else 1 + 5 * int(layer) + order.index(kind)
        self._launch(state, tree, ARGMAX, stop_after=number)
        self.device.synchronize()
        c, n = self.config, len(tree)
        if kind == "in":
            rows = self._packet_values("in", n)
            if op == "delta_in":
                sizes = {"qkv": c.conv_channels, "z": c.value_dim, "beta": c.value_heads, "alpha": c.value_heads}
            else:
                kv = c.kv_heads * c.head_dim
                sizes = {"q": 2 * c.heads * c.head_dim, "k": kv, "v": kv}
            ends = np.cumsum(list(sizes.values()))
            return {name: rows[:, e - s : e] for (name, s), e in zip(sizes.items(), ends, strict=True)}
        if op == "delta_mix":
            y = self._packet_values("y", n)[:, : c.value_dim].reshape(n, c.value_heads, STATE_DIM)
            squares = self._packet_values("squares", n)[:, ::4].reshape(n, c.value_heads, -1).sum(axis=2)
            return {"y": (y / np.sqrt(squares / STATE_DIM + c.eps)[:, :, None]).reshape(n, -1)}
        if op == "attention_mix":
            return {"y": self._packet_values("y", n)[:, : c.heads * HEAD_DIM]}
        name = {"embed": "x", "mix_out": "x_mid", "mlp_in": "h", "mlp_out": "x"}[kind]
        return {"h" if kind == "mlp_in" else "x": self._packet_values(name, n)}

    def bytes_a_token(self, length: int) -> int:
        layout = self.layout
        weights = layout.stream_bytes + layout.vector_bytes
        return weights + 2 * layout.cache_bytes(length) + 2 * layout.delta_bytes

    def read_bandwidth(self) -> float:
        """Every SM reads its stream and does nothing with it; the median of nine times."""
        image = build("stream.cu", self.architecture, {})
        kernel = self.device.load(image).kernel("read_stream", READ_AHEAD)
        ends = self.device.upload(np.append(self.layout.stream_start, self.layout.stream_bytes).astype(np.uint64))
        request = Stream(bytes=self.stream.pointer, start=ends.pointer)
        begin, end = Event(self.device), Event(self.device)
        times = []
        for _ in range(10):
            begin.record()
            kernel.launch(self.chip.sms, 32, request)
            end.record()
            end.wait()
            times.append(end.seconds_since(begin))
        return self.layout.stream_bytes / median(times[1:])

    def _packet_values(self, name: str, nodes: int) -> np.ndarray:
        count = self.layout.packet_counts[name]
        words = self.packets[name].read(np.uint32, (nodes, count * 4))
        return (words & np.uint32(0xFFFFFFF0)).view(np.float32)

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

    def _params(self, state: CudaState) -> Params:
        def at(buffer: Buffer) -> int:
            return buffer.pointer

        pointers = {
            "stream": at(self.stream), "stream_start": at(self.stream_start), "head_start": at(self.head_start),
            "vectors": at(self.vectors), "rope": at(self.rope), "delta": at(state.delta), "history": at(state.history),
            "keys": at(state.keys), "values": at(state.values), "out_count": self.ring.pointer,
            "out_tokens": self.ring.pointer + 4, "out_logits": at(self.logits), "out_features": at(self.features),
            "out_hidden": at(self.hidden), "profile": at(self.profile),
        }  # fmt: skip
        pointers |= {name: at(buffer) for name, buffer in (self.packets | self.pending).items()}
        return Params(context=state.context, **pointers)

    def _launch(
        self,
        state: CudaState,
        tree: Tree,
        want: Want,
        steps: int = 0,
        stop: Sequence[int] = (),
        stop_after: int = EVERY_STAGE,
    ) -> None:
        needed = self.layout.exchanges * max(1, steps)
        if self.tag + needed > LAST_TAG:  # tags start over: no packet may still carry one
            for buffer in self.packets.values():
                buffer.clear()
            self.tag = 1
        request = Request(
            nodes=len(tree),
            length=state.length,
            steps=steps,
            stop_after=stop_after,
            first_tag=self.tag,
            stops=len(stop),
            features=len(want.features),
            want_logits=want.tokens in ("top", "logits"),
            want_hidden=want.hidden,
        )
        request.tokens[: len(tree)] = tree.tokens.tolist()
        request.parents[: len(tree)] = tree.parents.tolist()
        request.stop_ids[: len(stop)] = list(stop)
        request.feature_layers[: len(want.features)] = list(want.features)
        self.tag += needed
        self._kernel(len(tree)).launch(self.chip.sms, THREADS, self._params(state), request, cooperative=True)


def build_constants(layout: Layout, chip: Chip, profile: Profile, nodes: int) -> dict[str, object]:
    """What a build for trees of up to `nodes` nodes is told; the ring is as deep as shared memory allows."""
    config = layout.config
    group = config.heads // config.kv_heads
    scratch = max(group * (4 * HEAD_DIM + 8 * 16) * 4, nodes * (2 * STATE_DIM + 3 * COLUMNS + 4) * 4, nodes * 2048)
    scratch = max(scratch, 32 << 10)
    scratch = -(-scratch // 1024) * 1024
    own = -(-(config.hidden // 8) // chip.sms)
    staged = WARPS * 64 * -(-max(config.ffn, config.value_dim, config.heads * HEAD_DIM) // 256)
    other = nodes * (own * 32 + 2 * WARPS * 4 + nodes + 44) + 1024 + (staged if nodes == 1 else 0)
    slots = (chip.shared_memory - scratch - other) // SLOT_BYTES
    if slots < 2:
        raise DoesNotFit(f"{nodes} nodes need more shared memory than {chip.name} has.", "Use a smaller tree.")
    return layout.constants() | {
        "NODES": nodes,
        "SCRATCH_BYTES": scratch,
        "RING_SLOTS": min(slots, 16),
        "IN_FLIGHT": max(1, profile.in_flight // SLOT_BYTES),
    }


def check_shape(config: Config) -> None:
    """The kernels are written for the family's own head shapes."""
    c = config
    fits = c.head_dim == HEAD_DIM and c.rotary_dim == 64 and c.key_head_dim == c.value_head_dim == STATE_DIM
    fits = fits and c.conv_kernel == 4 and c.hidden % 8 == 0 and c.ffn % 4 == 0 and c.layers <= 64 and c.tied
    fits = fits and 128 % c.kv_heads == 0 and 128 // c.kv_heads >= 32
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
