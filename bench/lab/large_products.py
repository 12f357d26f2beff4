"""Clocks that the products of the activations-first pass take for a superblock of 64 rows, without copies or with them.

PYTHONPATH=src python bench/lab/large_products.py [--nodes 1 8 16 24] [--copies]

Shapes are the 27B's; columns are superblocks of a stage / of a tile of rows.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import numpy as np

from warpsmith.backend.cuda.build.compiler import compile_source
from warpsmith.backend.cuda.large.backend import SHORT_CONTEXT
from warpsmith.backend.cuda.large.formats import SLAB_BYTES
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.large.stream import PARCEL_UNIT
from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.model.config import SIZES
from warpsmith.model.weights import expected_shapes

SHARED, THREADS, ROUNDS = 232448, 384, 20
STAGES = ((80, 8), (80, 6), (40, 6), (14, 8))
BYTES = 8 * 1_200_128  # of weights an SM, read in eighths


def layout_of_the_27b(sms: int, caches: tuple[str, str] = ("f16", "f16")) -> LargeLayout:
    config = SIZES["27B"]
    stored = {
        name: tensor_type("q4_k_m", name, shape, config.layers, config.tied).name
        for name, shape in expected_shapes(config).items()
    }
    return LargeLayout(config, sms, stored, caches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16, 24])
    parser.add_argument("--copies", action="store_true")
    given = parser.parse_args()
    device = Device()
    layout, sms = layout_of_the_27b(device.chip.sms), device.chip.sms
    stream, clocks = device.zeros(sms * BYTES + (2 << 20)), device.zeros(sms * 8)
    sums = device.zeros(sms * 128 * max(given.nodes) * 64 * 4)
    source = (Path(__file__).parent / "large_products.cu").read_text()
    print("nodes  type " + "".join(f"{count:6}/{blocks}" for count, blocks in STAGES))
    for nodes in given.nodes:
        short = int(SHORT_CONTEXT[nodes] > 0)
        constants = {"IN_FLIGHT": 4, "BETWEEN": 4, "SHARED_MEMORY": SHARED, "SAMPLES": 0, "SHORT_CONTEXT": short}
        constants |= layout.constants(nodes) | ({"COPIES": 1} if given.copies else {})
        image, _ = compile_source(source, "large_products.cu", "sm_90a", constants)
        kernel = device.load(image).kernel("products", SHARED)
        for kind, name in ((0, "Q4_K"), (2, "Q6_K")):
            took = []
            for count, blocks in STAGES:
                parcels = device.upload(np.arange(128, dtype=np.uint32) * (8 * SLAB_BYTES[name] // PARCEL_UNIT))
                places = (stream.pointer, parcels.pointer, BYTES, sums.pointer, clocks.pointer)
                pointers = (ctypes.c_uint64(v) for v in places)
                numbers = (ctypes.c_int(v) for v in (count, kind, blocks, ROUNDS))
                arguments = (*pointers, *numbers)
                for _ in range(2):
                    kernel.launch(sms, THREADS, *arguments)
                device.synchronize()
                took.append(clocks.read(np.int64, (sms,)).mean() / ROUNDS / count)
            print(f"{nodes:5}  {name} " + "".join(f"{clock:8.0f}" for clock in took), flush=True)


if __name__ == "__main__":
    main()
