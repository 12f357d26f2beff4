"""The CUDA backend and its device: the code of older chips, memory as planned, states that move."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

from device_checks import plain_run, relative, same_state
from random_models import random_tree
from test_cuda import SHAPE, bf16_tensors, ids
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.backend.cuda.memory.plan import DRIVER_BYTES, weights_first_parts
from warpsmith.backend.cuda.weights.loading import STAGING_BYTES
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.tree import Tree
from warpsmith.errors import DoesNotFit, NoDevice, WarpsmithError

pytestmark = pytest.mark.gpu

TENSORS = bf16_tensors(SHAPE, seed=1)
WATCHDOG = {"WATCHDOG_CYCLES": "4000000000ll"}


@pytest.fixture(scope="module", autouse=True)
def device() -> Device:
    try:
        return Device()
    except NoDevice as error:
        pytest.skip(str(error))


# -- the code of chips without bulk copies, made from PTX by the driver ------------------------------------------------


@pytest.fixture(scope="module")
def older(device: Device) -> WeightsFirstBackend:
    """With no more shared memory than such a chip has."""
    profile = load_profiles()["rtx-3090"]
    options = WATCHDOG | {"SHARED_MEMORY": profile.shared_memory}
    return WeightsFirstBackend(SHAPE, TENSORS, profile=profile, architecture="compute_80", options=options)


@pytest.mark.parametrize("length", [1, 100])
def test_older_chips_compute_what_the_reference_does(older: WeightsFirstBackend, length: int) -> None:
    reference = ReferenceBackend(SHAPE, TENSORS)
    want = Want("logits", every_row=True)
    got, expected = (b.prefill(b.new_state(512), ids(2, length), want).logits.numpy() for b in (older, reference))
    one_by_one = plain_run(older, older.new_state(512), ids(2, length))
    print(f"length {length}: relative error {relative(got, expected):.5f}, {relative(one_by_one, expected):.5f}")
    assert max(relative(got, expected), relative(one_by_one, expected)) < 0.02


@pytest.mark.parametrize("nodes", [3, 16])
def test_older_chips_run_trees_as_they_run_text(older: WeightsFirstBackend, nodes: int) -> None:
    random = np.random.default_rng(nodes)
    tree = random_tree(random, nodes, SHAPE.vocab)
    states = [older.new_state(256) for _ in range(2)]
    for state in states:
        older.prefill(state, ids(3, 45))
    logits = older.forward([(states[0], tree)], LOGITS).logits.numpy()
    path = tree.path(nodes - 1)
    np.testing.assert_array_equal(logits[path], plain_run(older, states[1], tree.tokens[path]))
    older.forward([(states[0], tree)])
    older.commit(states[0], path)
    assert same_state(SHAPE, *states)


def test_older_chips_decode_as_they_step(older: WeightsFirstBackend) -> None:
    states = [older.new_state(256) for _ in range(2)]
    first, token = (int(older.prefill(state, ids(4, 30)).argmax[-1]) for state in states)
    assert first == token
    decoded, step = list(older.decode(states[0], token, 100)), token
    for following in decoded:
        step = int(older.forward([(states[1], Tree.chain([step]))]).argmax[0])
        older.commit(states[1], [0])
        assert step == following
    assert same_state(SHAPE, *states)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_is_what_was_planned(device: Device) -> None:
    """Packing's staging buffer is gone by now, the driver's share is an upper bound, and small buffers may lie in
    memory that the driver had already."""
    gc.collect()
    before = device.free_memory()
    backend = WeightsFirstBackend(SHAPE, TENSORS, context=4096)
    state = backend.new_state(4096)
    backend.forward([(state, Tree.chain([1]))])
    used = before - device.free_memory()
    planned = sum(part.nbytes for part in backend.memory(4096))
    print(f"{used / 2**20:.1f} MiB of {planned / 2**20:.1f} planned")
    assert planned - DRIVER_BYTES - STAGING_BYTES - (16 << 20) <= used <= planned


def test_a_context_that_does_not_fit_is_refused_before_loading() -> None:
    heard: list[tuple[int, int]] = []
    with pytest.raises(DoesNotFit, match="keys and values") as refused:
        WeightsFirstBackend(replace(SHAPE, context=1 << 31), TENSORS, progress=lambda *bytes: heard.append(bytes))
    assert not heard
    assert "would fit" in refused.value.fix


def test_loading_is_reported(device: Device) -> None:
    heard: list[tuple[int, int]] = []
    backend = WeightsFirstBackend(SHAPE, TENSORS, context=256, progress=lambda *bytes: heard.append(bytes))
    done, totals = zip(*heard, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}
    assert weights_first_parts(backend.layout, 256)[0].nbytes >= done[-1]


# -- states ------------------------------------------------------------------------------------------------------------


def test_a_snapshot_holds_what_is_used_and_fits_a_longer_state(device: Device) -> None:
    backend = WeightsFirstBackend(SHAPE, TENSORS, context=1024)
    short, long = backend.new_state(64), backend.new_state(1024)
    backend.prefill(short, ids(6, 40))
    saved = backend.snapshot(short)
    assert saved.nbytes < short.delta.nbytes + short.history.nbytes + short.keys.nbytes + short.values.nbytes
    backend.restore(long, saved)
    assert same_state(SHAPE, short, long)
    follow = ids(7, 10)
    np.testing.assert_array_equal(plain_run(backend, long, follow), plain_run(backend, short, follow))
    with pytest.raises(WarpsmithError, match="does not fit"):
        backend.restore(backend.new_state(16), saved)


def test_reading_alone_is_faster_than_decoding(device: Device) -> None:
    backend = WeightsFirstBackend(SHAPE, TENSORS, context=256)
    bandwidth = backend.read_bandwidth()
    print(f"{bandwidth / 1e9:.0f} GB/s over {backend.layout.stream.bytes / 2**20:.0f} MiB")
    assert 1e10 < bandwidth < 1e14
