"""Launches that come again and again, as one graph."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from warpsmith.backend.cuda.memory.driver import check
from warpsmith.backend.cuda.prefill.products import Launch, Launcher

PART_AHEAD = 5  # one launch of five is queued by itself
NON_BLOCKING, THREAD_LOCAL = 1, 1  # a stream that waits for no other; capture of this thread's launches alone


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class Replay:
    """Some launches in a row, captured once: what the driver was told beforehand takes the device about a microsecond
    less a launch. Arguments that depend on the piece are read anew whenever it is queued; the first launches are queued
    one by one, so that the device has work meanwhile."""

    def __init__(self, launcher: Launcher, all_launches: Sequence[Launch]) -> None:
        self._launcher, self._exec = launcher, 0
        ahead = len(all_launches) // PART_AHEAD
        self._ahead, launches = all_launches[:ahead], all_launches[ahead:]
        self._cu = cu = launcher.device.cu
        stream = check(cu.cuStreamCreate(NON_BLOCKING))
        check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode(THREAD_LOCAL)))
        for each in launches:
            each.config.hStream = stream
            check(cu.cuLaunchKernelEx(each.config, each.function, each.arguments, 0))
            each.config.hStream = 0
        self._graph = check(cu.cuStreamEndCapture(stream))
        check(cu.cuStreamDestroy(stream))
        nodes, _ = check(cu.cuGraphGetNodes(self._graph, len(launches)))
        self._exec = int(check(cu.cuGraphInstantiate(self._graph, 0)))
        self._changes: list[tuple[int, _Node]] = []
        for node, each in zip(nodes, launches, strict=True):
            told, captured = _node(each), check(cu.cuGraphKernelNodeGetParams(node))
            assert (captured.gridDimX, captured.blockDimX) == (told.grid[0], told.block[0])  # in the order of launches
            if each.changes:
                self._changes.append((int(node), told))

    def queue(self) -> None:
        launcher, graph = self._launcher, self._exec
        for each in self._ahead:
            launcher.launch(each)
        tell = launcher.driver.cuGraphExecKernelNodeSetParams_v2
        for node, told in self._changes:
            launcher.check(tell(graph, node, ctypes.byref(told)))
        launcher.check(launcher.driver.cuGraphLaunch(graph, None))

    def __del__(self) -> None:
        if self._exec:
            self._cu.cuGraphExecDestroy(self._exec)
            self._cu.cuGraphDestroy(self._graph)
            self._exec = 0


def _node(launch: Launch) -> _Node:
    config: Any = launch.config
    return _Node(
        int(launch.function),
        (ctypes.c_uint * 3)(config.gridDimX, config.gridDimY, config.gridDimZ),
        (ctypes.c_uint * 3)(config.blockDimX, config.blockDimY, config.blockDimZ),
        config.sharedMemBytes,
        launch.arguments,
    )
