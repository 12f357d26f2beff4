"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from warpsmith.serve.answer import CallArguments, CallStart, Content, Part, Reasoning
from warpsmith.serve.calls import schemas
from warpsmith.serve.chat import tool_grammar
from warpsmith.serve.choice import Choice, timings
from warpsmith.serve.errors import api_error, refused
from warpsmith.serve.http import EventStream, json_response, parse, sse, unless_gone
from warpsmith.serve.job import Job, Run
from warpsmith.serve.models import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, Effort, Json, Loose, Strict, TextOnly, TopK
from warpsmith.serve.service import Prompt, Service, events, identifier
from warpsmith.serve.thinking import BUDGETS, ThinkingFields, ThinkingSwitch, thinking_of


class TextBlock(Loose):
    type: Literal["text"]
    text: str


class ThinkingBlock(Loose):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Loose):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Loose):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class ToolResultBlock(Loose):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[TextBlock] | None, TextOnly] = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Message(Loose):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block], TextOnly]


class ToolDefinition(Loose):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    input_schema: Json


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Strict):
    effort: Effort | None = None
    format: OutputFormat | None = None


class ContextEdit(Loose):
    """Which thoughts of past turns the model still sees is up to its chat template; no other edit is done here."""

    type: Annotated[str, Field(pattern=r"^clear_thinking_[0-9]+$")]


class ContextManagement(Strict):
    edits: list[ContextEdit] | None = None


