"""How long prompts of a random model take on a GPU, and where that time goes, kernel by kernel.

PYTHONPATH=src python bench/lab/prompt_timing.py 27B [--type q4_k_m] [--lengths 64 520 2048 16384] [--depth 8192]
    [--profile 2048] [--chained 64] [--timeline 64] [--without-wgmma] [--by-forward]

A prompt's time is from the call to its last token's argmax on the host, the median of some runs. With --profile N every
kernel of a piece of N tokens is timed alone, with events around it: that adds launches which otherwise overlap, so the
sum is more than a prompt takes. With --chained N each of them is run behind itself forty times, as a graph: that is
what it takes in a chain, without the host. With --timeline N kernels note when their first block has what the launch
before it made: from one such time to the next is what a launch adds to a piece of N tokens. With --without-wgmma
kernels are those of other chips, in their shared memory; with --by-forward prompts go through the forward pass.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import re
import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np
from large_timing import random_model

from warpsmith.backend.cuda import CudaBackend, open_backend
from warpsmith.backend.cuda.build import compiler
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.memory.driver import Event, check
from warpsmith.backend.cuda.prefill import Prefill
from warpsmith.backend.cuda.prefill.products import SILU, Launch
from warpsmith.backend.cuda.prefill.structures import Gemm, Span
from warpsmith.backend.cuda.state import CudaState
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
    names = {int(kernel.function): (name, dict(extra)) for (name, extra), kernel in prompts.kernels.loaded.items()}
    name, extra = names[int(launch.function)]
    if "gemm" not in name:
        return name, 0.0
    places = (ctypes.c_void_p * 2).from_address(launch.arguments)
    gemm, span = Gemm.from_address(places[0]), Span.from_address(places[1])
    variant = str(extra["SLAB_VARIANT" if name == "slab_gemm" else "GEMM_VARIANT"])
    ending = int(variant.split(",")[-3 if name == "slab_gemm" else -2])
    rows = gemm.row_groups * (64 if ending == SILU else 32) + gemm.gate_rows
    return f"{name} {variant}: {rows} x {gemm.k_tiles * 32}", 2.0 * rows * gemm.k_tiles * 32 * span.octets * 8


def launches_of(backend: CudaBackend, count: int) -> tuple[Prefill, list[Launch], CudaState]:
    prompts = backend._prompts
    assert prompts is not None
    state = backend.new_state(backend.context)  # kept: launches write to it
    state.length = backend.context - count
    backend.prefill(state, np.zeros(count, np.int32))
    octets = -(-count // 8)
    program = next(made for shape, made in reversed(prompts._programs.items()) if shape.octets == octets)
    return prompts, [each for each in program if not isinstance(each, int)], state


def profile(backend: CudaBackend, count: int) -> None:
    prompts, launches, _state = launches_of(backend, count)
    events = [Event(backend.device) for _ in range(len(launches) + 1)]
    events[0].record()
    for launch, after in zip(launches, events[1:], strict=True):
        prompts.launcher.launch(launch)
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
    for launch in launches:
        launch.config.hStream = stream
        check(cu.cuLaunchKernelEx(launch.config, launch.function, launch.arguments, 0))
        launch.config.hStream = 0
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
        prompts.launcher.launch(launch)
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


def with_marks(sources: dict[str, str]) -> dict[str, str]:
    """Kernels of a prompt that note the time after their wait, of one thread of the first block."""
    wait, marked = "wait_for_previous();", "wait_for_previous(), mark();"
    out = {}
    for name, text in sources.items():
        if name == "common/ptx.cuh":
            text += """
__device__ u64 marks[4096];
__device__ u32 marks_made;
__device__ u64 stamps[64];
__device__ __forceinline__ void stamp(int i) {
    if (threadIdx.x == 0 && blockIdx.x == 0) stamps[i] = nanoseconds();
}
__device__ __forceinline__ void mark() {
    if (threadIdx.x % 128 == 0 && blockIdx.x == 0) marks[atomicAdd(&marks_made, 1u) % 4096] = nanoseconds();
}
"""
        elif name == "prefill/product.cuh":  # whoever brings activations
            at = text.index(wait, text.index("void bring_x"))
            text = text[:at] + marked + text[at + len(wait) :]
        elif name.startswith("prefill/") and name.endswith(".cu"):
            text = text.replace(
                wait, "{ wait_for_previous(); if (threadIdx.x < 128) mark(); }"
            )  # it may be in a branch
            text = with_stamps(text)
        out[name] = text
    return out


def with_stamps(text: str) -> str:
    """The time after every barrier of a kernel's body, and at its end."""
    number = itertools.count()
    head, body = text[: text.index('extern "C"')], text[text.index('extern "C"') :].rstrip()
    body = re.sub(r"(__syncthreads|sync_cluster|mark)\(\);", lambda m: f"{m[0]} stamp({next(number)});", body)
    return head + body.removesuffix("}") + f"    stamp({next(number)});\n}}\n"


