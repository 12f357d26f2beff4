"""How long the CUDA forward kernel takes on a random 0.8B: decoding at several depths, trees of several sizes.

PYTHONPATH=src python bench/lab/forward_timing.py [--type q8_0] [--in-flight 2 3 4] [--depths 520 32768]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from functools import partial

import numpy as np

from warpsmith.backend.cuda.state import CudaState
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.model.config import SIZES, Config
from warpsmith.model.weights import expected_shapes


def random_bf16(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """Weights of the right scale from a table of normals: quick, and speed does not depend on values."""
    rng = np.random.default_rng(seed)
    table = (rng.standard_normal(65536).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 2 and "conv1d" not in name:
            values = table[rng.integers(0, 65536, shape, dtype=np.uint16)]
            values = (values & 0x8000) | ((values & 0x7FFF) - np.uint16(round(np.log2(shape[1]) / 2) << 7))
            tensors[name] = Tensor(name, TYPES["BF16"], shape, lambda v=values: v.view(np.uint8))
        else:
            v = rng.standard_normal(shape).astype(np.float32) * 0.3
            v = -np.exp(v) if name.endswith("ssm_a") else v + ("norm" in name)
            v = np.ascontiguousarray(v, dtype=np.float32).reshape(-1, shape[-1])
            tensors[name] = Tensor(name, TYPES["F32"], shape, lambda v=v: v.view(np.uint8))
    return tensors


def as_q8_0(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model with other random weights in Q8_0: the same few million over and over."""
    table = np.random.default_rng(1).standard_normal((1 << 16, 32), dtype=np.float32)
    blocks: dict[int, np.ndarray] = {}
    for name, tensor in tensors.items():
        if tensor.type.name == "BF16":
            rows, k = tensor.shape
            if k not in blocks:
                blocks[k] = quantize(TYPES["Q8_0"], table * np.float32(k**-0.5)).reshape(-1)
            raw = np.resize(blocks[k], (rows, TYPES["Q8_0"].row_bytes(k)))
            tensors[name] = Tensor(name, TYPES["Q8_0"], tensor.shape, lambda raw=raw: raw)
    return tensors


def median_ms(run, repeats: int = 7) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def fake_length(backend: WeightsFirstBackend, length: int) -> CudaState:
    """A state of some length without running it: keys and values of an empty cache are as good as any."""
    state = backend.new_state(length + 256)
    state.keys.clear()
    state.values.clear()
    state.length = length
    return state


def bushy_tree(nodes: int) -> Tree:
    """Chains that branch now and then, as drafts do."""
    return Tree(np.arange(nodes), np.array([-1] + [i - 1 if i % 3 else i // 2 for i in range(1, nodes)]))


def time_backend(backend: WeightsFirstBackend, depths: list[int], sizes: list[int]) -> None:
    def decode(state: CudaState, depth: int) -> None:
        state.length = depth
        for _ in backend.decode(state, 7, 128):
            pass

    for depth in depths:
        ms = median_ms(partial(decode, fake_length(backend, depth), depth))
        print(f"  decode at {depth:6}: {ms / 128 * 1e3:7.1f} us a token, {128e3 / ms:7.1f} tok/s", flush=True)
    state = fake_length(backend, 520)
    for nodes in sizes:
        ms = median_ms(partial(backend.forward, [(state, bushy_tree(nodes))]), 15)
        print(f"  forward of {nodes:2} nodes at 520: {ms * 1e3:7.1f} us", flush=True)


MARKS = 800
UNIT = 1980  # clocks: a microsecond at the highest rate
MATMUL = ["weights", "inputs", "multiply", "barrier", "finish"]


def stage_marks(config: Config, nodes: int) -> list[tuple[str, str]]:
    """(stage, part) of every interval between two marks of the kernel, up to the LM head."""
    marks = [("embed", "all")]
    for recurrent in config.recurrent:
        kind = "delta" if recurrent else "attention"
        marks += [(f"{kind}_in", part) for part in MATMUL]
        if recurrent:
            parts = (
                ("rows", "recurrence", "barrier", "publish")
                if nodes == 1
                else ("first rows", "signs", "recurrence", "barrier", "publish")
            )
            marks += [("delta_mix", part) for part in parts]
        else:
            parts = ("parts", "merge") if nodes == 1 else ("rows", "parts", "merge")
            marks += [(f"attention_{part}", "all") for part in parts]
        for stage in (f"{kind}_out", "mlp_in", "mlp_out"):
            marks += [(stage, part) for part in MATMUL]
    return marks


def print_profile(config: Config, tensors: dict[str, Tensor], nodes: int) -> None:
    """Where a forward pass spends its time: the mean over SMs and layers of each part, from clocks in the kernel."""
    backend = WeightsFirstBackend(config, tensors, options={"PROFILE": MARKS})
    state = fake_length(backend, 520)
    for _ in range(300):  # until the chip runs at the rate that it keeps
        backend.forward([(state, bushy_tree(nodes))])
    marks = stage_marks(config, nodes)
    read = backend.profile.read(np.int64, (backend.layout.sms, MARKS))
    clocks, times = read[:, :-4], np.diff(read[:, -4:].reshape(-1, 2, 2), axis=1)  # of all: clocks, nanoseconds
    per_us = float(np.median(times[:, 0, 0] / times[:, 0, 1])) * 1e3
    counts = (clocks != 0).sum(axis=1)
    busy = clocks[counts == counts.max()]  # SMs that have a part in every stage
    spent = np.diff(busy[:, : len(marks) + 1], axis=1) / UNIT
    print(f"  profile of {nodes} nodes, {len(busy)} SMs, in {UNIT} clocks: each (mean, slowest SM) and a token's total")
    print(f"  {per_us:.0f} MHz, {np.median(times[:, 0, 1]) / 1e3:.1f} us from the first thread to the last")
    for stage, part in dict.fromkeys(marks):
        columns = [i for i, mark in enumerate(marks) if mark == (stage, part)]
        these = spent[:, columns]
        each, worst, total = these.mean(), these.max(axis=0).mean(), these.mean(axis=0).sum()
        print(f"    {stage:16} {part:10} {each:7.2f} {worst:7.2f} {total:8.1f}")
    head = (busy.max(axis=1) - busy[:, len(marks)]).mean() / UNIT
    print(f"    {'head':16} {'all':10} {'':15} {head:8.1f}")
    print(f"    {'token':16} {'':10} {'':15} {spent.mean(axis=0).sum() + head:8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--type", choices=["bf16", "q8_0"], default="bf16")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[2])
    parser.add_argument("--depths", type=int, nargs="+", default=[520, 4096, 32768])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16, 22, 32, 64])
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="node counts to profile")
    arguments = parser.parse_args()
    config = dataclasses.replace(SIZES["0.8B"], context=65536)
    tensors = random_bf16(config)
    if arguments.type == "q8_0":
        tensors = as_q8_0(tensors)
    for nodes in arguments.profile:
        print_profile(config, tensors, nodes)
    for in_flight in arguments.in_flight:
        start = time.perf_counter()
        options = {"IN_FLIGHT": in_flight}
        backend = WeightsFirstBackend(config, tensors, options=options)
        print(f"in flight {in_flight}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
        time_backend(backend, arguments.depths, arguments.nodes)


if __name__ == "__main__":
    main()
