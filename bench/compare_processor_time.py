"""Our CPU engine and llama.cpp on the same file by the processor time of one thread, for a machine with other work.

    python bench/compare_processor_time.py FILE... --llama-bench PROGRAM

Waiting for a core does not count, so medians repeat where a clock's do not; what others do to memory and caches still
does. Both are asked for a few tokens and for more of them, and the difference is what those took: loading drops out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from warpsmith.backend.cpu import CpuBackend
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.model.weights import read_config

PROMPT, DECODE = (64, 192), (8, 32)  # tokens of the short and of the long run


def ours(path: str, repetitions: int) -> tuple[float, float]:
    """Tokens a second of processor time: of a prompt, and decoded one by one."""
    checkpoint = open_checkpoint(path)
    backend = CpuBackend(read_config(checkpoint), checkpoint.tensors, threads=1)
    ids = np.random.default_rng(0).integers(backend.config.vocab, size=PROMPT[1]).tolist()

    def prompt(tokens: int) -> None:
        backend.prefill(backend.new_state(tokens), ids[:tokens])

    def decode(tokens: int) -> None:
        state = backend.new_state(tokens)
        for token in ids[:tokens]:
            backend.prefill(state, [token])

    def timed(run: Callable[[int], None]) -> Callable[[int], float]:
        def seconds(tokens: int) -> float:
            before = time.process_time()
            run(tokens)
            return time.process_time() - before

        return seconds

    return rate(timed(prompt), PROMPT, repetitions), rate(timed(decode), DECODE, repetitions)


def theirs(program: str, path: str, repetitions: int) -> tuple[float, float]:
    def seconds(flag: str, tokens: int) -> float:
        lengths = {"-p": "0", "-n": "0", flag: str(tokens)}
        flags = [part for pair in lengths.items() for part in pair]
        command = [program, "-m", path, "-t", "1", "-r", "1", "-ngl", "0", "--no-warmup", *flags]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed.")
        return used.ru_utime + used.ru_stime

    prompt, decode = partial(seconds, "-p"), partial(seconds, "-n")
    return rate(prompt, PROMPT, repetitions), rate(decode, DECODE, repetitions)


def rate(seconds: Callable[[int], float], lengths: tuple[int, int], repetitions: int) -> float:
    """Tokens a second, from the median difference of a long and a short run."""
    short, long = lengths
    return (long - short) / statistics.median(seconds(long) - seconds(short) for _ in range(repetitions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="FILE", help="GGUF files")
    parser.add_argument("--llama-bench", metavar="PROGRAM", help="llama.cpp's benchmark; without it, only our side")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    print("| file | | warpsmith, tok/s | llama.cpp, tok/s | ratio |\n|---|---|---|---|---|")
    for path in args.models:
        mine = ours(path, args.repetitions)
        other = theirs(args.llama_bench, path, args.repetitions) if args.llama_bench else (None, None)
        for what, here, there in zip((f"prompt of {PROMPT[1]}", "decode"), mine, other, strict=True):
            compared = f"{there:.1f} | {here / there:.2f}" if there else "not measured | "
            print(f"| {os.path.basename(path)} | {what} | {here:.1f} | {compared} |", flush=True)


if __name__ == "__main__":
    main()
