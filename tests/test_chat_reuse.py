"""A conversation pays for its new turn only: what is reused, asserted from the stats."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from warpsmith.backend.devices import backend_for
from warpsmith.checkpoint.canonical import Checkpoint
from warpsmith.engine.prefix import common_prefix
from warpsmith.engine.stats import Stats
from warpsmith.llm import LLM
from warpsmith.model.synthetic import tiny_model
from warpsmith.model.weights import read_config

TINY = tiny_model()
PLAIN = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""  # renders an answer as it was generated


def open_tiny(template: str | None, device: str = "cpu") -> LLM:
    checkpoint: Checkpoint = dataclasses.replace(TINY, chat_template=template)
    return LLM(backend_for(device, checkpoint, read_config(checkpoint)), checkpoint, 1024)


class Chat:
    """Messages and what was computed for each question."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm, self.messages, self.ids = llm, [{"role": "system", "content": f"You are {name}."}], [0]

    def ask(self, question: str) -> tuple[list[int], Stats, str]:
        """Returns the prompt, its stats and the answer, of letters that tokenise as they were generated."""
        self.messages.append({"role": "user", "content": question})
        letters: dict[int, float] = dict.fromkeys(self.llm.tokenizer.encode("abcdefghijklmnopqrstuvwxyz"), 100.0)
        completion = self.llm.generate(self.messages, max_tokens=9, logit_bias=letters, temperature=0)
        prompt, _ = self.llm._ids(self.messages, None, None)
        self.messages.append({"role": "assistant", "content": completion.text})
        assert completion.text.isalpha()
        return prompt, completion.stats, completion.text


QUESTIONS = ("Hello!", "And what is the time in all the other cities of this country?", "Why?", "Go on, and on.", "Bye")


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_template_that_drops_thoughts_costs_the_last_answer_and_the_question(device: str) -> None:
    """The prompt ended in an empty thought that the next one leaves out: all before it is reused."""
    step = 64 if device == "reference" else 1
    with open_tiny(None, device) as llm:
        chat, before = Chat(llm, "brief"), [0]
        for question in QUESTIONS:
            prompt, stats, _ = chat.ask(question)
            shared = common_prefix(before, prompt)
            assert stats.prompt_tokens == len(prompt)
            assert stats.cached_tokens == shared - shared % step
            before = prompt
        assert llm.tokenizer.decode(before).count("<think>") == 1


def test_a_template_that_keeps_answers_costs_the_question_only() -> None:
    with open_tiny(PLAIN) as llm:
        chat, past = Chat(llm, "brief"), [0]
        for question in QUESTIONS:
            prompt, stats, answer = chat.ask(question)
            assert stats.cached_tokens == max(0, len(past) - 1), "all but the last token, which was never run"
            past = prompt + llm.tokenizer.encode(answer)
            assert common_prefix(past, prompt) == len(prompt)


@pytest.mark.parametrize("template", [None, PLAIN], ids=["drops thoughts", "keeps answers"])
def test_two_conversations_by_turns_find_their_own_past(template: str | None) -> None:
    with open_tiny(template) as llm, open_tiny(template) as alone:
        chats = [Chat(llm, "brief"), Chat(llm, "a poet of few words")]
        lonely = [Chat(alone, "brief"), Chat(alone, "a poet of few words")]
        answers: list[list[Any]] = [[], []]
        for question in QUESTIONS[:3]:
            for number, chat in enumerate(chats):
                _, stats, answer = chat.ask(question)
                answers[number].append((stats.cached_tokens, answer))
        for number, chat in enumerate(lonely):
            expected = [(stats.cached_tokens, text) for _, stats, text in map(chat.ask, QUESTIONS[:3])]
            # what both begin with may be found too where the other had been: the first turn reuses that
            assert answers[number][1:] == expected[1:]
            assert answers[number][0][1] == expected[0][1]


def test_asking_again_costs_as_good_as_nothing() -> None:
    with open_tiny(PLAIN) as llm:
        chat = Chat(llm, "brief")
        chat.ask(QUESTIONS[0])
        prompt, _, first = chat.ask(QUESTIONS[1])
        del chat.messages[-2:]
        _, stats, second = chat.ask(QUESTIONS[1])
        assert second == first
        assert stats.cached_tokens == len(prompt) - 1
