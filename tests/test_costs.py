"""What a forward, a token and a guess cost on this machine: measured once, by a clock that the tests decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from random_models import SMALL, random_tensors
from warpsmith.backend.base import ARGMAX, Batch, Output, Want
from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.cpu.backend import CacheType
from warpsmith.backend.reference import ReferenceBackend, ReferenceState
from warpsmith.draft import costs as costs_module
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.draft.costs import ROUNDS, SIZES, Costs, Measured, costs_of, measure, plain_seconds, tokens_of_a_guess
from warpsmith.draft.economy import best_size
from warpsmith.errors import DoesNotFit

BACKEND = ReferenceBackend(SMALL, random_tensors(SMALL))


class Clock:
    """Forwards of n nodes take n milliseconds. The first of a size takes longer, and one round is disturbed."""

    def __init__(self, slow: float = 1.0, first: float = 3.0) -> None:
        self.now, self.slow, self.first = 0.0, slow, first
        self.sizes: list[int] = []

    def __call__(self) -> float:
        return self.now

    def backend(self) -> ReferenceBackend:
        clock = self

        class Timed(ReferenceBackend):
            def forward(self, batch: Batch, want: Want = ARGMAX) -> Output:
                ((_, tree),) = batch
                if want.hidden:  # not a plain token
                    clock.sizes += [len(tree)]
                factor = clock.first if len(tree) not in clock.sizes[:-1] else 2.0 if len(clock.sizes) > 40 else 1.0
                clock.now += len(tree) * 0.001 * clock.slow * (factor if want.hidden else 0.9)
                return super().forward(batch, want)

        return Timed(SMALL, BACKEND.tensors)

    def measure(self) -> Measured:
        return measure(self.backend(), Want(tokens="none", hidden=True), self)


def test_sizes_take_turns_and_the_least_disturbed_counts() -> None:
    clock = Clock()
    measured = clock.measure()
    assert measured.seconds == pytest.approx({size: 0.001 * size for size in SIZES})
    assert measured.plain == pytest.approx(0.0009)
    assert measured.settled
    once = [size for size in SIZES for _ in range(2)]
    assert clock.sizes == once + list(SIZES) * (ROUNDS - 1), "the first of a size does not count"


def test_a_slow_machine_is_asked_for_little() -> None:
    clock = Clock(slow=300)
    measured = clock.measure()
    assert list(measured.seconds) == [1, 2], "then its patience was over"
    assert measured.seconds == pytest.approx({1: 0.3, 2: 0.6})
    assert measured.settled, "it will be no faster the next time"
    assert Costs.between(measured.seconds).seconds[63] == pytest.approx(0.3 * 64)


def test_a_device_that_had_to_be_made_ready_is_measured_again_the_next_time() -> None:
    clock = Clock(first=3000)
    measured = clock.measure()
    assert list(measured.seconds) == [1]
    assert not measured.settled
    assert best_size([0.9] * 30, Costs.between(measured.seconds).seconds, 0)[0] == 0, "until then nodes are dear"


def test_costs_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Want] = []

    def counted(backend: ReferenceBackend, wants: Want) -> Measured:
        calls.append(wants)
        return Measured({1: 0.5, 64: 2.0}, 0.4, settled=not wants.hidden)

    monkeypatch.setattr(costs_module, "measure", counted)
    plain, features = Want(tokens="none"), Want(tokens="none", features=(1,))
    first = costs_of(BACKEND, plain, tmp_path)
    assert costs_of(BACKEND, plain, tmp_path) == first == Costs.between({1: 0.5, 64: 2.0}, 0.4)
    assert len(calls) == 1
    costs_of(BACKEND, features, tmp_path)
    assert calls == [plain, features]
    for file in tmp_path.iterdir():
        assert json.loads(file.read_text())["device"] == "reference"
        file.write_text("{")
    assert costs_of(BACKEND, plain, tmp_path) == first
    assert len(calls) == 3
    for _ in range(2):
        costs_of(BACKEND, Want(tokens="none", hidden=True), tmp_path)
    assert len(calls) == 5, "what was not settled is not kept"


def test_what_speed_depends_on_has_its_own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_module, "measure", lambda backend, wants: Measured({1: 0.5, 64: 2.0}, 0.4, True))
    types: list[CacheType] = ["f16", "q8_0"]
    backends = [CpuBackend(SMALL, BACKEND.tensors, threads=n, cache_type_k=kind) for n in (1, 2) for kind in types]
    for backend in (BACKEND, *backends, *backends):
        costs_of(backend, Want(tokens="none"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
    assert backends[1].settings["type_k"] == "q8_0"
    assert "F32" in str(backends[0].settings["weight_types"])


def test_costs_from_a_busy_time_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [Measured({1: 5.0, 64: 9.0}, 5.0, True), Measured({1: 1.0, 64: 2.0}, 1.0, True)]
    now = [4.0, 1.0, 0.9]  # seconds of a token when it is looked at again
    monkeypatch.setattr(costs_module, "measure", lambda backend, wants: results.pop(0))
    monkeypatch.setattr(costs_module, "plain_seconds", lambda backend: now.pop(0))
    monkeypatch.setattr(costs_module, "SLOW", 100.0)
    plain = [costs_of(BACKEND, Want("none"), tmp_path).plain for _ in range(4)]
    assert plain == [5.0, 5.0, 1.0, 1.0]
    monkeypatch.setattr(costs_module, "SLOW", 0.5)
    assert costs_of(BACKEND, Want("none"), tmp_path).plain == 1.0, "a slow model is not made to wait for that"
    assert (now, results) == ([], [])


def test_a_quick_look_at_plain_decoding() -> None:
    clock = Clock()
    assert plain_seconds(clock.backend(), clock) == pytest.approx(0.0009)


def test_a_guess_is_measured_in_tokens() -> None:
    clock = Clock()

    class Slow(Draft):
        name, calls = "slow", 0

        def propose(self, memory: Any, context: Context) -> ScoredTree | None:
            assert context.depth == 1
            self.calls += 1
            clock.now += 0.0027 if self.calls > 1 else 5.0
            return None

    assert tokens_of_a_guess(Slow(), clock.backend(), clock) == pytest.approx(3.0)


def test_without_room_to_measure_nothing_is_kept_and_nodes_are_dear(tmp_path: Path) -> None:
    class Cramped(ReferenceBackend):
        def new_state(self, context: int) -> ReferenceState:
            raise DoesNotFit("No room.")

    costs = costs_of(Cramped(SMALL, BACKEND.tensors), Want(tokens="none"), tmp_path)
    assert best_size([0.9] * 30, costs.seconds, 0)[0] == 0
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_module, "measure", lambda backend, wants: Measured({1: 1.0, 64: 2.0}, 1.0, True))
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert costs_of(BACKEND, Want(tokens="none"), blocked / "below").seconds[0] == 1.0


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"seconds": {}, "plain": 1}',
        '{"seconds": {"1": NaN}, "plain": 1}',
        '{"seconds": {"1": 1, "64": Infinity}, "plain": 1}',
        '{"seconds": {"1": -1}, "plain": 1}',
        '{"seconds": {"1": 1}, "plain": 0}',
        '{"seconds": {"1": 1}, "plain": null}',
        '{"seconds": {"1": 1, "9999": 1}, "plain": 1}',
        '{"seconds": {"2": 1}, "plain": 1}',
        '{"seconds": {"1": 1' + "0" * 400 + '}, "plain": 1}',
        '{"seconds": {"1": ' + "1" * 5000 + '}, "plain": 1}',
    ],
)
def test_a_damaged_record_is_replaced(record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_module, "measure", lambda backend, wants: Measured({1: 1.0, 64: 2.0}, 1.0, True))
    costs_of(BACKEND, Want(tokens="none"), tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_text()
    path.write_text(record)
    assert costs_of(BACKEND, Want(tokens="none"), tmp_path).plain == 1.0
    assert path.read_text() == good
