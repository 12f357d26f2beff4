"""What the CPU engine takes of the machine: threads, the interpreter's lock, memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from random_models import random_tensors, random_tree, small_config
from warpsmith.backend.base import ARGMAX
from warpsmith.backend.cores import physical_cores, team_of, usable_cores
from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.cpu.outputs import native_want, output_for

TASKS = Path("/proc/self/task")
LINUX = pytest.mark.skipif(not TASKS.is_dir(), reason="threads and memory are counted in /proc")
UNOBSERVED = pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="sanitizers keep their own memory")


def anonymous_bytes() -> int:
    """Memory of this process that is no part of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def asleep(thread: str) -> bool:
    return (TASKS / thread / "stat").read_text().rpartition(")")[2].split()[0] == "S"


@LINUX
def test_threads_stay_and_sleep_between_calls() -> None:
    config = small_config(2)
    CpuBackend(config, random_tensors(config), threads=2)  # whoever watches threads has started its own by now
    before = set(os.listdir(TASKS))
    cpu = CpuBackend(config, random_tensors(config), threads=4)
    state = cpu.new_state(64)
    team = set(os.listdir(TASKS)) - before
    assert len(team) == 3  # the caller is the fourth
    for _ in range(3):
        cpu.prefill(state, [1, 2, 3])
        assert set(os.listdir(TASKS)) - before == team
    deadline = time.monotonic() + 30
    while not all(asleep(thread) for thread in team):
        assert time.monotonic() < deadline, "threads spin on although there is nothing to do"
    del cpu, state
    deadline = time.monotonic() + 30  # a joined thread is still listed until the kernel has buried it
    while team & set(os.listdir(TASKS)):
        assert time.monotonic() < deadline, "threads outlive their engine"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are not a process's to choose here")
def test_as_many_threads_as_cores_we_may_use() -> None:
    config = small_config(2)
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert CpuBackend(config, random_tensors(config)).threads == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert CpuBackend(config, random_tensors(config)).threads == team_of(usable_cores())
    assert CpuBackend(config, random_tensors(config), threads=3).threads == 3


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (7, 7), (8, 7), (15, 14), (16, 14), (64, 56)])
def test_one_core_of_eight_is_left_to_other_work(cores: int, threads: int) -> None:
    assert team_of(cores) == threads


@pytest.mark.parametrize(
    ("processors", "cores"), [(range(8), 4), ({0, 4}, 1), ({0, 1, 5}, 2), ({3}, 1), (range(10), 6)]
)
def test_threads_of_a_core_count_once(tmp_path: Path, processors: Iterable[int], cores: int) -> None:
    """Eight processors, n and n + 4 on one core; of two more the system tells nothing."""
    for n in range(8):
        folder = tmp_path / f"cpu{n}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{n % 4},{n % 4 + 4}\n")
    assert physical_cores(processors, tmp_path) == cores


@pytest.mark.parametrize("call", ["chains", "trees"])
def test_others_run_while_the_engine_computes(call: str) -> None:
    """A call lets go of the interpreter's lock: where nobody is asked to hand it over, others go on counting."""
    config = small_config(2)
    cpu = CpuBackend(config, random_tensors(config), threads=1)
    tree = random_tree(np.random.default_rng(0), 64, config.vocab)
    counted = during = 0

    def compute() -> None:
        nonlocal during
        nodes = slice(0, len(tree))
        output = output_for(cpu.config, ARGMAX, len(tree), len(tree))
        want = native_want(ARGMAX, output, range(len(tree)), nodes, nodes)
        for _ in range(50):
            state = cpu.new_state(64).native
            trees = ([state], [len(tree)], tree.tokens, tree.parents, want)
            run, arguments = (
                getattr(cpu._engine, call),
                trees if call == "trees" else ([state], [len(tree)], tree.tokens, want),
            )
            before = counted
            run(*arguments)
            during += counted - before

    patience = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        worker = threading.Thread(target=compute)
        worker.start()
        while worker.is_alive():
            counted += 1
            time.sleep(0)  # hands the lock over, and asks for it again
    finally:
        sys.setswitchinterval(patience)
    assert during > 0


LOADING = """
from warpsmith.backend.cpu import CpuBackend
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP

checkpoint = open_checkpoint(WISP)
config = read_config(checkpoint)
before, most = anonymous_bytes(), 0

def hear(done, total):
    global most
    most = max(most, anonymous_bytes())

cpu = CpuBackend(config, checkpoint.tensors, threads=2, progress=hear)
print(most - before, cpu.memory(1)[0].nbytes)
"""

FORWARD = """
import numpy as np
from random_models import random_tensors, random_tree, small_config
from warpsmith.backend.base import ARGMAX, Want
from warpsmith.backend.cpu import CpuBackend

config = small_config(2, hidden=16, vocab=1 << 18)
cpu = CpuBackend(config, random_tensors(config), threads=2)
tree = random_tree(np.random.default_rng(0), 64, config.vocab)
state = cpu.new_state(64)
for want in (Want("none"), ARGMAX, Want("top", top=1)):
    before = anonymous_bytes()
    output = cpu.forward([(state, tree)], want)
    print(anonymous_bytes() - before)
    assert output.logits is None
"""


def numbers_of(program: str) -> list[int]:
    """What it prints in a process of its own: memory that others have given back would be taken again here."""
    start = "from test_cpu_resources import anonymous_bytes\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", start + program], capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stderr
    return [int(number) for number in result.stdout.split()]


@LINUX
@UNOBSERVED
def test_weights_are_never_held_twice() -> None:
    """Packed straight from the mapped file: memory grows by the packed weights and hardly more at any time."""
    grown, weights = numbers_of(LOADING)
    assert 0.9 * weights < grown < 1.3 * weights


@LINUX
@UNOBSERVED
def test_an_argmax_takes_no_room_for_logits() -> None:
    _, argmax, top = numbers_of(FORWARD)
    logits = 64 * (1 << 18) * 4
    assert argmax < logits / 4
    assert top > logits / 2  # what it takes where somebody needs them
