"""The CUDA kernels under compute-sanitizer: one small model through everything the backend does.

PYTHONPATH=src python bench/lab/sanitize.py [memcheck racecheck synccheck]

Runs itself once under each tool (all three if none is named) and fails if one of them finds anything. Needs a GPU and
compute-sanitizer, which comes with the CUDA toolkit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np

TOOLS = ("memcheck", "racecheck", "synccheck")
TOOLKIT = "/usr/local/cuda/bin"
WORK = "--work"  # given to the process that is watched


def work() -> None:
    """A prompt, trees of every build, commits, decoding on the device, a snapshot: on a model of four layers."""
    from warpsmith.backend.base import LOGITS
    from warpsmith.backend.cuda.backend import CudaBackend
    from warpsmith.backend.cuda.builds import VARIANTS
    from warpsmith.backend.tree import Tree
    from warpsmith.model.synthetic import tiny_model
    from warpsmith.model.weights import read_config

    model = tiny_model()
    config = read_config(model)
    backend = CudaBackend(config, model.tensors, context=256, options={"EVERY_LANE_ARRIVES": 1})
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
    """Prompts through their own kernels, over row tiles and over slabs: one token, some, a cut, all logits."""
    from large_timing import random_model

    from warpsmith.backend.base import Want
    from warpsmith.backend.cuda.backend import CudaBackend
    from warpsmith.backend.cuda.large.backend import LargeBackend
    from warpsmith.model.config import SIZES

    shape = {"layers": 4, "recurrent": (True, True, True, False), "hidden": 512, "ffn": 1024, "vocab": 2048}
    heads = {"heads": 4, "kv_heads": 2, "key_heads": 2}
    for backend_type, recipe, value_heads in ((CudaBackend, "bf16", 4), (LargeBackend, "q4_k_m", 6)):
        config = replace(SIZES["4B"], **shape, **heads, value_heads=value_heads, tied=False)
        backend = backend_type(config, random_model(config, recipe), context=1024)
        state = backend.new_state(1024)
        ids = np.random.default_rng(1).integers(0, config.vocab, 800)
        for first, end in ((0, 1), (1, 64), (64, 200), (200, 720)):
            backend.prefill(state, ids[first:end], Want("logits", every_row=first == 64))
            print(f"{backend_type.__name__}: {end} tokens", flush=True)


def run_large() -> None:
    """The activations-first pass over K-quants and quantised caches: trees of every build, decoding greedy and sampled,
    a snapshot; then a DFlash draft and the MTP head on it."""
    from draft_timing import random_draft
    from large_timing import random_model, some_tree

    from warpsmith.backend.base import LOGITS, Want
    from warpsmith.backend.cuda.draft.network import CudaDraft
    from warpsmith.backend.cuda.large.backend import VARIANTS, LargeBackend
    from warpsmith.backend.sampling import Sampling
    from warpsmith.checkpoint.dflash import DFlashConfig
    from warpsmith.model.config import SIZES

    shape = {"layers": 4, "recurrent": (True, True, True, False), "hidden": 512, "ffn": 2560, "vocab": 2048}
    heads = {"heads": 12, "kv_heads": 2, "key_heads": 2, "value_heads": 6}
    config = replace(SIZES["27B"], **shape, **heads, tied=False, mtp_layers=1)
    backend = LargeBackend(
        config, random_model(config, "q4_k_m"), context=512, cache_type_k="q8_0", cache_type_v="q4_0", prompts=False
    )
    state, ids = backend.new_state(512), np.random.default_rng(2).integers(0, config.vocab, 200)
    backend.prefill(state, ids)
    saved = backend.snapshot(state)
    for nodes in (1, *VARIANTS):
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
        DFlashConfig("random", 2, config.hidden, 512, 4, 2, 128, 1e7, 16, 5, (0, 3), windows, (False, True))
    )
    draft = CudaDraft(backend, file.config, file.tensors, [128, 64], backend.lend)
    memory = draft.new_memory()
    rows = backend.prefill(backend.new_state(512), ids[:24], Want("none", features=(0, 3))).features
    assert rows is not None
    draft.append(memory, rows, 0)
    draft.fill(memory, 7, 24, 15, Want(tokens="top", top=16, hidden=True))
    print("draft: a block", flush=True)
    hidden = np.random.default_rng(3).standard_normal((9, config.hidden)).astype(np.float32)
    backend.mtp(state, ids[:9].tolist(), hidden, 0, Want("top", top=4, hidden=True))
    print("draft: the MTP head", flush=True)


def main() -> int:
    if sys.argv[1:] == [WORK]:
        work()
        read_prompts()
        run_large()
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT)
    if sanitizer is None:
        print("compute-sanitizer was not found: install the CUDA toolkit", file=sys.stderr)
        return 1
    failed = []
    for tool in sys.argv[1:] or TOOLS:
        print(f"== {tool}", flush=True)
        command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, __file__, WORK]
        if subprocess.run(command).returncode != 0:
            failed.append(tool)
    print(f"errors under {', '.join(failed)}" if failed else "clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
