"""POST /v1/responses, as OpenAI has it; nothing is stored, so a conversation is sent whole each time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from warpsmith.backend.sampling import Sampling
from warpsmith.serve.calls import schemas
from warpsmith.serve.chat import tool_grammar
from warpsmith.serve.choice import Choice
from warpsmith.serve.constraints import Grammar
from warpsmith.serve.errors import api_error, refused
from warpsmith.serve.http import EventStream, json_response, parse, unless_gone
from warpsmith.serve.job import Job
from warpsmith.serve.models import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Effort,
    FormatFields,
    Fraction,
    FunctionDefinition,
    Harmless,
    Json,
    JsonSchemaFormat,
    Loose,
    MaxTokens,
    Off,
    ResponseFormat,
    StreamOptions,
    Strict,
    Temperature,
    TextOnly,
)
from warpsmith.serve.response_items import Result, Writer, status
from warpsmith.serve.service import Service, events, identifier
from warpsmith.serve.thinking import ThinkingFields, thinking_of


class TextPart(Loose):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


Parts = Annotated[str | list[TextPart], TextOnly]


class MessageItem(Loose):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts


class CallItem(Loose):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class ResultItem(Loose):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(Loose):
    type: Literal["reasoning"]
    content: list[TextPart] | None = None


class FunctionTool(FunctionDefinition):
    type: Literal["function"]


class NamespaceTool(Loose):
    """Functions that share a namespace. The model knows them as NAMESPACE.NAME."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_:/-]{1,64}$")]
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


class NamedTool(Loose):
    type: Literal["function"]
    name: str
    namespace: str | None = None


AnyTool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


class ReasoningOptions(Strict):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # thoughts are given whole
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None


class TextOptions(Strict):
    format: TextFormat | None = None


class ResponsesRequest(Harmless):
    input: (
        str
        | Annotated[
            list[MessageItem | CallItem | ResultItem | ReasoningItem], Field(min_length=1, max_length=MAX_MESSAGES)
        ]
    )
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: Fraction = None
    tools: Annotated[list[AnyTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    store: Off = None
    background: Off = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # thoughts are never encrypted


async def responses(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await parse(request, ResponsesRequest)
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "stream_options needs stream: true.", "Send both.")
    effort = body.reasoning.effort if body.reasoning else None
    thinking, budget, _ = thinking_of(ThinkingFields(reasoning_effort=effort))
    tools, names = _tools(body)
    grammar = await _format(service, body)
    if body.tool_choice == "none":
        tools = []
    elif body.tool_choice not in (None, "auto"):
        if grammar is not None:
            raise refused("tool_choice", "An answer cannot be a tool call and fit text.format.", "Send one of them.")
        choice = body.tool_choice
        name = _qualified(choice.name, choice.namespace) if isinstance(choice, NamedTool) else None
        grammar = await tool_grammar(service, tools, name, body.parallel_tool_calls is not False and name is None)
    prompt = await service.chat_prompt(_template_messages(body), tools, thinking)
    given = {name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None}
    work = service.request(
        prompt,
        given,
        max_tokens=body.max_output_tokens,
        constraint=await service.constraint(prompt, grammar, budget),
        one_call=bool(tools) and body.parallel_tool_calls is False,
    )
    answer = Choice(service.llm.tokenizer, prompt.thinking, schemas(tools))
    (job,) = service.worker.submit([work])
    result = Result(_head(service, body, work.sampling), names)
    if body.stream:
        return EventStream(_stream(result, answer, job), [job])
    return json_response(await unless_gone(request, _whole(result, answer, job)))


def _qualified(name: str, namespace: str | None) -> str:
    return f"{namespace}.{name}" if namespace else name


def _tools(body: ResponsesRequest) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str | None]]]:
    """Tools as chat templates read them, and what each is called by the client."""
    tools, names = [], {}
    for tool in body.tools or ():
        namespace, functions = (tool.name, tool.tools) if isinstance(tool, NamespaceTool) else (None, [tool])
        for function in functions:
            known = function.model_dump(exclude_none=True, exclude={"type"})
            known["name"] = _qualified(function.name, namespace)
            names[known["name"]] = function.name, namespace
            tools.append({"type": "function", "function": known})
    return tools, names


async def _format(service: Service, body: ResponsesRequest) -> Grammar | None:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return None
    nested = JsonSchemaFormat(schema_=wanted.schema_) if wanted.type == "json_schema" else None
    return await service.format(FormatFields(response_format=ResponseFormat(type=wanted.type, json_schema=nested)))


def _template_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Items as messages of a chat template: thoughts and calls join the assistant's message they belong to."""
    plain: list[dict[str, Any]] = []
    if body.instructions:
        plain.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*plain, {"role": "user", "content": body.input}]

    def assistant() -> dict[str, Any]:
        if not plain or plain[-1]["role"] != "assistant":
            plain.append({"role": "assistant", "content": ""})
        return plain[-1]

    for item in body.input:
        if isinstance(item, ReasoningItem):
            thoughts = _text(item.content or [])
            assistant()["reasoning_content"] = assistant().get("reasoning_content", "") + thoughts
        elif isinstance(item, CallItem):
            function = {"name": _qualified(item.name, item.namespace), "arguments": item.arguments}
            assistant().setdefault("tool_calls", []).append({"function": function})
        elif isinstance(item, ResultItem):
            plain.append({"role": "tool", "content": _text(item.output)})
        elif item.role == "assistant":
            assistant()["content"] += _text(item.content)
        else:
            plain.append({"role": "user" if item.role == "user" else "system", "content": _text(item.content)})
    return plain


def _text(parts: str | list[TextPart]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


def _head(service: Service, body: ResponsesRequest, sampling: Sampling) -> dict[str, Any]:
    """What the response repeats of the request."""
    return {
        "id": identifier("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "model": service.names[0],
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": _dump(body.text.format) if body.text and body.text.format else {"type": "text"}},
        "tool_choice": _dump(body.tool_choice)
        if isinstance(body.tool_choice, NamedTool)
        else body.tool_choice or "auto",
        "tools": [_dump(tool) for tool in body.tools or ()],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
        "background": False,
    }


def _dump(model: Any) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_none=True)


async def _whole(result: Result, answer: Choice, job: Job) -> dict[str, Any]:
    writer = Writer(result)
    async for news in events([job]):
        if news is not None:
            for part in answer.feed(news[1]):
                writer.show(part)
    writer.close(status(answer))
    return result.body(status(answer), answer)


async def _stream(result: Result, answer: Choice, job: Job) -> AsyncIterator[str]:
    writer = Writer(result)
    try:
        yield writer.event("response.created", response=result.body("in_progress"))
        yield writer.event("response.in_progress", response=result.body("in_progress"))
        async for news in events([job]):
            if news is None:
                yield ": keep-alive\n\n"
                continue
            for part in answer.feed(news[1]):
                for line in writer.show(part):
                    yield line
        ending = status(answer)
        for line in writer.close(ending):
            yield line
        yield writer.event(f"response.{ending}", response=result.body(ending, answer))
    except Exception as error:
        known = api_error(error)
        failure = {"code": known.code or "server_error", "message": known.message}
        yield writer.event("response.failed", response=result.body("failed", error=failure))
