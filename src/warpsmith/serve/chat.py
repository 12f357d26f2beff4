"""POST /v1/chat/completions, as OpenAI has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from warpsmith.model.tokenizer import Tokenizer
from warpsmith.serve.answer import CallArguments, CallStart, Content, Part, Reasoning
from warpsmith.serve.calls import required_calls, schemas
from warpsmith.serve.choice import Choice, timings, usage
from warpsmith.serve.constraints import Grammar
from warpsmith.serve.errors import api_error, refused
from warpsmith.serve.http import EventStream, json_response, parse, sse, unless_gone
from warpsmith.serve.job import Job, Logprob, Run
from warpsmith.serve.models import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOOLS,
    FormatFields,
    Harmless,
    Loose,
    MaxTokens,
    Off,
    SamplerFields,
    StreamOptions,
    TextOnly,
    Tool,
)
from warpsmith.serve.service import Service, events, identifier, sampler_fields
from warpsmith.serve.thinking import ThinkingFields, thinking_of


class TextPart(Loose):
    type: Literal["text"]
    text: str


class CalledFunction(Loose):
    name: str
    arguments: str = "{}"


class ToolCall(Loose):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Loose):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, TextOnly] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class NamedFunction(Loose):
    name: str


class NamedTool(Loose):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplerFields, FormatFields, ThinkingFields, Harmless):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    store: Off = None
    modalities: list[Literal["text"]] | None = None
    return_steps: bool | None = None  # of speculation: tokens drafted and decided, step by step


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them."""
    plain = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        entry: dict[str, Any] = {"role": message.role, "content": content or ""}
        if message.role == "developer":
            entry["role"] = "system"
        if thoughts := message.reasoning_content or message.reasoning:
            entry["reasoning_content"] = thoughts
        if message.tool_calls:
            entry["tool_calls"] = [
                {"function": {"name": call.function.name, "arguments": call.function.arguments}}
                for call in message.tool_calls
            ]
        plain.append(entry)
    return plain


async def tool_grammar(service: Service, tools: list[dict[str, Any]], name: str | None, several: bool) -> Grammar:
    """For a `tool_choice` that demands a call: of this tool, or of any."""
    chosen = [tool for tool in tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise refused(
            "tool_choice", f"tool_choice demands {name!r}, which is not among the tools.", "Name one of them."
        )
    return await asyncio.to_thread(required_calls, service.grammars, chosen, several)


async def prepare(service: Service, body: ChatRequest) -> tuple[list[Choice], list[Job]]:
    """Everything that can be refused is refused here; then the jobs are in the queue."""
    service.check_model(body.model)
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise refused("max_tokens", "max_tokens and max_completion_tokens differ.", "Send one of them.")
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "top_logprobs needs logprobs: true.", "Send both.")
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "stream_options needs stream: true.", "Send both.")
    thinking, budget, variables = thinking_of(body)
    tools = [tool.model_dump(exclude_none=True, include={"type", "function"}) for tool in body.tools or ()]
    grammar = await service.format(body)
    if body.tool_choice == "none":
        tools = []
    elif body.tool_choice not in (None, "auto"):
        if grammar is not None:
            raise refused(
                "tool_choice", "An answer cannot be a tool call and fit response_format.", "Send one of them."
            )
        name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        grammar = await tool_grammar(service, tools, name, body.parallel_tool_calls is not False and name is None)
    if grammar is not None and body.ignore_eos:
        raise refused("ignore_eos", "ignore_eos would let an answer go on that has to fit something.")
    prompt = await service.chat_prompt(template_messages(body.messages), tools, thinking, variables)
    constraint = await service.constraint(prompt, grammar, budget)
    requests = [
        service.request(
            prompt,
            sampler_fields(body, choice),
            max_tokens=body.max_completion_tokens or body.max_tokens,
            stop=body.stop,
            ignore_eos=bool(body.ignore_eos),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            constraint=constraint,
            one_call=bool(tools) and body.parallel_tool_calls is False,
        )
        for choice in range(body.n or 1)
    ]
    tokenizer, raw = service.llm.tokenizer, body.reasoning_format == "none"
    choices = [Choice(tokenizer, prompt.thinking, schemas(tools), raw) for _ in requests]
    return choices, service.worker.submit(requests)


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await parse(request, ChatRequest)
    choices, jobs = await prepare(service, body)
    head = {
        "id": identifier("chatcmpl-"),
        "created": int(time.time()),
        "model": service.names[0],
        "system_fingerprint": service.fingerprint,
    }
    if body.stream:
        return EventStream(_stream(body, head, choices, jobs), jobs)
    return json_response(await unless_gone(request, _whole(body, head, choices, jobs)))


async def _whole(body: ChatRequest, head: dict[str, Any], choices: list[Choice], jobs: list[Job]) -> dict[str, Any]:
    async for news in events(jobs):
        if news is not None:
            choices[news[0]].feed(news[1])
    return {
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": logprobs(choice.tokenizer, choice.logprobs) if body.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage(choices),
        "timings": timings(choices[0].stats),
    }


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content or (None if choice.calls else "")}
    message["refusal"] = None
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": identifier("call_"), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in choice.calls
        ]
    return message


async def _stream(
    body: ChatRequest, head: dict[str, Any], choices: list[Choice], jobs: list[Job]
) -> AsyncIterator[str]:
    head, last = {**head, "object": "chat.completion.chunk"}, ""
    with_usage = body.stream_options is not None and body.stream_options.include_usage

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        entry = {"index": index, "delta": delta, "logprobs": more.pop("logprobs", None), "finish_reason": finish}
        return sse({**head, "choices": [entry], **({"usage": None} if with_usage else {}), **more})

    try:
        for index in range(len(choices)):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for news in events(jobs):
            if news is None:
                yield ": keep-alive\n\n" + chunk(0, {})
                continue
            index, event = news
            choice = choices[index]
            parts = choice.feed(event)
            more: dict[str, Any] = {}
            if isinstance(event, Run):
                if body.logprobs:
                    more["logprobs"] = logprobs(choice.tokenizer, event.logprobs)
                if body.return_steps:
                    more["steps"] = [{"drafted": drafted, "decided": decided} for drafted, decided in event.steps]
            for delta in _deltas(parts) or ([{}] if more else []):
                yield chunk(index, delta, **more)
                more = {}
            if choice.end is event:
                last += chunk(index, {}, choice.finish_reason, timings=timings(choice.stats))
                if not all(each.end for each in choices):
                    yield last
                    last = ""
        if with_usage:
            last += sse({**head, "choices": [], "usage": usage(choices), "timings": timings(choices[0].stats)})
        yield last + sse("[DONE]")  # at once: every chunk that is sent costs the model time
    except Exception as error:
        yield sse(api_error(error).openai())


def _deltas(parts: list[Part]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Reasoning):
            deltas.append({"reasoning_content": part.text})
        elif isinstance(part, Content):
            deltas.append({"content": part.text})
        elif isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": identifier("call_"), "type": "function", "function": function}
            deltas.append({"tool_calls": [call]})
        elif isinstance(part, CallArguments):
            deltas.append({"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]})
    return deltas


def logprobs(tokenizer: Tokenizer, tokens: list[Logprob]) -> dict[str, Any]:
    """One entry a generated token, thoughts and end tokens included."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            entry(item.token, item.logprob) | {"top_logprobs": [entry(*rival) for rival in item.top]} for item in tokens
        ],
        "refusal": None,
    }
