"""How long passes of the activations-first kernels take in several versions, by turns in one process.

PYTHONPATH=src python bench/lab/large_turns.py 27B FOLDER ... [--nodes 1 8 16 22] [--rounds 7] [--depth 520]
    [--cache q8_0] [--drafts] [--any-tokens]

A FOLDER has the files that a version changes, named as under kernels/ (large/delta.cuh). What is in the package runs
beside them. Weights are loaded once; each version's machine code several times, since it is up to 1% faster or slower
by where it lies in memory. A GPU at its limit of power gets slower by several percent within a second: so there is a
rest before each turn, and every round has an order of its own. Prints the mean of these copies' medians in ms, and the
least and largest of them; fails where a version's tokens differ, unless they may (--any-tokens).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from large_timing import like_a_drafts, milliseconds, random_model, some_tree

from warpsmith.backend.base import ARGMAX
from warpsmith.backend.cuda.build.compiler import compile_source, sources
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.memory.caches import CACHE_ROWS
from warpsmith.backend.cuda.memory.driver import Kernel
from warpsmith.model.config import SIZES

SOURCE, PASSES, COPIES, REST = "large/forward.cu", 6, 4, 0.005
Images = dict[int, "Future[tuple[bytes, str]]"]  # by nodes


def versions(folders: list[Path]) -> dict[str, dict[str, str]]:
    """The files that each version changes."""
    changed = {
        str(folder): {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.cu*")}
        for folder in folders
    }
    return {"as it is": {}, **changed}


def kernels(backend: LargeBackend, texts: dict[str, str], builds: list[int], pool: ThreadPoolExecutor) -> Images:
    """Machine code of a version, on its way."""
    headers = {name: text for name, text in texts.items() if name.endswith(".cuh")}
    source = texts.get(SOURCE, sources()[SOURCE])
    return {
        nodes: pool.submit(compile_source, source, SOURCE, backend.architecture, backend.constants(nodes) | headers)
        for nodes in builds
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16, 22])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--depth", type=int, default=520)
    parser.add_argument("--cache", default="f16", choices=CACHE_ROWS, help="the type of keys and values")
    parser.add_argument("--drafts", action="store_true", help="trees as drafts make them, not random ones")
    parser.add_argument("--any-tokens", action="store_true", help="versions may choose other tokens")
    given = parser.parse_args()
    tree_of = like_a_drafts if given.drafts else some_tree
    config, context = SIZES[given.size], given.depth + 1024
    model, cache = random_model(config, given.type), given.cache
    backend = LargeBackend(config, model, context=context, prompts=False, cache_type_k=cache, cache_type_v=cache)
    builds = sorted({next(n for n in backend.variants if nodes <= n) for nodes in given.nodes})
    with ThreadPoolExecutor() as pool:
        images = {name: kernels(backend, texts, builds, pool) for name, texts in versions(given.folders).items()}
    loaded: dict[tuple[str, int], dict[int, Kernel]] = {
        (name, copy): {
            nodes: backend.device.load(image.result()[0]).kernel("forward", backend.shared_memory)
            for nodes, image in built.items()
        }
        for copy in range(COPIES)
        for name, built in images.items()
    }
    state = backend.new_state(context)
    for cache in (state.keys, state.values):
        cache.clear()
    state.length = given.depth
    took: dict[tuple[str, int, int], list[float]] = {}
    tokens: dict[int, list[int]] = {}
    turns = [(name, copy, nodes) for name, copy in loaded for nodes in given.nodes]
    order = random.Random(0)
    for _ in range(given.rounds):
        order.shuffle(turns)
        for name, copy, nodes in turns:
            time.sleep(REST)
            backend._kernels = loaded[name, copy]
            run = partial(backend.launch, state, tree_of(nodes, config.vocab), ARGMAX)
            took.setdefault((name, copy, nodes), []).append(milliseconds(backend, run, PASSES))
            found = backend.outputs.of_trees([nodes], ARGMAX).argmax.tolist()
            same = tokens.setdefault(nodes, found) == found
            assert same or given.any_tokens, f"{name} chooses other tokens with {nodes} nodes"
    for nodes in given.nodes:
        for name in images:
            medians = [statistics.median(took[name, copy, nodes]) for copy in range(COPIES)]
            mean = statistics.mean(medians)
            print(f"{nodes:3} nodes, {name}: {mean:.3f} ms ({min(medians):.3f} to {max(medians):.3f})", flush=True)


if __name__ == "__main__":
    main()
