"""How long prompts of a random model take on a GPU, and where that time goes, kernel by kernel.

PYTHONPATH=src python bench/lab/prompt_timing.py 27B [--type q4_k_m] [--lengths 64 520 2048 16384] [--depth 8192]
    [--profile 2048] [--chained 64]

A prompt's time is from the call to its last token's argmax on the host, the median of some runs. With --profile N every
kernel of a piece of N tokens is timed alone, with events around it: that adds launches which otherwise overlap, so the
sum is more than a prompt takes. With --chained N each of them is run behind itself forty times, as a graph: that is
what it takes in a chain, without the host.
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
from warpsmith.backend.cuda.backend import CudaState
from warpsmith.backend.cuda.memory.driver import Event, check
from warpsmith.backend.cuda.prefill import Prefill
from warpsmith.backend.cuda.prefill.products import SILU, Launch
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


def label(prompts: Prefill, launch: Launch) -> tuple[str, float]:
    """A kernel's name, and its floating-point operations if it is a product."""
    names = {int(kernel.function): (name, dict(extra)) for (name, extra), kernel in prompts._kernels.items()}
    name, extra = names[int(launch[1])]
    if "gemm" not in name:
        return name, 0.0
    places = (ctypes.c_void_p * 2).from_address(launch[2])
    gemm, span = Gemm.from_address(places[0]), Span.from_address(places[1])
    variant = str(extra["SLAB_VARIANT" if name == "slab_gemm" else "GEMM_VARIANT"])
    ending = int(variant.split(",")[-3 if name == "slab_gemm" else -1])
    rows = gemm.row_groups * (64 if ending == SILU else 32) + gemm.gate_rows
    return f"{name} {variant}: {rows} x {gemm.k_tiles * 32}", 2.0 * rows * gemm.k_tiles * 32 * span.octets * 8


def launches_of(backend: CudaBackend, count: int) -> tuple[Prefill, list[Launch], CudaState]:
    prompts = backend._prompts
    assert prompts is not None
    state = backend.new_state(backend.context)  # kept: launches write to it
    state.length = backend.context - count
    backend.prefill(state, np.zeros(count, np.int32))
    program = list(prompts._programs.values())[-1]
    return prompts, [each for each in program if not isinstance(each, int)], state


def profile(backend: CudaBackend, count: int) -> None:
    prompts, launches, _state = launches_of(backend, count)
    events = [Event(backend.device) for _ in range(len(launches) + 1)]
    events[0].record()
    for launch, after in zip(launches, events[1:], strict=True):
        check(backend.device.cu.cuLaunchKernelEx(*launch, 0))
        after.record()
    events[-1].wait()
    spent: dict[tuple[str, float], list[float]] = defaultdict(list)
    for launch, before, after in zip(launches, events, events[1:], strict=False):
        spent[label(prompts, launch)].append(after.seconds_since(before))
    total = sum(map(sum, spent.values()))
    print(f"{count} tokens: {total * 1e3:.2f} ms in kernels timed alone")
    for (name, flops), times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        middle, ms = statistics.median(times), sum(times) * 1e3
        rate = f"{flops / middle / 1e12:6.0f} TFLOP/s" if flops else ""
        print(f"{ms:9.3f} ms {ms / total / 1e3:6.1%}  {len(times):4} x {middle * 1e6:8.1f} us {rate}  {name}")


def replayed(backend: CudaBackend, launches: list[Launch], times: int = 5) -> float:
    """Seconds of a graph of these launches: without the host."""
    cu = backend.device.cu
    stream = check(cu.cuStreamCreate(1))
    check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    for config, kernel, arguments in launches:
        config.hStream = stream
        check(cu.cuLaunchKernelEx(config, kernel, arguments, 0))
        config.hStream = 0
    graph = check(cu.cuGraphInstantiate(check(cu.cuStreamEndCapture(stream)), 0))
    begin, end, took = Event(backend.device), Event(backend.device), []
    for _ in range(times + 1):
        check(cu.cuEventRecord(begin.handle, stream))
        check(cu.cuGraphLaunch(graph, stream))
        check(cu.cuEventRecord(end.handle, stream))
        end.wait()
        took.append(end.seconds_since(begin))
    return statistics.median(took[1:])


def chained(backend: CudaBackend, count: int) -> None:
    """Each kernel behind itself and the whole piece, by graphs."""
    prompts, launches, _state = launches_of(backend, count)
    begin = time.perf_counter()
    for launch in launches:
        check(backend.device.cu.cuLaunchKernelEx(*launch, 0))
    host = time.perf_counter() - begin
    backend.device.synchronize()
    whole = replayed(backend, launches)
    number, ms = len(launches), host * 1e3
    print(f"{count} tokens: {number} launches take the host {ms:.3f} ms, a graph of them {whole * 1e3:.3f} ms")
    kinds: dict[tuple[str, float], list[Launch]] = defaultdict(list)
    for launch in launches:
        kinds[label(prompts, launch)].append(launch)
    for (name, flops), same in kinds.items():
        chain = (same * 40)[:40]
        one = replayed(backend, chain) / len(chain)
        rate = f"{flops / one / 1e12:6.0f} TFLOP/s" if flops else ""
        print(f"{one * len(same) * 1e3:9.3f} ms {len(same):4} x {one * 1e6:8.1f} us {rate}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 520, 2048])
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--profile", type=int, nargs="+", default=[])
    parser.add_argument("--chained", type=int, nargs="+", default=[])
    given = parser.parse_args()
    config = SIZES[given.size]
    context = given.depth + max([*given.lengths, *given.profile, *given.chained])
    begin = time.perf_counter()
    backend = open_backend(config, random_model(config, given.type), context=context)
    print(f"{given.size} {given.type}: loaded in {time.perf_counter() - begin:.1f} s", flush=True)
    for count in given.lengths:
        took = seconds(backend, given.depth, count, given.runs)
        print(f"{count} tokens at {given.depth}: {took * 1e3:.3f} ms, {count / took:,.0f} tok/s", flush=True)
    for count in given.profile:
        profile(backend, count)
    for count in given.chained:
        chained(backend, count)


if __name__ == "__main__":
    main()
