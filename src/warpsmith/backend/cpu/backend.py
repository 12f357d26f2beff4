"""The CPU backend: checks what is asked, gives the engine memory to answer into, and holds nothing else."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Literal

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
    keep_drafted,
    next_token,
    output_from_logits,
    take_drafted,
    wanted_for,
)
from warpsmith.backend.block_draft import BlockDraft
from warpsmith.backend.checks import check_batch, check_chains, check_room, check_snapshot, check_tokens
from warpsmith.backend.cores import team_of, usable_cores
from warpsmith.backend.cpu import _cpu, loading
from warpsmith.backend.cpu.outputs import native_want, output_for, own_part, token_rows_of
from warpsmith.backend.host_memory import check_fits
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import MAX_NODES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config
from warpsmith.model.weights import expected_shapes

CacheType = Literal["f16", "f32", "q8_0"]
CACHE_BYTES: dict[CacheType, float] = {"f16": 2.0, "f32": 4.0, "q8_0": 34 / 32}  # of one number
PORTABLE = "portable"  # kernels that need no feature
_ROOT = np.zeros(1, dtype=np.int32)  # the path of plain decoding


class CpuState(State):
    """The engine's memory of a sequence."""

    def __init__(self, native: _cpu.State) -> None:
        self.native = native
        self.context = native.context

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.native.length


