"""The official Anthropic client against the running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving import TEMPLATE, Server, serving_tools
from warpsmith import load
from warpsmith.llm import LLM
from warpsmith.model.chat import render
from warpsmith.serve.answer import CallArguments, CallEnd, CallStart, Content, Reasoning
from warpsmith.serve.messages import Blocks

anthropic = pytest.importorskip("anthropic")

QUESTION = [{"role": "user", "content": "Write a function that adds two numbers."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of the next days",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Graz", "Wien"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_tools(tmp_path_factory.mktemp("serve"), "-c", "1024", "--api-key", "secret") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load(context=1024)


def ask(client: Any, **options: Any) -> Any:
    return client.messages.create(**({"model": "wisp", "messages": QUESTION, "max_tokens": 24} | options))


def test_an_answer_is_what_the_engine_says(client: Any, llm: LLM) -> None:
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    prompt = llm.tokenizer.encode(render(TEMPLATE, [{"role": "system", "content": "Be short."}, *QUESTION]))
    alone = llm.generate(prompt, max_tokens=24)
    answer = ask(client, system=system)
    assert answer.content[0].text == alone.text
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 24)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(prompt)
    counted = client.messages.count_tokens(model="wisp", messages=QUESTION, system=system)
    assert counted.input_tokens == len(prompt)


def test_a_stream_says_what_the_whole_says(client: Any) -> None:
    whole = ask(client, extra_body={"temperature": 0})
    with client.messages.stream(
        model="wisp", messages=QUESTION, max_tokens=24, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 24)
    events = [event.type for event in ask(client, stream=True)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named(client: Any) -> None:
    answer = ask(client, max_tokens=100, stop_sequences=["return", "\n"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "\n")
    assert "\n" not in answer.content[0].text


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}]
)
def test_tool_use(client: Any, choice: dict[str, Any]) -> None:
    options = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 100}
    answer = ask(client, **options)
    (block,) = answer.content
    assert (block.type, block.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert block.input["city"] in ("Graz", "Wien")
    assert isinstance(block.input["days"], int)
    with client.messages.stream(model="wisp", messages=QUESTION, **options) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (block.name, block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "Rain."}]}
    history = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    again = ask(client, messages=history, tools=[WEATHER], max_tokens=3)
    assert again.usage.output_tokens == 3


def test_thoughts_are_blocks_of_their_own(client: Any) -> None:
    answer = ask(client, thinking={"type": "enabled", "budget_tokens": 6}, max_tokens=40)
    assert all("think>" not in getattr(block, "text", "") for block in answer.content)
    assert answer.content[-1].text
    blocks = Blocks()
    parts = [
        Reasoning("I "),
        Reasoning("think."),
        Content("So:"),
        CallStart(0, "get"),
        CallArguments(0, "{}"),
        CallEnd(0),
    ]
    events = [json.loads(line.partition("data: ")[2]) for part in parts for line in blocks.show(part)]
    assert [event.get("content_block", event.get("delta", {})).get("type") for event in events] == [
        *("thinking", "thinking_delta", "thinking_delta", None),
        *("text", "text_delta", None),
        *("tool_use", "input_json_delta", None),
    ]
    assert [event["index"] for event in events] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_errors_have_anthropics_shape(client: Any, server: Server) -> None:
    with pytest.raises(anthropic.BadRequestError) as refusal:
        ask(client, extra_body={"mirostat": 2})
    assert refusal.value.body["type"] == "error"
    assert refusal.value.body["error"]["type"] == "invalid_request_error"
    assert "mirostat" in refusal.value.body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="claude-9")
    with pytest.raises(anthropic.AuthenticationError):
        ask(anthropic.Anthropic(base_url=server.url, api_key="guess", max_retries=0))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        ask(client, messages=[{"role": "user", "content": [image]}])
