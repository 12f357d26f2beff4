"""Clocks that the walk over a DeltaNet's states takes in several versions, alone: the 27B's shape on an H200.

PYTHONPATH=src python bench/lab/large_walk.py [FOLDER ...] [--nodes 16 23]

A FOLDER has the files that a version changes, as large_turns.py takes them. Trees: a chain, a chain with siblings of
its first nodes, what `warpsmith bench` takes. Prints clocks the first time and the median of the others, means over
SMs; fails where a version's results differ.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import numpy as np
from large_products import layout_of_the_27b

from warpsmith.backend.cuda.build.compiler import compile_source
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.draft.costs import typical_tree
from warpsmith.model.config import SIZES

SHARED, THREADS, ROUNDS, COLUMNS = 232448, 384, 9, 24
ROW, KEPT = 1024, 5  # floats of a node's row, at least; places for states


def trees(nodes: int) -> dict[str, list[int]]:
    chain = min(nodes - 1, 15)
    return {
        "chain": list(range(-1, nodes - 1)),
        "siblings": [-1, *range(chain), *range(nodes - 1 - chain)],
        "typical": typical_tree(nodes, np.random.default_rng(0), 1000).parents.tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 23])
    given = parser.parse_args()
    config, device = SIZES["27B"], Device()
    layout, sms = layout_of_the_27b(device.chip.sms), device.chip.sms
    constants = {"IN_FLIGHT": 4, "BETWEEN": 4, "SHARED_MEMORY": SHARED, "SAMPLES": 0, "SHORT_CONTEXT": 1}
    constants |= layout.constants(COLUMNS)
    random = np.random.default_rng(0)
    value_dim, rows = config.value_dim, (0.1 * random.standard_normal(sms * COLUMNS * ROW)).astype(np.float32)
    states = device.upload((0.1 * random.standard_normal(value_dim * 128)).astype(np.float32))
    branches = device.zeros(value_dim * KEPT * 128 * 4)
    clocks, place = device.zeros(ROUNDS * sms * 8), device.upload(rows)
    source = (Path(__file__).parent / "large_walk.cu").read_text()
    found: dict[tuple[int, str], bytes] = {}
    for folder in (None, *given.folders):
        changed = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.cuh")} if folder else {}
        image, _ = compile_source(source, "large_walk.cu", "sm_90a", constants | changed)
        kernel = device.load(image).kernel("walk", SHARED)
        for nodes in given.nodes:
            for name, parents in trees(nodes).items():
                place.write(rows)
                parent = device.upload(np.array(parents, np.int32))
                pointers = (ctypes.c_uint64(v.pointer) for v in (parent, states, branches, place, clocks))
                kernel.launch(sms, THREADS, *pointers, ctypes.c_int(nodes), ctypes.c_int(ROUNDS))
                device.synchronize()
                took = clocks.read(np.int64, (ROUNDS, sms)).mean(axis=1)
                got = place.read(np.float32, (rows.size,)).tobytes()
                assert found.setdefault((nodes, name), got) == got, f"{folder} has other results"
                print(
                    f"{folder or 'as it is'}: {nodes} nodes, {name}: {took[0]:.0f}, {np.median(took[1:]):.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
