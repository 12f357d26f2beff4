"""POST /v1/responses, as OpenAI has it; nothing is stored, so a conversation is sent whole each time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from warpsmith.serve.answer import CallArguments, CallEnd, CallStart, Content, Part, Reasoning
from warpsmith.serve.calls import schemas
from warpsmith.serve.chat import tool_grammar
from warpsmith.serve.choice import Choice, timings
from warpsmith.serve.constraints import Grammar
from warpsmith.serve.engine import Job
from warpsmith.serve.errors import api_error, refused
from warpsmith.serve.http import json_response, parse, sse, stream_response, unless_gone
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
from warpsmith.serve.service import Service, events, fresh_seed, identifier
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


class NamedTool(Loose):
    type: Literal["function"]
    name: str


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
    tools: Annotated[list[FunctionTool] | None, Field(max_length=MAX_TOOLS)] = None
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
    tools = [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in body.tools or ()
    ]
    grammar = await _format(service, body)
    if body.tool_choice == "none":
        tools = []
    elif body.tool_choice not in (None, "auto"):
        if grammar is not None:
            raise refused("tool_choice", "An answer cannot be a tool call and fit text.format.", "Send one of them.")
        name = body.tool_choice.name if isinstance(body.tool_choice, NamedTool) else None
        grammar = await tool_grammar(service, tools, name, body.parallel_tool_calls is not False and name is None)
    prompt = await service.chat_prompt(_template_messages(body), tools, thinking)
    given = {name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None}
    work = service.request(
        prompt,
        given | {"seed": fresh_seed()},
        max_tokens=body.max_output_tokens,
        constraint=await service.constraint(prompt, grammar, budget),
    )
    answer = Choice(service.llm.tokenizer, prompt.thinking, schemas(tools))
    (job,) = service.worker.submit([work])
    result = _Result(service, body, work.sampling.temperature, work.sampling.top_p)
    if body.stream:
        return stream_response(_stream(result, answer, job))
    return json_response(await unless_gone(request, _whole(result, answer, job)))


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
            function = {"name": item.name, "arguments": item.arguments}
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


class _Result:
    """The response object as it grows, and the items in it."""

    def __init__(self, service: Service, body: ResponsesRequest, temperature: float, top_p: float) -> None:
        self.items: list[dict[str, Any]] = []
        self._head = {
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
            "temperature": temperature,
            "text": {"format": _dump(body.text.format) if body.text and body.text.format else {"type": "text"}},
            "tool_choice": _dump(body.tool_choice)
            if isinstance(body.tool_choice, NamedTool)
            else body.tool_choice or "auto",
            "tools": [_dump(tool) for tool in body.tools or ()],
            "top_p": top_p,
            "truncation": "disabled",
            "user": body.user,
            "background": False,
        }

    def open(self, part: Part) -> dict[str, Any]:
        """A new item for a part that does not continue the last one."""
        item: dict[str, Any]
        content: list[dict[str, Any]]
        if isinstance(part, Reasoning):
            content = [{"type": "reasoning_text", "text": ""}]
            item = {"id": identifier("rs_"), "type": "reasoning", "summary": [], "content": content}
        elif isinstance(part, CallStart):
            item = {
                "id": identifier("fc_"),
                "type": "function_call",
                "call_id": identifier("call_"),
                "name": part.name,
                "arguments": "",
            }
        else:
            content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
            item = {"id": identifier("msg_"), "type": "message", "role": "assistant", "content": content}
        item["status"] = "in_progress"
        self.items.append(item)
        return item

    def body(self, status: str, answer: Choice | None = None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        cut = status == "incomplete"
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.items,
            "usage": _usage(answer) if answer is not None else None,
            **({"timings": timings(answer.stats)} if answer is not None else {}),
        }


def _dump(model: Any) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_none=True)


def _usage(answer: Choice) -> dict[str, Any]:
    stats = answer.stats
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens},
        "output_tokens": stats.generated_tokens,
        "output_tokens_details": {
            "reasoning_tokens": answer.reasoning_tokens,
            "accepted_prediction_tokens": stats.accepted_tokens,
        },
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
    }


def _status(answer: Choice) -> str:
    assert answer.end is not None
    return "incomplete" if answer.end.reason == "length" else "completed"


async def _whole(result: _Result, answer: Choice, job: Job) -> dict[str, Any]:
    writer = _Writer(result)
    async for news in events([job]):
        if news is not None:
            for part in answer.feed(news[1]):
                writer.show(part)
    writer.close(_status(answer))
    return result.body(_status(answer), answer)


class _Writer:
    """Parts of an answer as items, and the events that tell of them."""

    def __init__(self, result: _Result) -> None:
        self.result = result
        self.number = -1
        self._item: dict[str, Any] | None = None

    def event(self, kind: str, **data: Any) -> str:
        self.number += 1
        return sse({"type": kind, "sequence_number": self.number, **data}, kind)

    def show(self, part: Part) -> list[str]:
        if isinstance(part, CallEnd):
            return self.close()
        lines = [] if self._continues(part) else self._open(part)
        if isinstance(part, CallStart):
            return lines
        item = self._item
        assert item is not None
        if isinstance(part, CallArguments):
            item["arguments"] += part.text
            return [*lines, self.event("response.function_call_arguments.delta", **self._place(False), delta=part.text)]
        item["content"][0]["text"] += part.text
        if isinstance(part, Reasoning):
            return [*lines, self.event("response.reasoning_text.delta", **self._place(), delta=part.text)]
        return [*lines, self.event("response.output_text.delta", **self._place(), delta=part.text, logprobs=[])]

    def close(self, status: str = "completed") -> list[str]:
        """End the open item."""
        item = self._item
        if item is None:
            return []
        lines = []
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            lines.append(self.event("response.function_call_arguments.done", **self._place(False), **done))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                lines.append(self.event("response.output_text.done", **self._place(), text=part["text"], logprobs=[]))
            else:
                lines.append(self.event("response.reasoning_text.done", **self._place(), text=part["text"]))
            lines.append(self.event("response.content_part.done", **self._place(), part=part))
        index = len(self.result.items) - 1
        lines.append(self.event("response.output_item.done", output_index=index, item=item))
        self._item = None
        return lines

    def _continues(self, part: Part) -> bool:
        kinds = {Content: "message", Reasoning: "reasoning", CallArguments: "function_call"}
        return self._item is not None and kinds.get(type(part)) == self._item["type"]

    def _open(self, part: Part) -> list[str]:
        lines = self.close()
        self._item = item = self.result.open(part)
        shown = item if item["type"] == "function_call" else {**item, "content": []}
        index = len(self.result.items) - 1
        lines.append(self.event("response.output_item.added", output_index=index, item=dict(shown)))
        if item["type"] != "function_call":
            lines.append(self.event("response.content_part.added", **self._place(), part=dict(item["content"][0])))
        return lines

    def _place(self, content: bool = True) -> dict[str, Any]:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.result.items) - 1}
        return place | {"content_index": 0} if content else place


async def _stream(result: _Result, answer: Choice, job: Job) -> AsyncIterator[str]:
    writer = _Writer(result)
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
        status = _status(answer)
        for line in writer.close(status):
            yield line
        yield writer.event(f"response.{status}", response=result.body(status, answer))
    except Exception as error:
        known = api_error(error)
        failure = {"code": known.code or "server_error", "message": known.message}
        yield writer.event("response.failed", response=result.body("failed", error=failure))
