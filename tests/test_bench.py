"""Measuring: the arithmetic on a clock we control, the tests on a real backend, the tables through the real command."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from itertools import accumulate

import pytest

from warpsmith.backend.base import ARGMAX, Snapshot
from warpsmith.backend.reference.backend import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.llm import load
from warpsmith.measure import machine
from warpsmith.measure.speed import PASSES, Case, Result, against_one_node, measure, measure_first, reached
from warpsmith.measure.table import record, table
from warpsmith.measure.units import count, size
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import tiny_model

# the keys of llama-bench's JSON that other tools read
KEYS = {
    "build_commit", "cpu_info", "gpu_info", "backends", "n_threads", "model_filename", "model_type", "model_size",
    "model_n_params", "n_prompt", "n_gen", "n_depth", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns",
}  # fmt: skip
FACTS = {
    "model_type": "qwen35 27B Q4_K_M",
    "model_size": 16_536_406_016,
    "model_n_params": 26_895_998_464,
    "backends": "cuda",
    "n_threads": 8,
}


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warpsmith.cli", "bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_names_are_llama_bench_s() -> None:
    assert Case(512, 0).name == "pp512"
    assert Case(0, 128, 4096).name == "tg128 @ d4096"
    assert Case(512, 128).name == "pp512+tg128"


def test_statistics_of_known_samples() -> None:
    result = Result(Case(100, 0), [1_000_000_000, 2_000_000_000, 4_000_000_000])
    assert result.samples_ts == [100, 50, 25]
    assert result.avg_ns == pytest.approx(7e9 / 3)
    assert result.stddev_ns == pytest.approx(1.5275252e9)
    assert result.avg_ts == pytest.approx(175 / 3)
    assert result.stddev_ts == pytest.approx(38.188131)
    assert result.median_ts == 50
    assert Result(Case(0, 1), [5]).stddev_ns == 0


def test_only_the_repetitions_are_timed() -> None:
    checkpoint = tiny_model()
    backend = ReferenceBackend(SIZES["tiny"], checkpoint.tensors)
    steps = [0, 7, 100, 9, 100, 8]  # time passes inside and between the repetitions
    clock = iter(accumulate(steps)).__next__
    assert measure(backend, Case(5, 0, 3), 3, clock).samples_ns == [7, 9, 8]
    with pytest.raises(StopIteration):
        clock()  # two readings a repetition, none for the warm-up


def test_every_repetition_does_the_whole_test_from_the_same_depth() -> None:
    class Counting(ReferenceBackend):
        """The reference backend, with a note of the state's length at each call."""

        def prefill(self, state, ids, want=None):  # type: ignore[no-untyped-def]
            calls.append(("prefill", state.length, len(ids)))
            return super().prefill(state, ids) if want is None else super().prefill(state, ids, want)

        def decode(self, state, token, count, *rest):  # type: ignore[no-untyped-def]
            calls.append(("decode", state.length, count))
            return super().decode(state, token, count, *rest)

    calls: list[tuple[str, int, int]] = []
    backend = Counting(SIZES["tiny"], tiny_model().tensors)
    measure(backend, Case(4, 3, 6), 2)
    warm, timed = [("prefill", 6, 4), ("decode", 10, 1)], [("prefill", 6, 4), ("decode", 10, 3)]
    assert calls == [("prefill", 0, 6), *warm, *timed, *timed]
    calls.clear()
    pasts: dict[int, Snapshot] = {}
    for depth in (6, 6, 5):  # a past that another test was on is not read again
        measure(backend, Case(0, 1, depth), 1, pasts=pasts)
    decoded = [[("decode", depth, 1)] * 2 for depth in (6, 6, 5)]
    assert calls == [("prefill", 0, 6), *decoded[0], *decoded[1], ("prefill", 0, 5), *decoded[2]]
    assert list(pasts) == [5]


def test_quantised_caches_are_named_in_the_table() -> None:
    rows = [record(Result(Case(0, 128), [10**9]), FACTS | {"type_k": "q8_0", "type_v": "f16"})]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(rows, "md").splitlines()]
    assert cells[0][5:7] == ["type_k", "type_v"]
    assert cells[2][5:7] == ["q8_0", "f16"]