def timeline(backend: CudaBackend, count: int) -> None:
    prompts, launches, _state = launches_of(backend, count)
    device, cu = backend.device, backend.device.cu
    modules = {id(kernel.module): kernel.module for kernel in prompts.kernels.loaded.values()}
    of_function = {int(kernel.function): id(kernel.module) for kernel in prompts.kernels.loaded.values()}

    def symbol(module, name: bytes):
        return check(cu.cuModuleGetGlobal(module.handle, name))[0]

    rounds = []
    for _ in range(9):
        for module in modules.values():
            check(cu.cuMemsetD32(symbol(module, b"marks_made"), 0, 1))
        for launch in launches:
            prompts.launcher.launch(launch)
        device.synchronize()
        times = {}
        for key, module in modules.items():
            values = np.empty(4096, np.uint64)
            check(cu.cuMemcpyDtoH(values.ctypes.data, symbol(module, b"marks"), values.nbytes))
            times[key] = iter(values.tolist())
        rounds.append([next(times[of_function[int(launch.function)]]) for launch in launches])
    for (name, _), kernel in prompts.kernels.loaded.items():
        stamps = np.empty(64, np.uint64)
        check(cu.cuMemcpyDtoH(stamps.ctypes.data, symbol(kernel.module, b"stamps"), stamps.nbytes))
        if (count_of := int(np.count_nonzero(stamps))) > 2:
            print(f"{name}: ns between barriers of the last launch {np.diff(stamps[:count_of].astype(np.int64))}")
    gaps = np.median(np.diff(np.array(rounds, np.int64), axis=1), axis=0) / 1e3
    spent: dict[tuple[str, float], list[float]] = defaultdict(list)
    for launch, gap in zip(launches, gaps.tolist(), strict=False):
        spent[label(prompts, launch)].append(gap)
    whole = np.median([each[-1] - each[0] for each in rounds]) / 1e3
    print(f"{count} tokens: {len(launches)} launches, {whole:.1f} us from the first to the last")
    for (name, _), times_of in sorted(spent.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(times_of):9.1f} us {len(times_of):4} x {statistics.median(times_of):7.2f} us  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 520, 2048])
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--profile", type=int, nargs="+", default=[])
    parser.add_argument("--chained", type=int, nargs="+", default=[])
    parser.add_argument("--timeline", type=int, nargs="+", default=[])
    parser.add_argument("--without-wgmma", action="store_true")
    parser.add_argument("--by-forward", action="store_true")
    given = parser.parse_args()
    if given.timeline:
        plain = compiler.sources()
        compiler.sources = lambda: with_marks(plain)  # everything else is timed with other options
    config = SIZES[given.size]
    context = given.depth + max([*given.lengths, *given.profile, *given.chained, *given.timeline])
    begin = time.perf_counter()
    how: dict[str, Any] = {"profile": dataclasses.replace(load_profiles()["h200"], largest_tree=1)}  # no trees
    if given.without_wgmma:
        other = load_profiles()["rtx-3090"]
        how = {"profile": other, "architecture": "sm_90", "options": {"SHARED_MEMORY": other.shared_memory}}
    backend = open_backend(config, random_model(config, given.type), context=context, **how)
    if given.by_forward:
        backend._prompts = None
    print(f"{given.size} {given.type}: loaded in {time.perf_counter() - begin:.1f} s", flush=True)
    for count in given.lengths:
        took = seconds(backend, given.depth, count, given.runs)
        print(f"{count} tokens at {given.depth}: {took * 1e3:.3f} ms, {count / took:,.0f} tok/s", flush=True)
    for count in given.profile:
        profile(backend, count)
    for count in given.chained:
        chained(backend, count)
    for count in given.timeline:
        timeline(backend, count)


if __name__ == "__main__":
    main()
