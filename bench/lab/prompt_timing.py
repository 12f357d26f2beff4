"""How long prompts of a random model take on a GPU, and where that time goes, kernel by kernel.

PYTHONPATH=src python bench/lab/prompt_timing.py 27B [--type q4_k_m] [--lengths 64 520 2048 16384] [--depth 8192]
    [--profile 2048]

A prompt's time is from the call to its last token's argmax on the host, the median of some runs. With --profile N every
kernel of a piece of N tokens is timed alone, with events around it: that adds launches which otherwise overlap, so the
sum is more than a prompt takes.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections import defaultdict

import numpy as np
from large_timing import random_model

from warpsmith.backend.cuda import CudaBackend, open_backend
from warpsmith.backend.cuda.memory.driver import Event, check
from warpsmith.backend.cuda.prefill.products import SILU
from warpsmith.backend.cuda.prefill.structures import Gemm, Span
from warpsmith.model.config import SIZES

RUNS = 5


def seconds(backend: CudaBackend, depth: int, count: int, runs: int) -> float:
    state = backend.new_state(depth + count)
    ids = np.random.default_rng(count).integers(0, backend.config.vocab, count)
    times = []
    for _ in range(runs + 1):
        state.length = depth  # whatever the cache holds
        begin = time.perf_counter()
        backend.prefill(state, ids)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def profile(backend: CudaBackend, count: int) -> None:
    prompts = backend._prompts
    assert prompts is not None
    state = backend.new_state(count)  # kept: launches below write to it
    backend.prefill(state, np.zeros(count, np.int32))
    shape, program = next((s, p) for s, p in prompts._programs.items() if s.octets == -(-count // 8))
    names = {int(kernel.function): (name, extra) for (name, extra), kernel in prompts._kernels.items()}
    events = [Event(backend.device) for _ in range(len(program) + 1)]
    marks: list[tuple[str, float]] = []
    events[0].record()
    for launch, after in zip(program, events[1:], strict=True):
        name, flops = "", 0.0
        if not isinstance(launch, int):
            name, extra = names[int(launch[1])]
            if "gemm" in name:
                places = (ctypes.c_void_p * 2).from_address(launch[2])
                gemm, span = Gemm.from_address(places[0]), Span.from_address(places[1])
                variant = str(dict(extra).popitem()[1])
                ending = int(variant.split(",")[-2 if name == "slab_gemm" else -1])
                rows = gemm.row_groups * (64 if ending == SILU else 32) + gemm.gate_rows
                name += f" {variant}: {rows} x {gemm.k_tiles * 32}"
                flops = 2.0 * rows * gemm.k_tiles * 32 * span.octets * 8
            check(backend.device.cu.cuLaunchKernelEx(*launch, 0))
        after.record()
        marks.append((name, flops))
    events[-1].wait()
    spent: dict[str, list[float]] = defaultdict(list)
    work: dict[str, float] = {}
    for (name, flops), before, after in zip(marks, events, events[1:], strict=False):
        if name:
            spent[name].append(after.seconds_since(before))
            work[name] = flops
    total = sum(map(sum, spent.values()))
    print(f"{count} tokens, {shape}: {total * 1e3:.2f} ms in kernels timed alone")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        middle, all_of_it = statistics.median(times), sum(times)
        rate = f"{work[name] / middle / 1e12:6.0f} TFLOP/s" if work[name] else ""
        ms = all_of_it * 1e3
        print(f"{ms:9.3f} ms {all_of_it / total:6.1%}  {len(times):4} x {middle * 1e6:8.1f} us {rate}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 520, 2048])
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--profile", type=int, nargs="+", default=[])
    given = parser.parse_args()
    config = SIZES[given.size]
    context = given.depth + max([*given.lengths, *given.profile])
    begin = time.perf_counter()
    backend = open_backend(config, random_model(config, given.type), context=context)
    print(f"{given.size} {given.type}: loaded in {time.perf_counter() - begin:.1f} s", flush=True)
    for count in given.lengths:
        took = seconds(backend, given.depth, count, given.runs)
        print(f"{count} tokens at {given.depth}: {took * 1e3:.3f} ms, {count / took:,.0f} tok/s", flush=True)
    for count in given.profile:
        profile(backend, count)


if __name__ == "__main__":
    main()