class CpuBackend(Backend):
    """C++ kernels for the processor in hand. A prompt, a tree or a token is one call into the engine.

    `cpu_features` restricts the instruction sets (all this processor has, if None): for tests and comparisons;
    ["portable"] is plain C++. `cache_type_k` and `cache_type_v` are how keys and values are kept. `progress` hears of
    the bytes packed so far and of all there are.
    """

    name = "cpu"
    advances = True
    prefills_together = True
    prefill_multiple = 1  # a chain's bits do not depend on where it is cut

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, Tensor],
        *,
        threads: int | None = None,
        cpu_features: Sequence[str] | None = None,
        cache_type_k: CacheType = "f16",
        cache_type_v: CacheType = "f16",
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        _check_shape(config)
        for kind in (cache_type_k, cache_type_v):
            if kind not in CACHE_BYTES:
                raise BadRequest(
                    f"Keys and values cannot be kept as {kind!r}.", f"Use one of {', '.join(CACHE_BYTES)}."
                )
        self.config, self.cache_type_k, self.cache_type_v = config, cache_type_k, cache_type_v
        self.threads = team_of(usable_cores()) if threads is None else threads
        if not 1 <= self.threads <= 1024:
            raise BadRequest(f"{self.threads} threads cannot share the work.", "Ask for 1 to 1024.")
        allowed = _allowed_features(cpu_features)
        self._weight_bytes = loading.weight_bytes(config, tensors)
        self._weight_types = " ".join(sorted({tensors[name].type.name for name in expected_shapes(config)}))
        self._bytes_read = loading.weight_bytes(config, tensors, every_token=True)
        check_fits(self._weight_bytes, "The weights")
        self._engine = _cpu.Engine(config, self.threads, allowed)
        if cpu_features is not None and allowed and self.kernels == PORTABLE:
            raise BadRequest(
                f"There are no kernels for {', '.join(allowed)} alone.",
                f"Use {','.join(_cpu.features())} or {PORTABLE}.",
            )
        loading.load(self._engine, config, tensors, progress)

    @property
    def kernels(self) -> str:
        """Which kernels were chosen: portable, neon, neon-i8mm, avx2 or avx512."""
        return self._engine.kernels

    # -- the contract ---------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, int | str]:
        """Under the names that llama-bench has for them, where it has."""
        return {
            "device": self.name,
            "n_threads": self.threads,
            "cpu_kernels": self.kernels,
            "type_k": self.cache_type_k,
            "type_v": self.cache_type_v,
            "weight_types": self._weight_types,
        }

    def memory(self, context: int, sequences: int = 1, snapshots: int = 0) -> list[MemoryPart]:
        states = [MemoryPart(part.what, sequences * part.nbytes) for part in self._state_memory(context)]
        return [MemoryPart("weights", self._weight_bytes), *states, MemoryPart("snapshots", snapshots)]

    def snapshot_bytes(self, length: int) -> int:
        c = self.config
        state = c.value_heads * c.key_head_dim * c.value_head_dim + (c.conv_kernel - 1) * c.conv_channels
        return length * self._kv_bytes + len(c.recurrent_layers) * state * 4

    def new_state(self, context: int) -> CpuState:
        if not 1 <= context < 1 << 31:
            raise BadRequest(f"A context of {context} tokens is not possible.", "Ask for at least one.")
        parts = self._state_memory(context)
        check_fits(sum(part.nbytes for part in parts), f"A context of {context} tokens")
        return CpuState(_cpu.State(self._engine, context, self.cache_type_k, self.cache_type_v))

    def prefill(self, state: State, ids: Sequence[int], want: Want = ARGMAX) -> Output:
        assert isinstance(state, CpuState)
        tokens = np.ascontiguousarray(ids, dtype=np.int32)
        if not len(tokens):
            raise BadRequest("There is nothing to prefill.", "Pass at least one token.")
        check_tokens(self.config, tokens)
        check_room(state, len(tokens))
        self._check_want(want)
        state.drafted = None
        output = output_for(self.config, want, len(tokens), len(tokens) if want.every_row else 1)
        # pieces of what one call can take: a chain's bits do not depend on where it is cut
        for start in range(0, len(tokens), PREFILL_CHUNK):
            piece = tokens[start : start + PREFILL_CHUNK]
            end = start + len(piece)
            token_rows, rows = token_rows_of(want, start, end, len(tokens))
            native = native_want(want, output, token_rows, rows, slice(start, end))
            self._engine.chains([state.native], [len(piece)], piece, native)
        return output

    def forward(self, batch: Batch, want: Want = ARGMAX) -> Output:
        check_batch(self, batch)
        self._check_want(want)
        states, sizes = [], []
        for state, tree in batch:
            assert isinstance(state, CpuState)
            states.append(state.native)
            sizes.append(len(tree))
        tokens, parents = (np.concatenate([getattr(t, name) for _, t in batch]) for name in ("tokens", "parents"))
        output, every = output_for(self.config, want, len(tokens), len(tokens)), slice(0, len(tokens))
        native = native_want(want, output, range(len(tokens)), every, every)
        self._engine.trees(states, sizes, tokens, parents, native)
        return keep_drafted(batch, output)

    def advance(self, batch: Sequence[tuple[State, int]], want: Want = ARGMAX) -> Output:
        return self._chains([(state, [token]) for state, token in batch], want)

    def decode_together(
        self, batch: Sequence[tuple[State, int]], count: int, stop: frozenset[int] = frozenset()
    ) -> np.ndarray:
        check_chains(self, [(state, [token]) for state, token in batch])
        for state, _ in batch:
            check_room(state, count)
        tokens = np.empty((1 + count, len(batch)), np.int32)
        tokens[0] = [token for _, token in batch]
        states = [state.native for state, _ in batch]  # type: ignore[attr-defined]
        came = self._engine.decode(states, tokens, list(stop))
        return tokens[1 : 1 + came]

    def prefill_together(self, batch: Sequence[tuple[State, Sequence[int]]], want: Want = ARGMAX) -> list[Output]:
        output, ends = self._chains(batch, want), accumulate(len(ids) for _, ids in batch)
        return [
            own_part(output, slice(end - len(ids), end), slice(i, i + 1))
            for i, ((_, ids), end) in enumerate(zip(batch, ends, strict=True))
        ]

    def _chains(self, batch: Sequence[tuple[State, Sequence[int]]], want: Want) -> Output:
        """Run and commit a chain on each state: rows of everything but tokens, which are those of each chain's end."""
        check_chains(self, batch)
        self._check_want(want)
        lengths = [len(ids) for _, ids in batch]
        tokens = np.array([token for _, ids in batch for token in ids], dtype=np.int32)
        output, parts = output_for(self.config, want, len(tokens), len(batch)), slice(0, len(batch))
        last = [end - 1 for end in accumulate(lengths)]
        native = native_want(want, output, last, parts, slice(0, len(tokens)))
        self._engine.chains([state.native for state, _ in batch], lengths, tokens, native)  # type: ignore[attr-defined]
        return output

    def commit(self, state: State, path: Sequence[int]) -> None:
        assert isinstance(state, CpuState)
        nodes = take_drafted(state, path)
        self._engine.commit(state.native, _ROOT if nodes == [0] else np.array(nodes, dtype=np.int32))

    def snapshot(self, state: State) -> Snapshot:
        assert isinstance(state, CpuState)
        data = np.empty(state.native.snapshot_bytes(), dtype=np.uint8)
        self._engine.save(state.native, data)
        return Snapshot(state.length, data.nbytes, data)

    def restore(self, state: State, snapshot: Snapshot) -> None:
        assert isinstance(state, CpuState)
        check_snapshot(state, snapshot)
        state.native.load(snapshot.data, snapshot.length)
        state.drafted = None

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
        # A call a token: a caller may walk away after any of them, and then nothing more may have been committed.
        # It costs some twenty microseconds of a token's milliseconds.
        assert isinstance(state, CpuState)
        want, text = wanted_for(sampling), list(history)
        if listener is not None:
            want = replace(want, features=listener.features)
        for _ in range(count):
            output = self.advance([(state, token)], want)
            if listener is not None:
                listener.heard(state.length - 1, output)
            token = next_token(output, 0, sampling, text, state.length)
            text.append(token)
            yield token
            if token in stop:
                return

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        ids = np.asarray(tokens, dtype=np.int32)
        check_tokens(self.config, ids)
        rows = np.empty((len(ids), self.config.hidden), np.float32)
        for token, row in zip(ids.tolist(), rows, strict=True):
            self._engine.unpack_row(token, row)
        return rows

    def head(self, hidden: np.ndarray, want: Want = ARGMAX) -> Output:
        rows = np.ascontiguousarray(hidden, dtype=np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.config.hidden or not 1 <= len(rows) <= MAX_NODES:
            raise BadRequest(f"The LM head takes 1 to {MAX_NODES} rows of {self.config.hidden}.")
        logits = np.empty((len(rows), -(-self.config.vocab // 16) * 16), np.float32)  # kernels fill whole panels
        self._engine.multiply(self.config.head_tensor, rows, logits)
        return output_from_logits(logits[:, : self.config.vocab], want)

    def block_draft(
        self, config: DFlashConfig, tensors: Mapping[str, Tensor], capacity: Sequence[int]
    ) -> BlockDraft | None:
        from warpsmith.backend.cpu.draft import CpuDraft

        return CpuDraft(self._engine, self.config, config, tensors, capacity) if CpuDraft.runs(config) else None

    def mtp(
        self, state: State, tokens: Sequence[int], hidden: np.ndarray, position: int, want: Want = ARGMAX
    ) -> Output:
        if not self.config.mtp_layers:
            return super().mtp(state, tokens, hidden, position, want)
        assert isinstance(state, CpuState)
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        past = np.ascontiguousarray(hidden, dtype=np.float32)
        check_tokens(self.config, ids)
        self._check_want(want)
        if not len(ids) or past.shape != (len(ids), self.config.hidden):
            raise BadRequest(f"{len(ids)} tokens need as many hidden rows; these are {list(past.shape)}.")
        if position < 0 or position + len(ids) > state.context:
            raise BadRequest(f"Positions {position} to {position + len(ids)} are outside a context of {state.context}.")
        output = output_for(self.config, want, len(ids), len(ids) if want.every_row else 1)
        for start in range(0, len(ids), MAX_NODES):
            rows = slice(start, min(start + MAX_NODES, len(ids)))
            token_rows, told = token_rows_of(want, start, rows.stop, len(ids))
            native = native_want(want, output, token_rows, told, rows)
            self._engine.mtp(state.native, ids[rows], past[rows], position + start, native)
        return output

    def bytes_a_token(self, length: int) -> int:
        c = self.config
        pair_bytes = CACHE_BYTES[self.cache_type_k] + CACHE_BYTES[self.cache_type_v]
        cache = int(length * len(c.attention_layers) * c.kv_heads * c.head_dim * pair_bytes)
        states = len(c.recurrent_layers) * c.value_heads * c.key_head_dim * c.value_head_dim * 4
        return self._bytes_read + cache + 2 * states

    def read_bandwidth(self) -> float:
        """The threads read half a gigabyte, each its own part of it; the median of five times."""
        times = []
        with ThreadPoolExecutor(self.threads) as pool:
            arrays = list(pool.map(lambda _: np.ones((1 << 26) // self.threads, np.uint64), range(self.threads)))
            for _ in range(6):
                before = perf_counter()
                list(pool.map(np.bitwise_or.reduce, arrays))
                times.append(perf_counter() - before)
        return sum(a.nbytes for a in arrays) / median(times[1:])

    # -- what goes in and comes out -------------------------------------------------------------------------------

    @property
    def _kv_bytes(self) -> int:
        """Of one token's keys and values, those of the MTP block among them."""
        c = self.config
        pair_bytes = CACHE_BYTES[self.cache_type_k] + CACHE_BYTES[self.cache_type_v]
        return int((len(c.attention_layers) + bool(c.mtp_layers)) * c.kv_heads * c.head_dim * pair_bytes)

    def _state_memory(self, context: int) -> list[MemoryPart]:
        c = self.config
        recurrent = len(c.recurrent_layers)
        update = 16 + c.key_head_dim + c.value_head_dim  # what a token adds to a head's state
        head = c.key_head_dim * c.value_head_dim + 2 * update
        states = c.value_heads * head + (c.conv_kernel - 1) * c.conv_channels
        rows = recurrent * MAX_NODES * (c.conv_channels + 2 * c.value_heads) * 4 + MAX_NODES * self._kv_bytes
        return [
            MemoryPart("keys and values", context * self._kv_bytes),
            MemoryPart("DeltaNet states", recurrent * states * 4),
            MemoryPart("rows of a tree", rows),
        ]

    def _check_want(self, want: Want) -> None:
        if want.tokens == "top" and not 1 <= want.top <= self.config.vocab:
            raise BadRequest(f"The {want.top} best of {self.config.vocab} tokens cannot be given.")
        if any(not 0 <= layer < self.config.layers for layer in want.features):
            raise BadRequest(f"Features of layers {list(want.features)} were asked; there are {self.config.layers}.")


def _allowed_features(asked: Sequence[str] | None) -> list[str]:
    """The instruction sets that may be used: those asked for, all of which the processor must have."""
    here = _cpu.features()
    if asked is None:
        return here
    allowed = [name for name in asked if name != PORTABLE]
    if missing := set(allowed) - set(here):
        raise BadRequest(
            f"This processor has no {', '.join(sorted(missing))}.", f"It has {', '.join([*here, PORTABLE])}."
        )
    return allowed


def _check_shape(config: Config) -> None:
    """Kernels work on whole vectors; every dense Qwen3.5 has widths that allow it."""
    widths = {
        "hidden": (config.hidden, 16),
        "ffn": (config.ffn, 16),
        "head_dim": (config.head_dim, 32),
        "rotary_dim": (config.rotary_dim, 2),
        "key_head_dim": (config.key_head_dim, 16),
        "value_head_dim": (config.value_head_dim, 16),
    }
    for name, (width, multiple) in widths.items():
        if width % multiple:
            raise BadRequest(
                f"The cpu backend needs {name} to be a multiple of {multiple}; it is {width}.",
                "Use --device reference.",
            )
    if config.conv_kernel > 16:
        raise BadRequest(f"The cpu backend convolves up to 16 tokens, not {config.conv_kernel}.")
