"""How long the activations-first pass takes on a random model of K-quants: decoding and trees at several depths.

PYTHONPATH=src python bench/lab/large_timing.py 27B [--nodes 1 8 16 22] [--depths 520 32768] [--caches f16 q8_0/q4_0]
    [--profile 1] [--set IN_FLIGHT=3]

With --profile N ... it also prints where the clocks of one pass over N nodes go, step by step, mean and slowest SM.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial

import numpy as np

from warpsmith.backend.base import ARGMAX
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.memory.caches import CACHE_ROWS
from warpsmith.backend.cuda.memory.driver import Device, Event
from warpsmith.backend.cuda.requests import Asked
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.model.config import SIZES, Config
from warpsmith.model.synthetic import weight_bytes
from warpsmith.model.weights import expected_shapes

STEPS, MARKS = 32, 4096
BEFORE = ("operands", "products", "wait for sums")
DELTA = ("projections", "convolutions", "walk")
ATTENTION = ("rows", "parts", "wait for parts", "merge")
CHOICE = ("last sums", "ranks", "wait for ranks", "tokens")


def random_model(config: Config, recipe: str) -> dict[str, Tensor]:
    """Tensors of one shape and type share their bytes: quick, and speed does not depend on values."""
    tensors, kept = {}, {}
    for name, shape in expected_shapes(config).items():
        kind = tensor_type(recipe, name, shape, config.layers, config.tied)
        key = (kind.name, shape) if len(shape) == 2 and "conv1d" not in name else name
        if key not in kept:
            kept[key] = np.concatenate(list(weight_bytes(0, name, kind, shape))).reshape(-1, kind.row_bytes(shape[-1]))
        tensors[name] = Tensor(name, kind, shape, lambda raw=kept[key]: raw)
    return tensors


def some_tree(nodes: int, vocab: int) -> Tree:
    rng = np.random.default_rng(nodes)
    parents = [-1] + [int(rng.integers(max(0, i - 4), i)) for i in range(1, nodes)]
    return Tree(rng.integers(0, vocab, nodes), np.array(parents))


def like_a_drafts(nodes: int, vocab: int) -> Tree:
    """A chain as deep as a block, and siblings of its first nodes."""
    deepest = min(nodes - 1, 15)
    parents = [-1, *range(deepest), *range(nodes - 1 - deepest)]
    return Tree(np.random.default_rng(nodes).integers(0, vocab, nodes), np.array(parents))


def milliseconds(backend: LargeBackend, run, repeats: int) -> float:
    begin, end, times = Event(backend.device), Event(backend.device), []
    for _ in range(repeats + 1):
        begin.record()
        run()
        end.record()
        end.wait()
        times.append(end.seconds_since(begin) * 1e3)
    return statistics.median(times[1:])


def keep_as(backend: LargeBackend, keys: str, values: str) -> None:
    """From now on with caches of other types, and kernels built for them: the weights need not be loaded again."""
    backend.layout = layout = copy(backend.layout)
    layout.key_rows, layout.value_rows = CACHE_ROWS[keys], CACHE_ROWS[values]
    backend.cache_types, backend._kernels = (keys, values), {}
    compilers = ThreadPoolExecutor()
    backend._images = {n: compilers.submit(backend._image, "large/forward.cu", n) for n in backend.variants}


def print_profile(backend: LargeBackend, state, nodes: int) -> None:
    """A mark is a clock, and the clocks waited for weights since the last one."""
    c = backend.config
    backend.profile.clear()
    backend.launch(state, some_tree(nodes, c.vocab), ARGMAX)
    backend.device.synchronize()
    marks = backend.profile.read(np.int64, (backend.layout.sms, MARKS // 2, 2))
    took, at = np.diff(marks[:, :, 0], axis=1), 0
    found: dict[tuple[str, str], list[int]] = {}
    for recurrent in c.recurrent:
        mixer, own = ("DeltaNet", DELTA) if recurrent else ("attention", ATTENTION)
        for stage in ("in", "mix_out", "mlp_in", "mlp_out"):
            for name in (*BEFORE, *(own if stage == "in" else ("work",))):
                found.setdefault((f"{mixer} {stage}", name), []).append(at)
                at += 1
    rounds = len(backend.layout.deals[-1].first)
    for name in (*("operands", "products") * rounds, *CHOICE):
        found.setdefault(("head", name), []).append(at)
        at += 1
    for number, ((stage, name), where) in enumerate(found.items()):
        text = f"{name} {took[:, where].mean():.0f}/{took[:, where].max(axis=0).mean():.0f}"
        if name == "products":
            text += f"  of which for weights {marks[:, [i + 1 for i in where], 1].mean():.0f}"
        print(f"{'' if number == 0 else chr(10)}{stage} " if name == BEFORE[0] else "  ", text, sep="", end="")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16, 22])
    parser.add_argument("--depths", type=int, nargs="+", default=[520, 32768])
    parser.add_argument("--profile", type=int, nargs="+", default=[])
    parser.add_argument("--caches", nargs="+", default=["f16"], help="types of keys and values, KEYS/VALUES if two")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="constants of the kernels to try")
    given = parser.parse_args()
    config, context = SIZES[given.size], max(given.depths) + 1024
    options = dict(pair.split("=") for pair in given.set) | ({"PROFILE": MARKS} if given.profile else {})
    tensors = random_model(config, given.type)
    free = Device().free_memory()
    backend = LargeBackend(config, tensors, context=context, options=options)
    bandwidth = backend.read_bandwidth()
    print(f"stream {backend.layout.stream_bytes / 1e9:.2f} GB, read alone at {bandwidth / 1e9:.0f} GB/s")
    for caches in given.caches:
        keep_as(backend, caches.split("/")[0], caches.split("/")[-1])
        state = backend.new_state(context)
        planned, used = sum(part.nbytes for part in backend.memory(context)), free - backend.device.free_memory()
        print(
            f"{caches}: {planned / 1e9:.3f} GB planned, the driver counts {used / 1e9:.3f} ({planned / used - 1:+.2%})"
        )
        for cache in (state.keys, state.values):
            cache.clear()
        for depth in given.depths:
            state.length = depth
            limit = sum(backend.layout.cache_bytes(depth)) / bandwidth * 1e3
            print(f"{caches}, depth {depth}: keys and values are read in {limit:.3f} ms at best")
            for nodes in given.nodes:
                tree = some_tree(nodes, config.vocab)
                took = milliseconds(backend, partial(backend.launch, state, tree, ARGMAX), 7)
                print(f"  {nodes} nodes {took:.3f} ms", flush=True)
            decode = partial(backend.launch, state, Tree.chain([5]), ARGMAX, Asked(steps=STEPS))
            took = milliseconds(backend, decode, 3) / STEPS
            print(f"  decoding {took:.3f} ms a token, {1e3 / took:.1f} tok/s", flush=True)
            for nodes in given.profile:
                print(f"clocks with {nodes} nodes, mean / slowest SM")
                print_profile(backend, state, nodes)


if __name__ == "__main__":
    main()
