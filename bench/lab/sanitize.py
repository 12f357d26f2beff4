"""The CUDA kernels under compute-sanitizer: small models through everything the backend does.

PYTHONPATH=src python bench/lab/sanitize.py [memcheck racecheck synccheck] [--parts forward prompts slabs chips large]

Runs each part (all if none is named) once under each tool (the same), as a process of its own, and fails if one of them
finds anything. Needs a GPU and compute-sanitizer, which comes with the CUDA toolkit.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np

TOOLS = ("memcheck", "racecheck", "synccheck")
OPTIONS = {"EVERY_LANE_ARRIVES": 1}  # racecheck follows lanes, not what one of them does for its warp
TOOLKIT = "/usr/local/cuda/bin"


def run_trees() -> None:
    """A prompt, trees of every build, commits, decoding on the device, a snapshot: on a model of four layers."""
    from warpsmith.backend.base import LOGITS
    from warpsmith.backend.cuda.builds import VARIANTS
    from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
    from warpsmith.backend.tree import Tree
    from warpsmith.model.synthetic import tiny_model
    from warpsmith.model.weights import read_config

    model = tiny_model()
    config = read_config(model)
    backend = WeightsFirstBackend(config, model.tensors, context=256, options=OPTIONS)
    random = np.random.default_rng(0)
    state = backend.new_state(256)
    token = int(backend.prefill(state, random.integers(0, config.vocab, 20).tolist()).argmax[-1])
    saved = backend.snapshot(state)
    for nodes in (n for n in VARIANTS if n <= backend.largest_tree):
        parents = [-1, *(int(random.integers(max(0, i - 4), i)) for i in range(1, nodes))]
        tree = Tree(random.integers(0, config.vocab, nodes), np.array(parents))
        backend.forward([(state, tree)], LOGITS)
        backend.commit(state, tree.path(nodes - 1))
        print(f"tree of {nodes} nodes", flush=True)
    backend.restore(state, saved)
    print(f"decoded {list(backend.decode(state, token, 5))}", flush=True)


def read_prompts() -> None:
    """Prompts of BF16 through their own kernels, with every tile of the products in turn."""
    from warpsmith.backend.cuda.build.profiles import load_profiles
    from warpsmith.backend.cuda.prefill import streams
    from warpsmith.backend.cuda.prefill.products import NARROW_TILES, WIDE_TILES
    from warpsmith.backend.cuda.weights_first import WeightsFirstBackend

    fewest = replace(load_profiles()["h200"], largest_tree=1)  # prompts need no kernels of trees
    for i, tile in enumerate(WIDE_TILES):
        streams.WIDE_TILES, streams.NARROW_TILES = (tile,), NARROW_TILES[i % len(NARROW_TILES) :][:1]
        read_some(WeightsFirstBackend, "bf16", 4, profile=fewest)


def read_prompts_of_slabs() -> None:
    """The same of K-quants, over caches of blocks."""
    from warpsmith.backend.cuda.large import backend as large
    from warpsmith.backend.cuda.prefill import streams
    from warpsmith.backend.cuda.prefill.products import SLAB_TILES

    large.variants_for = lambda shared_memory: (1,)
    for tile, cache in zip(SLAB_TILES, ("f16", "q8_0", "q4_0", "f16"), strict=True):
        streams.SLAB_TILES = (tile,)
        read_some(large.LargeBackend, "q4_k_m", 6, cache_type_k=cache, cache_type_v=cache)


def read_prompts_without_wgmma() -> None:
    """The same through the kernels of other chips, built for this one."""
    from warpsmith.backend.cuda.build.profiles import load_profiles
    from warpsmith.backend.cuda.large import backend as large
    from warpsmith.backend.cuda.weights_first import WeightsFirstBackend

    fewest = replace(load_profiles()["h200"], largest_tree=1)
    for recipe in ("bf16", "q8_0"):
        read_some(WeightsFirstBackend, recipe, 4, profile=fewest, architecture="sm_90")
    large.variants_for = lambda shared_memory: (1,)
    for cache in ("f16", "q8_0"):
        read_some(large.LargeBackend, "q4_k_m", 6, cache_type_k=cache, cache_type_v="q4_0", architecture="sm_90")


def read_some(backend_type, recipe: str, value_heads: int, **others) -> None:
    """A layer of either kind. One token, the rest of a chunk, a chunk and a half with all logits; then all at once."""
    from large_timing import random_model

    from warpsmith.backend.base import Want
    from warpsmith.model.config import SIZES

    shape = {"layers": 2, "recurrent": (True, False), "hidden": 256, "ffn": 512, "vocab": 256, "tied": False}
    heads = {"heads": 4, "kv_heads": 2, "key_heads": 2, "value_heads": value_heads}
    config = replace(SIZES["4B"], **shape, **heads)
    backend = backend_type(config, random_model(config, recipe), context=256, options=OPTIONS, **others)
    ids = np.random.default_rng(1).integers(0, config.vocab, 160)
    state = backend.new_state(256)
    for first, end in ((0, 1), (1, 64), (64, 160)):
        backend.prefill(state, ids[first:end], Want("logits", every_row=first == 64, features=(0,), hidden=first == 64))
    backend.prefill(backend.new_state(256), ids)
    print(f"{backend_type.__name__}, {recipe}: {len(ids)} tokens", flush=True)


def run_large() -> None:
    """The activations-first pass over K-quants and quantised caches: trees of every build, decoding greedy and sampled,
    a snapshot; then a DFlash draft and the MTP head on it."""
    from draft_timing import random_draft
    from large_timing import random_model, some_tree

    from warpsmith.backend.base import LOGITS, Want
    from warpsmith.backend.cuda.draft.network import CudaDraft
    from warpsmith.backend.cuda.large.backend import LargeBackend
    from warpsmith.backend.sampling import Sampling
    from warpsmith.checkpoint.dflash import DFlashConfig
    from warpsmith.model.config import SIZES

    shape = {"layers": 4, "recurrent": (True, True, True, False), "hidden": 512, "ffn": 2560, "vocab": 2048}
    heads = {"heads": 12, "kv_heads": 2, "key_heads": 2, "value_heads": 6}
    config = replace(SIZES["27B"], **shape, **heads, tied=False, mtp_layers=1)
    backend = LargeBackend(
        config,
        random_model(config, "q4_k_m"),
        context=512,
        cache_type_k="q8_0",
        cache_type_v="q4_0",
        prompts=False,
        options=OPTIONS,
    )
    state, ids = backend.new_state(512), np.random.default_rng(2).integers(0, config.vocab, 200)
    backend.prefill(state, ids)
    saved = backend.snapshot(state)
    for nodes in backend.variants:
        tree = some_tree(nodes, config.vocab)
        backend.forward([(state, tree)], LOGITS)
        backend.commit(state, tree.path(nodes - 1))
        print(f"large: tree of {nodes} nodes", flush=True)
    backend.restore(state, saved)
    print(f"large: decoded {list(backend.decode(state, 7, 5))}", flush=True)
    how = Sampling(temperature=0.8, top_k=40, top_p=0.95, repeat_penalty=1.1)
    print(f"large: drawn {list(backend.decode(state, 7, 5, sampling=how, history=ids.tolist()))}", flush=True)

    windows: tuple[int | None, ...] = (None, 64)
    file = random_draft(
        DFlashConfig("random", 2, config.hidden, 512, 4, 2, 128, 1e7, 16, 5, (0, 3), windows, (False, True)), "q8_0"
    )
    draft = CudaDraft(backend, file.config, file.tensors, [128, 64])
    memory = draft.new_memory()
    rows = backend.prefill(backend.new_state(512), ids[:24], Want("none", features=(0, 3))).features
    assert rows is not None
    draft.append(memory, rows, 0)
    draft.fill(memory, 7, 24, 15, Want(tokens="top", top=16, hidden=True))
    print("draft: a block", flush=True)
    hidden = np.random.default_rng(3).standard_normal((9, config.hidden)).astype(np.float32)
    backend.mtp(state, ids[:9].tolist(), hidden, 0, Want("top", top=4, hidden=True))
    print("draft: the MTP head", flush=True)


PARTS = {
    "forward": run_trees,
    "prompts": read_prompts,
    "slabs": read_prompts_of_slabs,
    "chips": read_prompts_without_wgmma,
    "large": run_large,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="tool", help=", ".join(TOOLS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)  # the process under the tool
    given = parser.parse_args()
    if given.watched:
        for part in given.parts:
            PARTS[part]()
        return 0
    if unknown := set(given.tools) - set(TOOLS):
        parser.error(f"no such tool: {', '.join(unknown)}")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT)
    if sanitizer is None:
        print("compute-sanitizer was not found: install the CUDA toolkit", file=sys.stderr)
        return 1
    failed = []
    for tool in given.tools or TOOLS:
        for part in given.parts:
            print(f"== {tool}, {part}", flush=True)
            watched = [sys.executable, __file__, "--watched", "--parts", part]
            if subprocess.run([sanitizer, "--tool", tool, "--error-exitcode", "1", *watched]).returncode != 0:
                failed.append(f"{tool} of {part}")
    print(f"errors under {', '.join(failed)}" if failed else "clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
