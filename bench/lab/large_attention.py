"""Clocks that attention's walk over keys and values takes in several versions, alone: the 27B's shape.

PYTHONPATH=src python bench/lab/large_attention.py [FOLDER ...] [--nodes 1 24] [--caches q8_0] [--lengths 32768]

A FOLDER has the files that a version changes, as large_turns.py takes them. All SMs walk over all chunks that nodes
share, layer after layer, from memory. Prints the mean and the slowest SM's clocks of a layer, how fast keys and values
were read, and whether a version's results differ.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from large_products import layout_of_the_27b

from warpsmith.backend.cuda.build.compiler import compile_source
from warpsmith.backend.cuda.large.backend import SHORT_CONTEXT
from warpsmith.backend.cuda.memory.caches import CACHE_ROWS
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.model.config import SIZES

SHARED, THREADS, LAYERS = 232448, 384, 6


def rows(kind: str, count: int, random: np.random.Generator) -> np.ndarray:
    """Random rows of a cache: fp16, or blocks with their scales behind them."""
    bytes_ = CACHE_ROWS[kind].row_bytes
    if kind == "f16":
        return random.standard_normal((count, 256), np.float32).astype(np.float16).view(np.uint8)
    made = random.integers(0, 256, (count, bytes_), np.uint8)
    made[:, -16:] = (0.02 * random.random((count, 8), np.float32)).astype(np.float16).view(np.uint8)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 24])
    parser.add_argument("--caches", nargs="+", default=["q8_0"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768])
    given = parser.parse_args()
    config, device = SIZES["27B"], Device()
    random, sms = np.random.default_rng(0), device.chip.sms
    source = (Path(__file__).parent / "large_attention.cu").read_text()
    queries = device.upload(random.standard_normal((64 * config.heads, 256), np.float32).astype(np.float16))
    parts = device.zeros(64 * config.heads * 40 * 512)
    stats, clocks = device.zeros(64 * config.heads * 40 * 8), device.zeros(LAYERS * sms * 8)
    found: dict[object, bytes] = {}
    pool = ThreadPoolExecutor()

    def image(cache: str, length: int, columns: int, folder: Path | None) -> Future[tuple[bytes, str]]:
        changed = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.cuh")} if folder else {}
        constants = {"IN_FLIGHT": 4, "BETWEEN": 4, "SHARED_MEMORY": SHARED, "SAMPLES": 0}
        constants |= {"SHORT_CONTEXT": int(length <= SHORT_CONTEXT[columns])} | layouts[cache].constants(columns)
        return pool.submit(compile_source, source, "large_attention.cu", "sm_90a", constants | changed)

    layouts = {cache: layout_of_the_27b(sms, (cache, cache)) for cache in given.caches}
    images = {
        (cache, length, nodes, folder): image(cache, length, next(n for n in (1, 8, 16, 24) if nodes <= n), folder)
        for cache in given.caches
        for length in given.lengths
        for nodes in given.nodes
        for folder in (None, *given.folders)
    }
    for cache in given.caches:
        for length in given.lengths:
            one = rows(cache, config.kv_heads * length, random)
            keys, values = (device.upload(np.concatenate([one] * LAYERS)) for _ in range(2))
            pointers = [ctypes.c_uint64(v.pointer) for v in (queries, keys, values, parts, stats, clocks)]
            for nodes, folder in itertools.product(given.nodes, (None, *given.folders)):
                kernel = device.load(images[cache, length, nodes, folder].result()[0]).kernel("walk", SHARED)
                for buffer in (parts, stats):
                    buffer.clear()
                for _ in range(2):
                    kernel.launch(sms, THREADS, *pointers, *(ctypes.c_int(n) for n in (nodes, length, LAYERS)))
                    device.synchronize()
                took = clocks.read(np.int64, (LAYERS, sms))[1:]
                got = b"".join(buffer.read(np.uint8, (buffer.nbytes,)).tobytes() for buffer in (parts, stats))
                mean, slowest = took.mean(), np.median(took.max(axis=1))
                same = found.setdefault((cache, length, nodes), got) == got
                print(
                    f"{cache} {length}, {nodes} nodes, {folder or 'as it is'}: {mean:.0f} / {slowest:.0f} clocks, "
                    f"{2 * one.nbytes / slowest / sms:.1f} bytes a clock and SM{'' if same else ', OTHER RESULTS'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
