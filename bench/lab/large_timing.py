"""How long the activations-first pass takes on a random model of K-quants: decoding and trees at several depths.

PYTHONPATH=src python bench/lab/large_timing.py 27B [--nodes 1 8 16 22] [--depths 520 32768] [--profile 1]

With --profile N it also prints where the clocks of one pass over N nodes go, step by step, mean and slowest SM.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from warpsmith.backend.base import ARGMAX
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.memory.driver import Event
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.model.config import SIZES, Config
from warpsmith.model.synthetic import weight_bytes
from warpsmith.model.weights import expected_shapes

STEPS, MARKS = 32, 4096
NAMES = ("operands", "products", "work")  # with what each waits for


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


def milliseconds(backend: LargeBackend, run, repeats: int) -> float:
    begin, end, times = Event(backend.device), Event(backend.device), []
    for _ in range(repeats + 1):
        begin.record()
        run()
        end.record()
        end.wait()
        times.append(end.seconds_since(begin) * 1e3)
    return statistics.median(times[1:])


def print_profile(backend: LargeBackend, state, nodes: int) -> None:
    """Three marks a stage."""
    c = backend.config
    backend.profile.clear()
    backend.launch(state, some_tree(nodes, c.vocab), ARGMAX)
    backend.device.synchronize()
    took = np.diff(backend.profile.read(np.int64, (backend.large.sms, MARKS)), axis=1)
    for kind in (True, False):
        layers = [layer for layer, recurrent in enumerate(c.recurrent) if recurrent is kind]
        for slot, stage in enumerate(("in", "mix_out", "mlp_in", "mlp_out")):
            cells = []
            for step, name in enumerate(NAMES):
                at = [(layer * 4 + slot) * len(NAMES) + step for layer in layers]
                cells.append(f"{name} {took[:, at].mean():.0f}/{took[:, at].max(axis=0).mean():.0f}")
            print("DeltaNet" if kind else "attention", stage, "  ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16, 22])
    parser.add_argument("--depths", type=int, nargs="+", default=[520, 32768])
    parser.add_argument("--profile", type=int)
    given = parser.parse_args()
    config, context = SIZES[given.size], max(given.depths) + 1024
    options = {"PROFILE": MARKS} if given.profile else {}
    backend = LargeBackend(config, random_model(config, given.type), context=context, options=options)
    state = backend.new_state(context)
    for cache in (state.keys, state.values):
        cache.clear()
    print(f"stream {backend.large.stream_bytes / 1e9:.2f} GB, read alone at {backend.read_bandwidth() / 1e9:.0f} GB/s")
    for depth in given.depths:
        state.length = depth
        for nodes in given.nodes:
            tree = some_tree(nodes, config.vocab)
            took = milliseconds(backend, lambda tree=tree: backend.launch(state, tree, ARGMAX), 7)
            print(f"depth {depth}: {nodes} nodes {took:.3f} ms")
        took = milliseconds(backend, lambda: backend.launch(state, Tree.chain([5]), ARGMAX, steps=STEPS), 3) / STEPS
        print(f"depth {depth}: decoding {took:.3f} ms a token, {1e3 / took:.1f} tok/s")
    if given.profile:
        print_profile(backend, state, given.profile)


if __name__ == "__main__":
    main()