class PromptFields(Strict):
    """What the prompt is made of, and nothing else."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolDefinition] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSwitch | None = None
    output_config: OutputConfig | None = None
    cache_control: Json | None = None  # prefixes are kept in any case
    context_management: ContextManagement | None = None


class MessagesRequest(PromptFields):
    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)]
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: TopK = None
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]] | None, Field(max_length=MAX_STOPS)] = None
    metadata: Json | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


async def count_tokens(request: Request) -> Response:
    service: Service = request.app.state.service
    prompt, _, _ = await _prompt(service, await parse(request, PromptFields))
    return json_response({"input_tokens": len(prompt.ids)})


async def messages(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await parse(request, MessagesRequest)
    prompt, tools, budget = await _prompt(service, body)
    grammar, choice = None, body.tool_choice
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        grammar = await asyncio.to_thread(service.grammars.json_schema, schema, "output_config.format.schema")
    if choice is not None and choice.type in ("any", "tool"):
        if grammar is not None:
            raise refused("tool_choice", "An answer cannot be a tool call and fit output_config.format.", "Send one.")
        name = choice.name if choice.type == "tool" else None
        if choice.type == "tool" and name is None:
            raise refused("tool_choice", "tool_choice.name is missing.", "Name one of the tools.")
        grammar = await tool_grammar(service, tools, name, not choice.disable_parallel_tool_use and name is None)
    given = {name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)
    work = service.request(
        prompt,
        given,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        constraint=await service.constraint(prompt, grammar, budget),
        one_call=bool(tools) and choice is not None and bool(choice.disable_parallel_tool_use),
    )
    answer = Choice(service.llm.tokenizer, prompt.thinking, schemas(tools))
    (job,) = service.worker.submit([work])
    head = {"id": identifier("msg_"), "type": "message", "role": "assistant", "model": service.names[0]}
    if body.stream:
        return EventStream(_stream(head, len(prompt.ids), answer, job), [job])
    return json_response(await unless_gone(request, _whole(head, answer, job)))


async def _prompt(service: Service, body: PromptFields) -> tuple[Prompt, list[dict[str, Any]], int | None]:
    service.check_model(body.model)
    effort = body.output_config.effort if body.output_config is not None else None
    if body.thinking is not None and body.thinking.type == "adaptive":
        fields = ThinkingFields(enable_thinking=None if effort is None else effort in BUDGETS, reasoning_effort=effort)
    else:
        fields = ThinkingFields(thinking=body.thinking, reasoning_effort=effort if body.thinking else None)
    thinking, budget, _ = thinking_of(fields)
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in body.tools or ()
    ]
    if body.tool_choice is not None and body.tool_choice.type == "none":
        tools = []
    return await service.chat_prompt(_template_messages(body), tools, thinking), tools, budget


def _template_messages(body: PromptFields) -> list[dict[str, Any]]:
    """Messages as chat templates read them: results of tools are messages of their own."""
    plain: list[dict[str, Any]] = []
    if body.system:
        plain.append({"role": "system", "content": _text(body.system)})
    for message in body.messages:
        if isinstance(message.content, str):
            plain.append({"role": message.role, "content": message.content})
            continue
        entry: dict[str, Any] = {"role": message.role, "content": ""}
        for block in message.content:
            if isinstance(block, TextBlock):
                entry["content"] += block.text
            elif isinstance(block, ThinkingBlock):
                entry["reasoning_content"] = entry.get("reasoning_content", "") + block.thinking
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                entry.setdefault("tool_calls", []).append({"function": function})
            elif isinstance(block, ToolResultBlock):
                result = _text(block.content or "")
                plain.append({"role": "tool", "content": f"Error: {result}" if block.is_error else result})
        if entry["content"] or len(entry) > 2:
            plain.append(entry)
    return plain


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


async def _whole(head: dict[str, Any], answer: Choice, job: Job) -> dict[str, Any]:
    async for news in events([job]):
        if news is not None:
            answer.feed(news[1])
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not (answer.calls or answer.reasoning):
        content.append({"type": "text", "text": answer.content})
    content += [
        {"type": "tool_use", "id": identifier("toolu_"), "name": call.name, "input": call.input()}
        for call in answer.calls
    ]
    return {**head, "content": content, **_ending(answer), "usage": _usage(answer), "timings": timings(answer.stats)}


def _ending(answer: Choice) -> dict[str, Any]:
    assert answer.end is not None
    if answer.finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.end.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.end.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.end.stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(answer: Choice) -> dict[str, Any]:
    """Anthropic counts what came from the cache apart from what had to be read."""
    return {
        "input_tokens": answer.stats.prompt_tokens - answer.stats.cached_tokens,
        "cache_read_input_tokens": answer.stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.stats.generated_tokens,
    }


class Blocks:
    """Blocks of a stream, one open at a time."""

    def __init__(self) -> None:
        self.index, self.open = -1, ""

    def show(self, part: Part) -> list[str]:
        if isinstance(part, Reasoning):
            return [*self._switch("thinking", {"thinking": "", "signature": ""}), self._delta("thinking", part.text)]
        if isinstance(part, Content):
            return [*self._switch("text", {"text": ""}), self._delta("text", part.text)]
        if isinstance(part, CallStart):
            self_closing = self.close()
            block = {"id": identifier("toolu_"), "name": part.name, "input": {}}
            return [*self_closing, *self._switch("tool_use", block)]
        if isinstance(part, CallArguments):
            return [self._delta("input_json", part.text)]
        return self.close()

    def _switch(self, kind: str, start: dict[str, Any]) -> list[str]:
        if self.open == kind:
            return []
        lines = self.close()
        self.index, self.open = self.index + 1, kind
        block = {"type": kind, **start}
        data = {"type": "content_block_start", "index": self.index, "content_block": block}
        return [*lines, sse(data, "content_block_start")]

    def _delta(self, kind: str, text: str) -> str:
        key = "partial_json" if kind == "input_json" else kind
        delta = {"type": f"{kind}_delta", key: text}
        return sse({"type": "content_block_delta", "index": self.index, "delta": delta}, "content_block_delta")

    def close(self) -> list[str]:
        if not self.open:
            return []
        self.open = ""
        return [sse({"type": "content_block_stop", "index": self.index}, "content_block_stop")]


async def _stream(head: dict[str, Any], prompt_tokens: int, answer: Choice, job: Job) -> AsyncIterator[str]:
    blocks = Blocks()
    try:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        start = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield sse({"type": "message_start", "message": start}, "message_start")
        async for news in events([job]):
            if news is None:
                yield sse({"type": "ping"}, "ping")
                continue
            for part in answer.feed(news[1]):
                for line in blocks.show(part):
                    yield line
            if not isinstance(news[1], Run) and answer.end is None:
                yield sse({"type": "ping"}, "ping")
        for line in blocks.close():
            yield line
        delta = {"type": "message_delta", "delta": _ending(answer), "usage": _usage(answer)}
        yield sse(delta | {"timings": timings(answer.stats)}, "message_delta")
        yield sse({"type": "message_stop"}, "message_stop")
    except Exception as error:
        yield sse(api_error(error).anthropic(), "error")
