"""Conversations over HTTP: a turn computes what is new in it, and nothing else, also beside other conversations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import Server, serving, serving_tools

TURNS = 10
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
QUESTIONS = ("What is in the first file?", "And then?", "Compare it with the one before, line by line.")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_tools(tmp_path_factory.mktemp("agents"), "-c", "4096", "--parallel", "3") as server:
        yield server


class Agent:
    """Asks once and then sends what a tool found, again and again; or asks ten questions."""

    def __init__(self, server: Server, name: str, tools: bool) -> None:
        self.server, self.tools = server, tools
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You are {name}. " * 12},
            {"role": "user", "content": QUESTIONS[0]},
        ]
        self.past: list[int] = []  # the last prompt and its answer, as tokens
        self.digits: dict[str, float] = {}

    def tokens(self, text: str) -> list[int]:
        return self.server.ask("/tokenize", {"content": text})[1]["tokens"]

    def turn(self, number: int) -> tuple[int, int]:
        """How many tokens of the prompt came from the cache, and how many had been seen before."""
        body: dict[str, Any] = {"messages": self.messages} | ({"tools": [TOOL]} if self.tools else {})
        prompt = self.tokens(self.server.ask("/apply-template", body)[1]["prompt"])
        if not self.digits:  # they are tokens of their own, so an answer is read as it was written
            self.digits = {str(token): 100.0 for digit in "0123456789" for token in self.tokens(digit)}
        options = {"max_tokens": 9, "logit_bias": self.digits, "temperature": 0}
        answer = self.server.ask("/v1/chat/completions", body | options)[1]
        text = answer["choices"][0]["message"]["content"]
        assert len(text) == 9
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        known = next((i for i, (a, b) in enumerate(zip(self.past, prompt, strict=False)) if a != b), len(self.past))
        self.past = prompt + self.tokens(text)[:-1]  # the last token was decided, and never run
        self.messages.append({"role": "assistant", "content": text})
        said = f"{QUESTIONS[number % 3]} {number}"
        self.messages.append({"role": "tool" if self.tools else "user", "content": said})
        return usage["prompt_tokens_details"]["cached_tokens"], known

    def talk(self) -> None:
        """Turns 2 to 10 compute only what had not been seen."""
        self.turn(0)
        for number in range(1, TURNS):
            cached, known = self.turn(number)
            assert cached == known > 50


@pytest.mark.parametrize("tools", [True, False], ids=["tools", "questions"])
def test_ten_turns(server: Server, tools: bool) -> None:
    Agent(server, f"alone {tools}", tools).talk()


@pytest.mark.parametrize("tools", [True, False], ids=["tools", "questions"])
def test_three_at_a_time(server: Server, tools: bool) -> None:
    problems: list[BaseException] = []

    def talk(name: str) -> None:
        try:
            Agent(server, name, tools).talk()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=talk, args=(f"{name} {tools}",)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_without_memory_for_it_nothing_is_kept(tmp_path: Path) -> None:
    with serving("-c", "512", "--cache-memory", "0") as server:
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 3}
        for _ in range(2):
            usage = server.ask("/v1/chat/completions", body)[1]["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
