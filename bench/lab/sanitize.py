"""The CUDA kernels under compute-sanitizer: one small model through everything the backend does.

PYTHONPATH=src python bench/lab/sanitize.py [memcheck racecheck synccheck]

Runs itself once under each tool (all three if none is named) and fails if one of them finds anything. Needs a GPU and
compute-sanitizer, which comes with the CUDA toolkit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np

TOOLS = ("memcheck", "racecheck", "synccheck")
TOOLKIT = "/usr/local/cuda/bin"
WORK = "--work"  # given to the process that is watched


def work() -> None:
    """A prompt, trees of every build, commits, decoding on the device, a snapshot: on a model of four layers."""
    from warpsmith.backend.base import LOGITS
    from warpsmith.backend.cuda.backend import VARIANTS, CudaBackend
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


def main() -> int:
    if sys.argv[1:] == [WORK]:
        work()
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
