"""Sampling on the device: what the kernel is told, and which settings it takes (see kernels/sample/sample.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log

import numpy as np

from warpsmith.backend.cuda.memory.driver import Buffer, Device
from warpsmith.backend.cuda.shape import CANDIDATES, ROUNDS
from warpsmith.backend.cuda.structures import Draw
from warpsmith.backend.sampling import Sampling, mix

UNDECIDED = -1  # instead of a token: the host decides
MAX_BIASES = 4096  # of a launch that samples


def sampler_bytes(sms: int, context: int) -> dict[str, int]:
    """The buffers of sampled launches."""
    return {
        "lists": 16 * (1 + sms * (1 + CANDIDATES)),  # what SMs tell each other: records of 16 bytes
        "window": context * 4,
        "biases": MAX_BIASES * 8,
    }


class DeviceSampler:
    """The buffers that sampled launches use, and the requests for them."""

    def __init__(self, device: Device, sms: int, context: int, samples: bool) -> None:
        self.sms, self.context = sms, context
        self.samples = samples  # whether an SM has room for its logits
        sizes = sampler_bytes(sms, context)
        self._lists = device.zeros(sizes["lists"])
        self._window, self._biases = device.allocate(sizes["window"]), device.allocate(sizes["biases"])
        self._serial = 1  # tags of an earlier launch lie in the lists: none comes again

    def takes(self, sampling: Sampling, history: Sequence[int]) -> bool:
        """Whether the kernel draws by these settings; otherwise the host does it token by token."""
        return (
            self.samples
            and sampling.top_k <= min(CANDIDATES // 3, 2 * self.sms)  # more would seldom be found
            and (sampling.temperature <= 0 or isfinite(1 / sampling.temperature))
            and len(sampling.logit_bias) <= MAX_BIASES
            and len(history) <= self.context
        )

    def request(self, sampling: Sampling, history: Sequence[int], steps: int) -> Draw:
        """For a launch of so many steps, after `history`. No other may be running."""
        draw = draw_of(sampling)
        recent = [] if draw.last_n == 0 else history if draw.last_n < 0 else history[-draw.last_n :]
        biases = np.array(list(sampling.logit_bias), dtype=np.int32)
        amounts = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        _upload(self._window, np.array(recent, dtype=np.int32))
        _upload(self._biases, np.stack([biases, amounts.view(np.int32)], axis=1))
        draw.window, draw.windowed = self._window.pointer, len(recent)
        draw.biases, draw.biased = self._biases.pointer, len(biases)
        draw.lists, draw.serial = self._lists.pointer, self._serial
        self._serial = (self._serial + steps * ROUNDS) % 2**32
        return draw


def draw_of(sampling: Sampling) -> Draw:
    """The settings in the kernel's words."""
    return Draw(
        inverse_temperature=1 / sampling.temperature if sampling.temperature > 0 else 0.0,
        top_p=sampling.top_p,
        log_min_p=log(sampling.min_p) if sampling.min_p > 0 else 1.0,
        seed=mix(int(sampling.seed)),
        sampled=1,
        top_k=sampling.top_k,
        last_n=sampling.repeat_last_n if sampling.penalised else 0,
        repeat=sampling.repeat_penalty,
        frequency=sampling.frequency_penalty,
        presence=sampling.presence_penalty,
    )


def _upload(buffer: Buffer, array: np.ndarray) -> None:
    if array.size:
        buffer.write(array)
