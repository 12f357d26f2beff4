"""Stop strings and stats: text is cut at the right place however it arrives, and counts add up."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpsmith.engine.stats import Stats
from warpsmith.engine.text import StopStrings
from warpsmith.errors import BadRequest

letters = st.text("ab\n", max_size=40)


def split(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=200, deadline=None)
@given(letters, st.text("ab\n", min_size=1, max_size=5), st.lists(st.integers(0, 100), max_size=12))
def test_one_stop_string_cuts_where_find_says(text: str, stop: str, cuts: list[int]) -> None:
    strings = StopStrings([stop])
    shown = ""
    for piece in split(text, cuts):
        shown += strings.push(piece)
        assert text.startswith(shown)
        assert stop not in shown
    at = text.find(stop)
    assert shown + strings.finish() == (text if at < 0 else text[:at])
    assert strings.hit == (None if at < 0 else stop)


@settings(max_examples=200, deadline=None)
@given(
    letters, st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4), st.lists(st.integers(0, 100), max_size=12)
)
def test_the_first_stop_string_to_be_complete_cuts_however_the_text_is_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected, hit = text, None
    for end in range(len(text) + 1):  # character by character, the obvious way
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            hit = max(done, key=len)
            expected = text[: end - len(hit)]
            break
    strings = StopStrings(stops)
    shown = "".join(strings.push(piece) for piece in split(text, cuts))
    assert shown + strings.finish() == expected
    assert strings.hit == hit


def test_only_a_possible_beginning_is_held_back() -> None:
    strings = StopStrings(["</tool>", "END"])
    assert strings.push("a < b") == "a < b"
    assert strings.push("a <") == "a "
    assert strings.push("/") == ""
    assert strings.push("p> E") == "</p> "
    assert strings.push("NDLESS") == ""
    assert strings.hit == "END"
    assert strings.push("more") == ""
    assert strings.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty"):
        StopStrings(["a", ""])


def test_stats_add_up() -> None:
    stats = Stats(mode="ngram", prompt_tokens=100, cached_tokens=64, generated_tokens=9, device="cpu")
    stats.prefill_seconds, stats.decode_seconds = 0.5, 2.0
    for drafted, decided in ((7, 1), (7, 4), (7, 3)):
        stats.count_step(drafted, decided)
    assert stats.histogram == [1, 0, 1, 1]
    assert (stats.steps, stats.drafted_tokens, stats.accepted_tokens) == (3, 21, 5)
    assert stats.acceptance_length == pytest.approx(8 / 3)
    assert (stats.prefill_rate, stats.decode_rate) == (72.0, 4.0)
    assert stats.summary() == (
        "prompt 100 tokens, 64 cached (72.0 tok/s) | generated 9 tokens (4.0 tok/s) | ngram, 2.67 tokens a step | cpu"
    )
    as_json = json.loads(json.dumps(stats.to_dict()))
    assert as_json["acceptance_length"] == pytest.approx(8 / 3)
    assert as_json["decode_tokens_per_second"] == 4.0


def test_stats_say_why_there_was_no_speculation_and_survive_nothing_done() -> None:
    stats = Stats(speculation_off="no draft was loaded")
    assert (stats.acceptance_length, stats.prefill_rate, stats.decode_rate) == (0, 0, 0)
    assert "plain (no draft was loaded)" in stats.summary()