def test_a_first_token_is_timed_from_the_call_to_the_token() -> None:
    with load(context=64, device="cpu", draft=None) as llm:
        steps = [100, 5, 100, 7, 100, 6]  # time passes inside and between the calls; the first one warms up
        clock = iter(accumulate(steps)).__next__
        result = measure_first(llm, Case(7, 0, first=True), 2, clock)
    assert result.samples_ns == [7, 6]
    assert record(result, FACTS)["first_token_ms"] == 6.5e-6


def test_the_table_is_llama_bench_s() -> None:
    rows = [
        record(Result(Case(512, 0), [10**9] * 2), FACTS),
        record(Result(Case(0, 128, 4096), [10**9, 2 * 10**9]), FACTS),
    ]
    lines = table(rows, "md").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["model", "size", "params", "backend", "threads", "test", "t/s", "median"]
    assert cells[2] == ["qwen35 27B Q4_K_M", "15.40 GiB", "26.90 B", "cuda", "8", "pp512", "512.00 ± 0.00", "512.00"]
    assert cells[3][5:] == ["tg128 @ d4096", "96.00 ± 45.25", "96.00"]
    assert len({len(line) for line in lines}) == 1


def test_what_a_pass_reaches_of_the_bandwidth() -> None:
    class Counting(ReferenceBackend):
        def bytes_a_token(self, length: int) -> int:
            return 1000 + length

    backend = Counting(SIZES["tiny"], tiny_model().tensors)
    second = 10**9
    assert reached(Result(Case(0, 4, 98), [second]), backend, 8800) == pytest.approx(0.5)  # 4 passes of 1100 bytes
    assert reached(Result(Case(0, 0, 100, 22), [second]), backend, 1100 * PASSES * 4) == pytest.approx(0.25)
    assert reached(Result(Case(512, 0), [second]), backend, 1e9) is None
    assert reached(Result(Case(0, 4), [second]), ReferenceBackend(SIZES["tiny"], backend.tensors), 1e9) is None


def test_trees_are_compared_with_one_node_at_their_depth() -> None:
    times = {Case(0, 0, 0, 1): 10, Case(0, 0, 0, 22): 15, Case(0, 0, 7, 1): 20, Case(0, 0, 7, 22): 40, Case(0, 9): 5}
    results = [Result(test, [time]) for test, time in times.items()]
    assert [against_one_node(r, results) for r in results[:4]] == pytest.approx([1.0, 1.5, 1.0, 2.0])
    assert against_one_node(results[4], results) is None
    assert [r.test.name for r in results] == ["tree1", "tree22", "tree1 @ d7", "tree22 @ d7", "tg9"]
    assert results[1].samples_ts == [22 * PASSES * 1e9 / 15]


def test_every_pass_of_a_tree_starts_from_the_same_state() -> None:
    class Counting(ReferenceBackend):
        def forward(self, batch, want=ARGMAX):  # type: ignore[no-untyped-def]
            ((state, tree),) = batch
            calls.append((state.length, len(tree)))
            return super().forward(batch, want)

    calls: list[tuple[int, int]] = []
    result = measure(Counting(SIZES["tiny"], tiny_model().tensors), Case(0, 0, 6, 5), 2)
    assert calls == [(6, 5)] * (1 + 2 * PASSES)
    assert len(result.samples_ns) == 2


def test_sequences_side_by_side_all_make_a_token_in_every_pass() -> None:
    class Counting(ReferenceBackend):
        def forward(self, batch, want=ARGMAX):  # type: ignore[no-untyped-def]
            calls.append(([state.length for state, _ in batch], want.tokens))
            return super().forward(batch, want)

    calls: list[tuple[list[int], str]] = []
    backend = Counting(SIZES["tiny"], tiny_model().tensors)
    for sampling, tokens in ((None, "argmax"), (Sampling(temperature=1.0), "logits")):
        calls.clear()
        result = measure(backend, Case(0, 2, 5, sampling=sampling, sequences=3), 2)
        assert calls == [([5] * 3, tokens), *[([5] * 3, tokens), ([6] * 3, tokens)] * 2]
        assert result.samples_ts == [2 * 3 * 1e9 / ns for ns in result.samples_ns]
    assert result.test.name == "tg2 x 3 sampled @ d5"
    assert reached(result, backend, 1e9) is None
    lines = table([record(Result(Case(0, 2, sequences=n), [10**9]), FACTS) for n in (1, 4)], "md").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[5:7] for row in (cells[0], *cells[2:])] == [["sequences", "test"], ["1", "tg2"], ["4", "tg2 x 4"]]
    assert [row[8] for row in cells[2:]] == ["2.00", "8.00"]


