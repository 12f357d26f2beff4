"""Our CPU engine and llama.cpp on the same file and the same cores, one after the other in one run.

    warpsmith synth 0.8B 0.8B-q4_k_m.gguf --type q4_k_m
    pip install llama-cpp-python
    python bench/compare_llamacpp.py 0.8B-q4_k_m.gguf --threads 2

`--llama-bench PROGRAM` measures with llama.cpp's own benchmark instead of its Python package. Prints medians, the read
bandwidth measured in the same run, and the part of it that decoding reaches. Run it on an otherwise idle machine.
Without either only our side is measured, and the table says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np

from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.cpu.backend import usable_cores
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.measure.speed import Case, measure
from warpsmith.model.weights import read_config


def median_rate(tokens: int, repetitions: int, run: Callable[[], object]) -> float:
    """Tokens a second, after one run that warms up."""
    run()
    times = []
    for _ in range(repetitions):
        before = perf_counter()
        run()
        times.append(perf_counter() - before)
    return tokens / statistics.median(times)


def read_bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read together, each its own quarter of a gigabyte."""
    arrays = [np.ones(1 << 25, np.uint64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        once = lambda: list(pool.map(np.bitwise_or.reduce, arrays))  # noqa: E731
        return median_rate(sum(a.nbytes for a in arrays), 5, once)


def ours(path: str, threads: int, prompt: int, generate: int, repetitions: int) -> tuple[float, float, float]:
    checkpoint = open_checkpoint(path)
    backend = CpuBackend(read_config(checkpoint), checkpoint.tensors, threads=threads)
    prefill = measure(backend, Case(prompt, 0), repetitions).median_ts
    decode = measure(backend, Case(0, generate), repetitions).median_ts
    weights = backend.memory(1)[0].nbytes
    return prefill, decode, weights * decode


def theirs(path: str, threads: int, prompt: int, generate: int, repetitions: int) -> tuple[float, float]:
    from llama_cpp import Llama  # type: ignore[import-not-found]

    model = Llama(
        model_path=path,
        n_ctx=prompt + generate + 8,
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0,
        verbose=False,
    )
    ids = np.random.default_rng(0).integers(model.n_vocab(), size=prompt + 1).tolist()

    def read() -> None:
        model.reset()
        model.eval(ids[:-1])

    def write() -> None:
        model.reset()
        token = ids[-1]
        for _ in range(generate):
            model.eval([token])
            token = model.sample(temp=0.0)

    return median_rate(prompt, repetitions, read), median_rate(generate, repetitions, write)


def theirs_by_llama_bench(
    program: str, path: str, threads: int, prompt: int, generate: int, repetitions: int
) -> tuple[float, float]:
    numbers = ["-t", threads, "-p", prompt, "-n", generate, "-r", repetitions, "-ngl", 0]
    command = [program, "-m", path, "-o", "json", *map(str, numbers)]
    results = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    prefill, decode = (statistics.median(result["samples_ts"]) for result in results)
    return prefill, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--llama-bench", metavar="PROGRAM", help="llama.cpp's benchmark, built for this machine")
    args = parser.parse_args()
    sizes = (args.threads, args.prompt, args.generate, args.repetitions)

    bandwidth = read_bandwidth(args.threads)
    prefill, decode, streamed = ours(args.model, *sizes)
    print(
        f"{args.threads} threads read {bandwidth / 1e9:.1f} GB/s; decoding streams {streamed / 1e9:.1f} GB/s of weights"
    )
    print(f"| engine | pp{args.prompt}, tok/s | tg{args.generate}, tok/s |\n|---|---|---|")
    print(f"| warpsmith | {prefill:.1f} | {decode:.1f} |")
    if args.llama_bench:
        their_prefill, their_decode = theirs_by_llama_bench(args.llama_bench, args.model, *sizes)
    elif importlib.util.find_spec("llama_cpp") is None:
        print("| llama.cpp | not measured: llama-cpp-python is not installed | |")
        return
    else:
        their_prefill, their_decode = theirs(args.model, *sizes)
    print(f"| llama.cpp | {their_prefill:.1f} | {their_decode:.1f} |")
    print(f"| ratio | {prefill / their_prefill:.2f} | {decode / their_decode:.2f} |")


if __name__ == "__main__":
    main()
