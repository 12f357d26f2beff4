"""Launches of a prompt's kernels, and how its matrix products are cut into tiles."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warpsmith.backend.cuda.memory.driver import Device
from warpsmith.backend.cuda.prefill.structures import Gemm, Span

PLAIN, SILU, RESIDUAL = range(3)  # Ending of gemm.cuh


@dataclass(frozen=True)
class Tile:
    """A variant of the product: `Config`'s arguments (gemm.cuh), and which part of the full rate it reaches."""

    tokens: int
    row_blocks: int  # of 64 rows a warpgroup; of few rows: 2 where warpgroups have rows of their own
    stage_tiles: int
    stages: int
    step_tiles: int
    ahead: int
    rate: float  # measured on an H200, fixed costs apart

    def constant(self, ending: int) -> dict[str, object]:
        numbers = (self.tokens, self.row_blocks, self.stage_tiles, self.stages, self.step_tiles, self.ahead, ending)
        return {"GEMM_VARIANT": ",".join(map(str, numbers))}

    def rows(self, ending: int) -> int:
        return 64 * self.row_blocks * (1 if ending == RESIDUAL else 2)

    def tiles(self, ending: int, rows: int, octets: int) -> int:
        return math.ceil(rows / self.rows(ending)) * math.ceil(octets * 8 / self.tokens)

    def clocks(self, ending: int, rows: int, k: int, octets: int, sms: int) -> float:
        waves = math.ceil(self.tiles(ending, rows, octets) / sms)
        return waves * (3500 + k / 16 * self.rows(ending) * self.tokens / 128 / self.rate)


WIDE_TILES = (
    Tile(64, 1, 2, 8, 1, 8, 0.5),
    Tile(128, 1, 2, 8, 1, 8, 0.65),
    Tile(176, 1, 2, 7, 1, 8, 0.72),
    Tile(136, 2, 2, 4, 2, 2, 0.85),
    Tile(160, 2, 2, 4, 1, 2, 0.85),
)
NARROW_TILES = (Tile(72, 1, 4, 8, 2, 4, 0.4), Tile(128, 2, 4, 5, 1, 8, 0.6))

Kernels = Callable[[Tile, int], Any]


class Launcher:
    """Queues kernels, each of which may start while the one before it ends."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._configs: dict[tuple[int, int, int], Any] = {}

    def config(self, grid: int, threads: int, shared: int) -> Any:
        key = (grid, threads, shared)
        if key not in self._configs:
            cu = self.device.cu
            early = cu.CUlaunchAttribute()
            early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config = cu.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes, config.hStream = shared, 0
            config.attrs, config.numAttrs = [early], 1
            self._configs[key] = config
        return self._configs[key]


Launch = tuple[Any, Any, int]  # how, what, and where its arguments are


class Step:
    """A kernel with its arguments, which may be changed in place between launches."""

    def __init__(self, launcher: Launcher, kernel: Any, threads: int, *arguments: ctypes.Structure) -> None:
        self.launcher, self.kernel, self.threads, self.arguments = launcher, kernel, threads, arguments
        self._pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        self._address = ctypes.addressof(self._pointers)

    def on(self, grid: int) -> Launch:
        config = self.launcher.config(grid, self.threads, self.kernel.shared_bytes)
        return config, self.kernel.function, self._address


class Product:
    """One matrix: its arguments, and the steps that multiply it by tiles of any width."""

    def __init__(self, kernels: Kernels, launcher: Launcher, ending: int, gemm: Gemm, sms: int) -> None:
        self.kernels, self.launcher, self.ending, self.gemm, self.sms = kernels, launcher, ending, gemm, sms
        groups = gemm.row_groups + -(-gemm.gate_rows // 32)
        self.rows, self.k = groups * (64 if ending == SILU else 32), gemm.k_tiles * 32
        self._steps: dict[tuple[Tile, int], Step] = {}

    def on(self, span: Span, octets: int) -> Launch:
        tiles = NARROW_TILES if self.ending == RESIDUAL else WIDE_TILES
        tile = min(tiles, key=lambda t: t.clocks(self.ending, self.rows, self.k, octets, self.sms))
        key = (tile, ctypes.addressof(span))
        if key not in self._steps:
            self._steps[key] = Step(self.launcher, self.kernels(tile, self.ending), 384, self.gemm, span)
        work = tile.tiles(self.ending, self.rows, octets)
        # few tiles: the other SMs have the weights brought into L2
        return self._steps[key].on(self.sms if 2 * work <= self.sms else min(self.sms, work))
