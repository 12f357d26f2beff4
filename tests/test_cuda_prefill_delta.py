"""The DeltaNet of prompts on an emulated GPU: one chunk in one launch against the launches of many, and numpy."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import shutil
import subprocess
from functools import cache
from typing import Any

import numpy as np
import pytest

from emulator.gpu import FLAGS, _folder
from prefill_layout import from_bf16, from_tiles, to_tiles
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.prefill import plan
from warpsmith.backend.cuda.prefill.streams import RowTiles
from warpsmith.backend.cuda.prefill.structures import Delta, Piece
from warpsmith.backend.reference.backend import ReferenceState
from warpsmith.backend.reference.mixers import ChunkMixer
from warpsmith.model.config import SIZES, Config

KERNELS = {"delta_prep": plan.PREP_SHARED, "delta_scan": plan.scan_shared(2), "delta_output": 0,
           "delta_short": plan.SHORT_SHARED}  # fmt: skip
SOURCE = """
#define __CUDA_ARCH__ 900
#define AHEAD 2
#include "machine.h"
#include "prefill/{name}.cu"
EXPORTED int run(int first, int grid, int threads, int shared, const Delta* a, const Piece* p) {{
    machine::chance_state = first + 1;
    machine::grid_size = {{(unsigned)grid}}, machine::block_size = {{(unsigned)threads}};
    return machine::run_blocks(first, grid, threads, shared, [&] {{ {name}(*a, *p); }});
}}
"""
CAPACITY = 40  # octets


def config_of(ratio: int) -> Config:
    return dataclasses.replace(SIZES["0.8B"], layers=1, recurrent=(True,), key_heads=2, value_heads=2 * ratio)


@cache
def library(name: str, ratio: int) -> Any:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    folder = _folder() / f"{name}-{ratio}"
    folder.mkdir(exist_ok=True)
    header = plan.header(RowTiles(Layout(config_of(ratio), 132)))
    (folder / "prompt.cuh").write_text(str(header["prompt.cuh"]))
    (folder / "kernel.cpp").write_text(SOURCE.format(name=name))
    command = ["g++", "-Og", *FLAGS, f"-I{folder}", f"-I{_folder()}", folder / "kernel.cpp", "-o", folder / "kernel.so"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "kernel.so")).run


class Device:
    """A layer's buffers in host memory."""

    def __init__(self, ratio: int, seed: int) -> None:
        self.config, self.ratio = config_of(ratio), ratio
        c, rng, tokens = self.config, np.random.default_rng(seed), CAPACITY * 8
        self.made = {
            "qkv": rng.standard_normal((tokens, c.conv_channels)),
            "z": rng.standard_normal((tokens, c.value_dim)),
            "beta": rng.standard_normal((tokens, c.value_heads)),
            "alpha": rng.standard_normal((tokens, c.value_heads)) * 2 - 2,
        }
        self.made = {n: from_bf16(to_bf16(v)) for n, v in self.made.items()}
        self.weights = {
            "conv": rng.standard_normal((c.conv_channels, 4)).astype(np.float32) / 2,
            "dt": rng.standard_normal(c.value_heads).astype(np.float32),
            "a": -np.exp(rng.standard_normal(c.value_heads)).astype(np.float32),
            "norm": (1 + 0.1 * rng.standard_normal(128)).astype(np.float32),
        }
        sizes = plan.buffer_bytes(c, tokens)
        self.arrays = {n: np.zeros(sizes[n] // 4, np.uint32) for n in ("n", "b", "q", "o", "fade", "states", "y")}
        self.arrays["arrived"] = np.zeros(c.key_heads, np.uint32)
        self.arrays["vectors"] = np.concatenate(
            [np.zeros(2 * c.hidden, np.float32), *(self.weights[n].reshape(-1) for n in ("conv", "dt", "a", "norm"))]
        )
        self.arrays["history"] = np.zeros((4, c.conv_channels), np.float32)
        self.arrays["state"] = np.zeros((c.value_heads, 128, 128), np.float32)
        self.arrays["raw"] = np.zeros(0)
        self.arrays["gates"] = np.zeros(0)

    def launch(self, name: str, piece: Piece, grid: int, at_once: int = 1) -> None:
        arguments = Delta(**{n: array.ctypes.data for n, array in self.arrays.items()})
        run = library(name, self.ratio)
        for first in range(0, grid, at_once):
            ended = run(first, at_once, 256, KERNELS[name], ctypes.byref(arguments), ctypes.byref(piece))
            assert ended, "some threads wait for ever"

    def run(self, start: int, end: int, short: bool) -> np.ndarray:
        """Tokens of the sequence, from `start` on: as one piece."""
        c, base, lead = self.config, start // 64 * 64, start % 64
        rows = np.zeros((CAPACITY * 8, c.conv_channels + c.value_dim), np.float32)
        rows[lead : end - base] = np.concatenate([self.made["qkv"], self.made["z"]], axis=1)[start:end]
        self.arrays["raw"] = to_bf16(to_tiles(rows))
        gates = np.zeros((2 * c.value_heads, CAPACITY * 8), np.float32)
        gates[:, lead : end - base] = np.concatenate([self.made["beta"], self.made["alpha"]], axis=1)[start:end].T
        self.arrays["gates"] = gates
        piece = Piece(lead=lead, end=end - base, base=base, capacity=CAPACITY)
        items = -(-(end - base) // 64) * c.value_heads
        if short:
            self.launch("delta_short", piece, c.value_heads * plan.SHORT_CTAS, plan.SHORT_CTAS)
        else:
            self.launch("delta_prep", piece, items)
            self.launch("delta_scan", piece, c.value_heads * (128 // plan.SLICE))
            self.launch("delta_output", piece, items)
        words = self.arrays["y"].view(np.uint16)[: c.value_dim // 32 * CAPACITY * 256]
        y = from_tiles(from_bf16(words.reshape(c.value_dim // 32, CAPACITY, 256)), c.value_dim // 256)
        return y[lead : end - base]


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize(
    ("ratio", "cuts"),
    [
        pytest.param(1, (0, 64, 128), marks=pytest.mark.slow),
        pytest.param(2, (0, 50, 57, 64, 65), marks=pytest.mark.slow),
        (3, (0, 1, 3, 64, 127)),
    ],
)
def test_one_chunk_in_one_launch_has_the_bits_of_many(ratio: int, cuts: tuple[int, ...]) -> None:
    many, one = Device(ratio, 5), Device(ratio, 5)
    for start, end in itertools.pairwise(cuts):
        expected, got = many.run(start, end, short=False), one.run(start, end, short=True)
        np.testing.assert_array_equal(got, expected, err_msg=f"y of {start}..{end}")
        for name in ("state", "history"):
            np.testing.assert_array_equal(one.arrays[name], many.arrays[name], err_msg=f"{name} after {end}")
        assert not one.arrays["arrived"].any()


@pytest.mark.parametrize("ratio", [1, 2])
def test_chunks_are_the_recurrence(ratio: int) -> None:
    """Operands in bf16 leave some thousandths (docs/cuda.md)."""
    device, count = Device(ratio, 7), 150
    state = ReferenceState(device.config, 512, np.float32)
    expected = np.concatenate(
        [
            ChunkMixer(device.config, state.layers, s, min(64, count - s)).delta(
                0, {n: v[s : min(s + 64, count)] for n, v in device.made.items()}, device.weights
            )
            for s in range(0, count, 64)
        ]
    )
    got = device.run(0, count, short=False)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 8e-3
    delta = device.arrays["state"].transpose(0, 2, 1)
    assert np.linalg.norm(delta - state.layers[0].delta) / np.linalg.norm(state.layers[0].delta) < 8e-3
