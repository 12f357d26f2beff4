"""The best tokens of rows of logits, on an emulated GPU: numbers that are read four at a time, and one by one."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from emulator.gpu import emulated_gpu
from warpsmith.backend.base import Want, output_from_logits
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.backend.cuda.top import Top, top_image


@pytest.mark.parametrize("vocab", [300, 5003, 8192, 30_000])
def test_the_best_and_the_log_sum_exp(vocab: int) -> None:
    """Ordinary rows, ties, one value, rising numbers: then a few threads have most of the best."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    random = np.random.default_rng(vocab)
    rows = [random.normal(size=vocab) * 4, random.normal(size=vocab).round(1), np.zeros(vocab)]
    rows += [np.sort(random.normal(size=vocab)), np.where(random.random(vocab) < 0.5, -np.inf, 1.0)]
    logits = np.array(rows, np.float32)
    with emulated_gpu(3, (8,)):
        device = Device()
        top = Top(device, top_image("sm_90a", vocab), device.upload(logits), vocab)
        for count in (1, 16, 17):
            got, expected = top.of(len(rows), count), output_from_logits(logits, Want("top", count))
            np.testing.assert_array_equal(got.top_ids, expected.top_ids)
            np.testing.assert_array_equal(got.top_logits, expected.top_logits)
            assert got.logsumexp is not None
            np.testing.assert_allclose(got.logsumexp, expected.logsumexp, atol=1e-5, rtol=0)
