"""The official OpenAI client against the running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

from serving import TEMPLATE, Server, serving_tools
from warpsmith import load
from warpsmith.llm import LLM
from warpsmith.model.chat import render

openai = pytest.importorskip("openai")

QUESTION = [{"role": "user", "content": "Write a function that adds two numbers."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of the next days",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Graz", "Wien"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "exact": {"type": "boolean"},
            },
            "required": ["city", "days", "exact"],
        },
    },
}


class Verdict(BaseModel):
    good: bool
    grade: int = Field(ge=1, le=5)
    word: Literal["yes", "no"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_tools(tmp_path_factory.mktemp("serve"), "-c", "1024") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load(context=1024)


def chat(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="wisp", messages=QUESTION, **options)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["wisp"]
    assert client.models.retrieve("wisp").owned_by == "warpsmith"


def test_an_answer_is_what_the_engine_says(client: Any, llm: LLM) -> None:
    answer = chat(client, max_tokens=24)
    alone = llm.generate(llm.tokenizer.encode(render(TEMPLATE, QUESTION)), max_tokens=24)
    assert answer.choices[0].message.content == alone.text
    assert answer.choices[0].finish_reason == alone.finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == alone.stats.prompt_tokens
    assert answer.timings["predicted_n"] == 24


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}, {"stop": ["return"]}])
def test_a_stream_says_what_the_whole_says(client: Any, options: dict[str, Any]) -> None:
    whole = chat(client, max_tokens=40, **options)
    chunks = list(chat(client, max_tokens=40, stream=True, stream_options={"include_usage": True}, **options))
    said = [choice for chunk in chunks for choice in chunk.choices]
    assert said[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in said) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in said if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    if "stop" in options:
        assert "return" not in whole.choices[0].message.content


def test_several_choices_draw_with_seeds_of_their_own(client: Any) -> None:
    answer = chat(client, max_tokens=12, n=3, temperature=1.2, seed=10)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    assert texts[1] == chat(client, max_tokens=12, temperature=1.2, seed=11).choices[0].message.content
    streamed = ["", "", ""]
    for chunk in chat(client, max_tokens=12, n=3, temperature=1.2, seed=10, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert answer.usage.completion_tokens == 36


def test_probabilities_are_the_models_own(client: Any, llm: LLM) -> None:
    answer = chat(client, max_tokens=6, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    prompt = llm.tokenizer.encode(render(TEMPLATE, QUESTION))
    tokens = llm.generate(prompt, max_tokens=6).token_ids
    rows = llm.score(prompt + tokens)[len(prompt) - 1 :].astype(np.float64)
    for row, token, entry in zip(rows, tokens, entries, strict=False):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert bytes(entry.bytes) == llm.tokenizer.token_bytes(token)
        assert entry.logprob == pytest.approx(expected[token], abs=1e-2)  # a prefill sums in another order
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(sorted(expected)[:-4:-1], abs=1e-2)
        assert entry.top_logprobs[0].token == entry.token
    streamed = [
        entry.token
        for chunk in chat(client, max_tokens=6, logprobs=True, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == [entry.token for entry in entries]


def test_a_bias_bans_a_token(client: Any, llm: LLM) -> None:
    first = llm.generate(llm.tokenizer.encode(render(TEMPLATE, QUESTION)), max_tokens=1).token_ids[0]
    for bias, kept in ({}, True), ({str(first): -100}, False):
        (entry,) = chat(client, max_tokens=1, logit_bias=bias, logprobs=True).choices[0].logprobs.content
        assert (bytes(entry.bytes) == llm.tokenizer.token_bytes(first)) is kept


def test_an_agents_next_turn_computes_only_what_is_new(client: Any) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": "Write a class for a queue. " * 20}]
    for turn in range(3):
        answer = client.chat.completions.create(model="wisp", messages=messages, max_tokens=10)
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached == 0 if turn == 0 else cached > answer.usage.prompt_tokens - 100
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
        messages += [{"role": "user", "content": "Go on."}]


# Tools and formats


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "top_p": 1, "seed": 2, "extra_body": {"top_k": 0}}])
def test_tool_calls_are_typed_and_stream_as_they_come(client: Any, choice: Any, sampling: dict[str, Any]) -> None:
    options = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100, **sampling}
    answer = chat(client, **options)
    (call,) = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert arguments["city"] in ("Graz", "Wien")
    assert arguments["days"] in range(1, 10)
    assert arguments["exact"] in (True, False)

    name = text = ""
    for chunk in chat(client, stream=True, **options):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name += piece.function.name or ""
            text += piece.function.arguments or ""
    assert (name, json.loads(text)) == ("get_weather", arguments)


def test_calls_in_parallel_can_be_turned_off(client: Any) -> None:
    call = r'<tool_call> "\n<function=get_weather>\n</function>\n" </tool_call> "\n"'
    options = {"tools": [WEATHER], "max_tokens": 80, "extra_body": {"grammar": f"start: {call} {call}"}}
    for several in (True, False):
        choice = chat(client, parallel_tool_calls=several, **options).choices[0]
        assert len(choice.message.tool_calls) == 1 + several
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None


def test_results_of_tools_go_back_to_the_model(client: Any) -> None:
    answer = chat(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
    message = answer.choices[0].message
    history = [*QUESTION, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}]
    again = client.chat.completions.create(model="wisp", messages=history, tools=[WEATHER], max_tokens=4)
    assert again.choices[0].finish_reason == "length"
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens + 20


def test_structured_output_fits_its_schema(client: Any) -> None:
    for seed in range(3):
        options = {"temperature": 1.3, "seed": seed, "max_tokens": 200, "extra_body": {"top_k": 0, "top_p": 1}}
        answer = client.chat.completions.parse(model="wisp", messages=QUESTION, response_format=Verdict, **options)
        assert isinstance(answer.choices[0].message.parsed, Verdict)
        assert answer.choices[0].finish_reason == "stop"


def test_grammars_and_expressions(client: Any) -> None:
    for extra in ({"regex": "(ab){2,3}c"}, {"grammar": 'root ::= ("ab" "ab" | "ababab") "c"'}):
        for seed in range(3):
            answer = chat(client, max_tokens=50, temperature=2, seed=seed, extra_body=extra)
            assert answer.choices[0].message.content in ("ababc", "abababc")


def test_thoughts_are_apart_and_end_with_their_budget(client: Any, llm: LLM) -> None:
    opened = llm.tokenizer.token_id("</think>")
    answer = chat(
        client,
        max_tokens=30,
        logit_bias={str(opened): -100},  # it would close the block at once
        extra_body={"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 8},
    )
    message, details = answer.choices[0].message, answer.usage.completion_tokens_details
    assert message.reasoning_content
    assert message.content
    assert "think>" not in message.content + message.reasoning_content
    assert 8 < details.reasoning_tokens < 12
    off = chat(client, max_tokens=5, reasoning_effort="none")
    assert off.usage.completion_tokens_details.reasoning_tokens == 0


# Refusals


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"extra_body": {"mirostat": 2}}, "mirostat"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 99}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"store": True}, "store"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"regex": "a", "ignore_eos": True}}, "ignore_eos"),
        ({"extra_body": {"enable_thinking": True}, "reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, **options)
    assert refusal.value.param.startswith(param)
    assert param in refusal.value.body["message"]


def test_errors_have_openais_shape(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="wisp", messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"
    assert long.value.body["n_ctx"] == 1024
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="text only"):
        client.chat.completions.create(model="wisp", messages=[{"role": "user", "content": [image]}])


def test_a_stream_that_is_closed_is_broken_off(client: Any, server: Server) -> None:
    before = server.metric("requests_total")
    stream = chat(client, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert chat(client, max_tokens=3).usage.completion_tokens == 3  # it does not wait for a thousand tokens
    while server.metric("requests_total") < before + 2:
        pass
    assert server.metric("tokens_predicted_total") < 4000


# The other interfaces


def test_completions(client: Any, llm: LLM) -> None:
    prompt = "def add(a, b):"
    alone = llm.generate(prompt, max_tokens=9)
    whole = client.completions.create(model="wisp", prompt=prompt, max_tokens=9, echo=True)
    assert whole.choices[0].text == prompt + alone.text
    ids = client.completions.create(model="wisp", prompt=llm.tokenizer.encode(prompt), max_tokens=9, logprobs=2)
    assert ids.choices[0].text == alone.text
    assert "".join(ids.choices[0].logprobs.tokens) == alone.text
    assert [len(top) for top in ids.choices[0].logprobs.top_logprobs] == [2] * 9
    stream = client.completions.create(model="wisp", prompt=[prompt, "class"], max_tokens=9, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts[0] == alone.text
    assert client.completions.create(model="wisp", prompt=prompt).usage.completion_tokens <= 16


def test_responses(client: Any, llm: LLM) -> None:
    alone = llm.generate(llm.tokenizer.encode(render(TEMPLATE, QUESTION)), max_tokens=12)
    whole = client.responses.create(model="wisp", input=QUESTION[0]["content"], max_output_tokens=12)
    assert whole.output_text == alone.text
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 12
    with client.responses.stream(model="wisp", input=QUESTION, max_output_tokens=12) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert events[-1].response.output_text == alone.text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    parsed = client.responses.parse(model="wisp", input=QUESTION, text_format=Verdict, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Verdict)


def test_tools_in_responses(client: Any) -> None:
    tool = {"type": "function", **WEATHER["function"]}
    options = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100}
    answer = client.responses.create(model="wisp", input=QUESTION, **options)
    (call,) = answer.output
    assert (call.type, call.name, answer.status) == ("function_call", "get_weather", "completed")
    arguments = ""
    for event in client.responses.create(model="wisp", input=QUESTION, stream=True, **options):
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
    assert json.loads(arguments) == json.loads(call.arguments)
    history = [*QUESTION, call, {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
    assert client.responses.create(model="wisp", input=history, max_output_tokens=3).usage.output_tokens == 3
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="wisp", input="x", previous_response_id=answer.id)


def test_tools_of_a_namespace_keep_their_names(client: Any) -> None:
    function = {"type": "function", **WEATHER["function"]}
    space = {"type": "namespace", "name": "sky", "description": "Of the sky", "tools": [function]}
    choice = {"type": "function", "name": "get_weather", "namespace": "sky"}
    answer = client.responses.create(
        model="wisp", input=QUESTION, tools=[space, function | {"name": "other"}], tool_choice=choice
    )
    (call,) = answer.output
    assert (call.name, call.namespace) == ("get_weather", "sky")
    history = [*QUESTION, call, {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
    again = client.responses.create(model="wisp", input=history, tools=[space], max_output_tokens=3)
    assert again.usage.output_tokens == 3
    with pytest.raises(openai.BadRequestError, match="web_search"):
        client.responses.create(model="wisp", input=QUESTION, tools=[{"type": "web_search"}])


def test_system_messages_reach_the_model_wherever_they_stand(server: Server) -> None:
    messages = [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": "Two."},
        {"role": "user", "content": "Hello."},
        {"role": "system", "content": "Three."},
    ]
    prompt = server.ask("/apply-template", {"messages": messages})[1]["prompt"]
    assert prompt.startswith("<|im_start|>system\nOne.\n\nTwo.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n")
    assert "<|im_start|>user\n<system>\nThree.\n</system><|im_end|>\n" in prompt
