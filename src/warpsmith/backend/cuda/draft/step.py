"""A step that the device makes by itself: a tree grown from a draft's beliefs, the pass over it, the walk, the commit.

All of it is queued behind the draft. The host waits once, for a report in its own memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from warpsmith.backend.base import Drafted, State, Want
from warpsmith.backend.block_draft import GrowingTree, Verified
from warpsmith.backend.checks import check_room
from warpsmith.backend.cuda.build.compiler import build
from warpsmith.backend.cuda.decoding import NOT_READY
from warpsmith.backend.cuda.draft.structures import Grow, Report, Walk
from warpsmith.backend.cuda.memory.driver import Pinned
from warpsmith.backend.cuda.requests import Asked
from warpsmith.backend.cuda.rows import CudaRows
from warpsmith.backend.cuda.sampler import UNDECIDED, draw_of
from warpsmith.backend.cuda.structures import Commit, Draw, MadeTree, Path
from warpsmith.backend.cuda.tree import TreeOnDevice, WalkedOnDevice
from warpsmith.backend.finite import not_finite
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import MAX_NODES, Tree

if TYPE_CHECKING:
    from warpsmith.backend.cuda.backend import CudaBackend
    from warpsmith.backend.cuda.draft.network import CudaDraft, CudaMemory
    from warpsmith.backend.cuda.state import CudaState

DEEPEST, WIDEST = 15, 16  # of tree.cu


@dataclass(frozen=True)
class Ahead:
    """A launch that was queued behind a walk, before anybody knew where that would end: it projects the path's rows,
    and fills the next block."""

    rows: CudaRows  # of the path
    launches: int  # so many were made when it was queued
    root: int
    position: int
    width: int  # of what top.cu was asked for
    growing: CudaGrowingTree | None  # from it, with the pass over that, if these are queued too
    appended: bool = False  # its rows are known to be committed


class StepProgram:
    """The kernels, and where trees, paths and reports lie: those of the last step."""

    def __init__(self, backend: CudaBackend) -> None:
        device = backend.device
        with ThreadPoolExecutor(2) as compilers:
            grow = compilers.submit(build, "draft/tree.cu", backend.architecture, {})
            walk = compilers.submit(build, "sample/walk.cu", backend.architecture, {})
            self.grow = device.load(grow.result()).kernel("tree")
            self.walk = device.load(walk.result()).kernel("walk")
        self.tree = device.zeros(ctypes.sizeof(MadeTree))
        self.path = device.zeros(ctypes.sizeof(Path))
        self.times = device.zeros(16)  # StepTimes
        self.memory = Pinned(device, np.uint8, ctypes.sizeof(Report))
        self.report = Report.from_address(self.memory.address)
        self.given = Pinned(device, np.uint8, ctypes.sizeof(MadeTree))
        self.serial = 0


class CudaGrowingTree(GrowingTree):
    """The step under way; another one ends it."""

    def __init__(
        self, network: CudaDraft, memory: CudaMemory, program: StepProgram, grow: Grow, again: bool = False,
        follows: bool = False,
    ) -> None:  # fmt: skip
        """`again`: another of the same kind is to be expected after this one. `follows`: what it grows from was queued
        behind the last step's commit."""
        backend = network.backend
        self.network, self.memory, self.backend, self.program = network, memory, backend, program
        self.nodes, self._height, self._width = grow.verified, grow.depth + 1, grow.width
        self.grow, self._again, self._follows = grow, again, follows
        self._given: Tree | None = None
        self._queued: tuple[int, Want] | None = None  # the pass over it: at which length, and what it gives
        grow.tops, grow.tree, grow.report = network.top.rows, program.tree.pointer, program.memory.pointer
        program.serial += 1
        self._serial = program.serial
        program.grow.launch(1, 32, grow)

    def instead(self, tree: Tree) -> None:
        assert len(tree) <= self.nodes
        self._queued = None
        self._given, made = tree, MadeTree.from_address(self.program.given.address)
        made.nodes = len(tree)
        made.tokens[: len(tree)], made.parents[: len(tree)] = tree.tokens.tolist(), tree.parents.tolist()
        self.program.tree.fill(self.program.given, ctypes.sizeof(MadeTree))

    def verify(
        self, state: State, want: Want, sampling: Sampling | None, history: Sequence[int], stop: frozenset[int]
    ) -> Verified:
        from warpsmith.backend.cuda.state import CudaState

        assert isinstance(state, CudaState)
        check_room(state, self._height)
        backend, program, sampled = self.backend, self.program, sampling is not None and not sampling.greedy
        walk = Walk(
            tree=program.tree.pointer, chosen=backend.outputs.ring.pointer + 4, tops=backend.outputs.top.rows,
            path=program.path.pointer, report=program.memory.pointer, times=program.times.pointer, length=state.length,
            serial=self._serial, stops=len(stop),
        )  # fmt: skip
        walk.stop_ids[: len(stop)] = list(stop)
        state.drafted = None
        if self._queued != (state.length, want):
            self._queue_pass(state, want)
        if sampled:
            assert sampling is not None
            walk.count = backend.best_needed(sampling) or 0
            backend.outputs.top.queue(self.nodes, walk.count)
        program.walk.launch(1, 32, walk, draw_of(sampling) if sampled and sampling is not None else Draw())
        backend.queue_commit(state, Commit(made=program.path.pointer))
        ahead = self.network.queue_ahead(self.memory, state.length, want, program, self._width)
        self._wait()
        report = Report.from_buffer_copy(program.report)  # the next tree writes it anew
        launches = backend.outputs.launches
        root, end = report.token[report.decided - 1], state.length + report.decided
        ahead = ahead and root != UNDECIDED
        # first what the device will be waiting for
        growing = self._queue_next(state, want, root, report.decided) if ahead else None
        self.verified = seen = self._outcome(report, launches, state, want, sampling, history, growing is not None)
        if ahead:
            assert isinstance(seen.output.features, CudaRows)
            rows = seen.output.features[seen.path]
            self.memory.ahead = Ahead(rows, backend.outputs.launches, root, end, self._width, growing)
        return seen

    def _queue_pass(self, state: CudaState, want: Want, after: int = 0) -> None:
        self.backend.launch(state, TreeOnDevice(self.program.tree.pointer, self.nodes), want, Asked(after=after))
        self._queued = state.length + after, want

    def _queue_next(self, state: CudaState, want: Want, root: int, after: int) -> CudaGrowingTree | None:
        """The next tree and the pass over it, before anybody has looked at what this one decided: if the text goes on
        as it does, the device does not have to wait for that. A commit of a shorter path runs this tree again."""
        if not self._again or self._given is not None or state.length + after + self._height > state.context:
            return None
        grow = Grow.from_buffer_copy(self.grow)
        grow.root = root
        growing = CudaGrowingTree(self.network, self.memory, self.program, grow, again=True, follows=True)
        growing._queue_pass(state, want, after)
        return growing

    def _wait(self) -> None:
        """Until the report is there, or the device has nothing more to do."""
        report, query = self.program.report, self.backend.device.cu.cuStreamQuery
        while report.serial != self._serial:
            if int(query(0)[0]) != NOT_READY:
                self.backend.device.synchronize()
                return

    def _outcome(
        self, report: Report, launches: int, state: CudaState, want: Want, sampling: Sampling | None,
        history: Sequence[int], overwritten: bool,
    ) -> Verified:  # fmt: skip
        given = self._given
        if given is None:
            grown, run, raw = report.grown, report.verified, memoryview(report)
            tokens = np.frombuffer(raw, np.int32, grown, Report.tree_tokens.offset)
            parents = np.frombuffer(raw, np.int32, grown, Report.tree_parents.offset)
            scores = np.frombuffer(raw, np.float64, grown, Report.scores.offset)
            tree = Tree.made(tokens[:run], parents[:run])
        else:
            tokens, parents, scores, tree, run = given.tokens, given.parents, np.zeros(len(given)), given, len(given)
        path, decided = report.path[: report.decided], report.token[: report.decided]
        output = self.backend.outputs.rows_of([run], want, launches)
        if decided[-1] != UNDECIDED:
            state.drafted = WalkedOnDevice(tree, output, path, overwritten)
        elif sampling is None or sampling.greedy:  # the largest logit is always decided on
            raise not_finite(state.length + len(path))
        else:  # what the device leaves open is decided here
            state.drafted = Drafted(tree, output)
            path, decided = self.backend.verify(state, tree, sampling, history)
        times = report.grew - report.began, report.ran - report.grew, report.committing if self._follows else 0
        drafting = (report.began - report.committed) * 1e-9 if self._follows else None
        return Verified(tokens, parents, scores, tree, output, path, decided, drafting, *(t * 1e-9 for t in times))


def growth(root: int, depth: int, width: int, nodes: int, verified: int, least: Sequence[float]) -> Grow | None:
    """What the kernel is asked for, if it can do that."""
    if not 1 <= depth <= DEEPEST or not 1 <= width <= WIDEST or nodes >= MAX_NODES:
        return None
    grow = Grow(root=root, depth=depth, width=width, nodes=nodes + 1, verified=min(verified, nodes) + 1)
    grow.least[:nodes] = list(least[:nodes]) if least else [-np.inf] * nodes
    return grow
