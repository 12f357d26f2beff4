"""Decoding on the device: a launch makes many tokens, and the host hands on the ids as they come."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from warpsmith.backend.base import ARGMAX, LOGITS, Listener
from warpsmith.backend.checks import check_room
from warpsmith.backend.cuda.memory.driver import Buffer, Device, Pinned
from warpsmith.backend.cuda.requests import Asked
from warpsmith.backend.cuda.sampler import UNDECIDED, DeviceSampler
from warpsmith.backend.cuda.shape import MAX_STEPS, MAX_STOPS
from warpsmith.backend.finite import not_finite
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import Tree

if TYPE_CHECKING:
    from warpsmith.backend.cuda.backend import CudaBackend
    from warpsmith.backend.cuda.state import CudaState

BURST = MAX_STEPS  # tokens a launch makes before it comes back
NOT_READY = 600  # what the driver answers while a kernel runs


class _Burst:
    """A launch that decodes. `ring` holds how many ids there are so far, then the ids: the backend's own ring, until
    another launch needs that and leaves a copy."""

    def __init__(self, ring: np.ndarray) -> None:
        self.ring = ring
        self.logits: np.ndarray | None = None  # at the last token, if the ring was taken and the device did not decide


class Decoder:
    """Decodes a backend's sequences. Several may be decoding at a time: their launches come one after another.

    It is part of the backend, so it is lent it call by call and keeps no reference: memory is given back at once."""

    def __init__(self, device: Device, sampler: DeviceSampler, ring: Pinned, logits: Buffer, vocab: int) -> None:
        self._device, self._sampler, self._ring = device, sampler, ring
        self._logits, self._vocab = logits, vocab
        self._burst: _Burst | None = None  # the one that the ring belongs to

    def takes(self, stop: frozenset[int], sampling: Sampling | None, history: Sequence[int]) -> bool:
        """Whether a launch can do this; otherwise the host decides token by token."""
        if len(stop) > MAX_STOPS:
            return False
        if sampling is None or sampling.greedy:
            return True
        return self._sampler.takes(sampling, history)

    def run(
        self,
        backend: CudaBackend,
        state: CudaState,
        token: int,
        count: int,
        stop: frozenset[int],
        sampling: Sampling | None,
        history: Sequence[int],
        listener: Listener | None = None,
    ) -> Generator[int]:
        """`Backend.decode`."""
        features = () if listener is None else listener.features
        sampling, text = None if sampling is None or sampling.greedy else sampling, list(history)
        state.drafted = None
        while count > 0:
            steps = min(count, BURST)
            check_room(state, steps)
            for running, kept in _recurrent(state):
                kept.copy_from(running)
            tokens: list[int] = []
            burst = self._start(backend, state, token, steps, stop, sampling, text, features)
            try:
                for following in self._follow(backend, burst, state, sampling, text):
                    tokens.append(following)
                    yield following
            finally:
                self._device.synchronize()
                if len(tokens) < burst.ring[0]:  # it ran ahead of who listens: go back, and run only that far
                    for running, kept in _recurrent(state):
                        running.copy_from(kept)
                    if tokens:
                        burst = self._start(backend, state, token, len(tokens), frozenset(), sampling, text, features)
                        self._device.synchronize()
                state.length += len(tokens)
                if listener is not None and tokens and self._burst is burst:  # else another launch took their place
                    rows = backend.outputs.decoded_rows(len(tokens), features)
                    listener.heard(state.length - len(tokens), rows)
            if tokens[-1] in stop:
                return
            token = tokens[-1]
            text += tokens
            count -= len(tokens)

    def let_go_of_ring(self) -> None:
        """Before another launch: let one that decodes come to its end, and leave it what it wrote."""
        burst, self._burst = self._burst, None
        if burst is not None:
            self._device.synchronize()
            burst.ring = self._ring.array.copy()
            if burst.ring[burst.ring[0]] == UNDECIDED:
                burst.logits = self._first_logits()

    def _start(
        self,
        backend: CudaBackend,
        state: CudaState,
        token: int,
        steps: int,
        stop: frozenset[int],
        sampling: Sampling | None,
        text: list[int],
        features: tuple[int, ...],
    ) -> _Burst:
        """Queue a launch."""
        draw, want = None, ARGMAX
        self.let_go_of_ring()
        if sampling is not None:
            draw = self._sampler.request(sampling, text, steps)
            want = LOGITS if sampling.temperature > 0 else ARGMAX  # kept for tokens that it leaves to us
        self._ring.array[0] = 0
        want = replace(want, features=features)
        backend.launch(state, Tree.chain([token]), want, Asked(steps, sorted(stop), draw))
        self._burst = _Burst(self._ring.array)
        return self._burst

    def _follow(
        self, backend: CudaBackend, burst: _Burst, state: CudaState, sampling: Sampling | None, text: list[int]
    ) -> Iterator[int]:
        """Ids as the device writes them. It ends early where one is left to the host."""
        device, seen, running = self._device, 0, True
        while running:
            running = self._burst is burst and int(device.cu.cuStreamQuery(0)[0]) == NOT_READY
            if not running:
                device.synchronize()
            while seen < burst.ring[0]:
                seen += 1
                following = int(burst.ring[seen])
                if following == UNDECIDED:
                    if sampling is None or sampling.temperature <= 0:  # the largest logit is always decided on
                        raise not_finite(state.length + seen)
                    backend.undecided += 1
                    logits = self._first_logits() if burst.logits is None else burst.logits
                    past = [*text, *burst.ring[1:seen].tolist()]
                    following = choose(logits, sampling, past, state.length + seen)
                yield following

    def _first_logits(self) -> np.ndarray:
        return self._logits.read(np.float32, (self._vocab,))


def _recurrent(state: CudaState) -> list[tuple[Buffer, Buffer]]:
    """What decoding overwrites, and where its last known good copy is kept. Keys and values only grow."""
    return [(state.delta, state.kept_delta), (state.history, state.kept_history)]