def test_units() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 << 20, 5 << 30)] == ["0 B", "1023 B", "1.00 KiB", "3.00 MiB", "5.00 GiB"]
    assert [count(n) for n in (7, 1_500, 20_452_864, 26_895_998_464)] == ["7", "1.50 K", "20.45 M", "26.90 B"]


def test_the_command_in_every_format() -> None:
    results = {
        format: bench("-p", "8", "-n", "2,3", "-d", "0,4", "-r", "2", "-o", format) for format in ("json", "csv")
    }
    for result in results.values():
        assert result.returncode == 0, result.stderr
    records = json.loads(results["json"].stdout)
    assert [r["test"] for r in records] == ["pp8", "pp8 @ d4", "tg2", "tg3", "tg2 @ d4", "tg3 @ d4"]
    for r in records:
        assert r.keys() >= KEYS
        assert len(r["samples_ns"]) == 2
        assert r["avg_ts"] > 0
    assert records[0]["model_type"] == "qwen35 wisp Q8_0"
    rows = list(csv.DictReader(io.StringIO(results["csv"].stdout)))
    assert [row["test"] for row in rows] == [r["test"] for r in records]

    result = bench("-p", "4", "-n", "2", "-r", "1", "--tree", "3", "--bandwidth", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines()]
    assert [cells[0][8], *(row[5] for row in cells[2:])] == ["x one node", "pp4", "tg2", "tree1", "tree3"]
    assert cells[0][9].endswith(" GB/s")
    assert [row[8] for row in cells[2:5]] == ["", "", "1.00"]
    assert cells[2][9] == ""
    assert all(row[9].endswith("%") for row in cells[3:])

    sampled = ["--temp", "0.8", "--top-k", "20", "--repeat-penalty", "1.1"]
    result = bench("-p", "0", "-n", "3", "-d", "0,4", "-r", "1", "-o", "json", *sampled)
    assert result.returncode == 0, result.stderr
    records = json.loads(result.stdout)
    assert [r["test"] for r in records] == ["tg3", "tg3 sampled", "tg3 @ d4", "tg3 sampled @ d4"]
    assert records[0]["sampling"] is None
    assert (records[1]["sampling"]["temperature"], records[1]["sampling"]["top_k"]) == (0.8, 20)

    result = bench("-p", "0", "-n", "2", "-b", "1,4", "-r", "1", "-o", "json", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert [(r["test"], r["n_seq"]) for r in json.loads(result.stdout)] == [("tg2", 1), ("tg2 x 4", 4)]

    result = bench("-p", "4", "-n", "0", "-r", "2", "--first", "6,9", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in result.stdout.splitlines()]
    assert cells[0][8] == "first token, ms"
    assert [row[5] for row in cells[2:]] == ["pp4", "first6", "first9"]
    assert cells[2][8] == ""
    assert all(float(row[8]) > 0 for row in cells[3:])

    lines = bench("-p", "4", "-n", "0", "-r", "1", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["n_prompt"] for line in lines] == [4]
    assert bench("-p", "4", "-n", "0", "-r", "1").stdout.startswith("| model")


@pytest.mark.parametrize(
    "flags",
    [
        ["-p", "0", "-n", "0"],
        ["-p", "-4"],
        ["-r", "0"],
        ["-o", "xml"],
        ["-p", "x"],
        ["--tree", "65"],
        ["-b", "65"],
        ["--top-p", "2"],
        ["-p", "8", "-n", "0", "-c", "4"],
    ],
)
def test_nonsense_is_a_usage_error(flags: list[str]) -> None:
    result = bench(*flags)
    assert result.returncode == 2
    assert not result.stdout


def test_facts_about_the_machine() -> None:
    assert machine.usable_cores() >= 1
    assert machine.cpu_model()
    memory = machine.memory()
    assert not memory or 0 < memory["available"] <= memory["total"]
    assert machine.package_version("numpy")
    assert machine.package_version("no-such-package-anywhere") is None
