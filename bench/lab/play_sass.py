"""How many clocks a stretch of a kernel takes by its machine code: played through in order, without a GPU.

nvdisasm -hex -g -c kernel.cubin > kernel.sass
python bench/lab/play_sass.py kernel.sass                      # every instruction with its stall count and scoreboards
python bench/lab/play_sass.py kernel.sass 47f0 5e30 --taken 4d60 --warps 2

A warp issues in order; an instruction waits for its stall count and for the scoreboards it names (the control bits of
sm_70 to sm_90). Warps of one scheduler take turns; shared memory and shuffles queue up, four schedulers at a time.
Branches are taken if they are unconditional or named with --taken. Latencies of loads and the like are assumed (see
`latency`), so compare stretches with each other, and believe what a GPU says.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from itertools import pairwise

SCOREBOARDS, QUEUE = 6, 20


@dataclass
class Instruction:
    address: int
    text: str
    line: str
    stall: int
    sets: tuple[int, int]  # scoreboards: one set until its result is there, one until its operands are read; 7: none
    waits: list[int]
    labels: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        waits = ",".join(map(str, self.waits)) or "-"
        sets = ",".join("-" if s == 7 else str(s) for s in self.sets)
        return f"{self.address:6x}  stall {self.stall:2}  sets {sets:4} waits {waits:8} {self.line:20} {self.text}"


def parse(path: str) -> list[Instruction]:
    """The instructions of `nvdisasm -hex`, with what their control bits say."""
    found: list[Instruction] = []
    line, labels, current = "", [], None
    with open(path) as file:
        for text in file:
            if match := re.match(r'\s*//## File "([^"]+)", line (\d+)(.*)', text):
                if "inlined" not in match[3]:
                    line = f"{match[1].rsplit('/', 1)[-1]}:{match[2]}"
            elif match := re.match(r"(\.L_x_\d+):", text):
                labels.append(match[1])
            elif match := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/", text):
                current = (int(match[1], 16), match[2])
            elif current and (match := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/", text)):
                control = int(match[1], 16) >> 41
                waits = [i for i in range(SCOREBOARDS) if control >> 11 + i & 1]
                sets = (control >> 5 & 7, control >> 8 & 7)
                found.append(Instruction(*current, line, control & 15, sets, waits, labels))
                labels, current = [], None
    return found


def path_through(program: list[Instruction], start: int, end: int, taken: set[int]) -> list[Instruction]:
    index = {instruction.address: i for i, instruction in enumerate(program)}
    labels = {label: i for i, instruction in enumerate(program) for label in instruction.labels}
    at, path = index[start], list[Instruction]()
    while len(path) < 10_000:
        instruction = program[at]
        path.append(instruction)
        if instruction.address == end:
            return path
        target = re.search(r"\bBRA [^`]*`\((\.L_x_\d+)\)", instruction.text)
        always = not instruction.text.startswith("@")
        at = labels[target[1]] if target and (always or instruction.address in taken) else at + 1
    raise SystemExit(f"{end:x} is not reached from {start:x}: name the branches to take.")


def latency(text: str) -> int:
    kinds = {"LDG": 600, "LDS.128": 34, "LDS": 30, "SHFL": 24, "SYNCS": 22, "MUFU": 24, "LDL": 60, "LDC": 30, "S2": 25}
    if text.startswith("@") and "LDG" in text:
        return 2  # the other path
    return next((clocks for name, clocks in kinds.items() if name in text), 20)


def queued(text: str, shared: float) -> float:
    """Clocks in the queue that all four schedulers share."""
    if "LDS" in text or "STS" in text:
        return max(1.0, (4 if ".128" in text else 2 if ".64" in text else 1) * shared)
    return 1.0 if "SHFL" in text or "SYNCS" in text else 0.0


def play(path: list[Instruction], warps: int, shared: float, times: int = 6) -> list[int]:
    """Clocks from one end of the path to the next, once it repeats."""
    position, ready, busy = [0] * warps, [0] * warps, [[0.0] * SCOREBOARDS for _ in range(warps)]
    ends, queue, last, clock = [], 0.0, 0, 0
    while min(position) < times * len(path):
        for turn in range(1, warps + 1):
            warp = (last + turn) % warps
            if position[warp] == times * len(path) or ready[warp] > clock:
                continue
            now = path[position[warp] % len(path)]
            cost = 4 * queued(now.text, shared)
            if any(busy[warp][s] > clock for s in now.waits) or (cost and queue > clock + QUEUE):
                continue
            begins = max(queue, clock) if cost else clock
            queue = begins + cost if cost else queue
            for scoreboard, until in zip(now.sets, (latency(now.text), 10), strict=True):
                if scoreboard < SCOREBOARDS:
                    busy[warp][scoreboard] = max(busy[warp][scoreboard], begins + until)
            ready[warp], last = clock + max(1, now.stall), warp
            position[warp] += 1
            if warp == 0 and position[0] % len(path) == 0:
                ends.append(clock)
            break
        clock += 1
    return [after - before for before, after in pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("ends", nargs="*", type=lambda text: int(text, 16), help="first and last address")
    parser.add_argument("--taken", nargs="*", default=[], type=lambda text: int(text, 16), help="branches to take")
    parser.add_argument("--warps", type=int, default=2, help="of a scheduler")
    parser.add_argument("--shared", type=float, default=0.25, help="of a full access: 0.25 where lanes read the same")
    arguments = parser.parse_args()
    program = parse(arguments.file)
    if len(arguments.ends) != 2:
        print(*program, sep="\n")
        return
    start, end = arguments.ends
    path = path_through(program, start, end, set(arguments.taken))
    clocks = play(path, arguments.warps, arguments.shared)
    print(f"{len(path)} instructions, {arguments.warps} warps a scheduler: {clocks[-2]} clocks")


if __name__ == "__main__":
    main()
