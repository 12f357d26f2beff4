"""The OpenAPI document, made from the models that requests are checked with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from warpsmith import __version__
from warpsmith.serve import replies
from warpsmith.serve.chat import ChatRequest
from warpsmith.serve.completions import CompletionRequest
from warpsmith.serve.messages import MessagesRequest, PromptFields
from warpsmith.serve.responses import ResponsesRequest
from warpsmith.serve.utilities import METRICS_TYPE, ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    summary: str
    reply: type[BaseModel] | str  # a model, or the media type of something else
    body: type[BaseModel] | None = None
    streams: bool = False
    open: bool = False  # needs no key
    refusals: tuple[int, ...] = ()


EVENT = {  # of a stream
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_GENERATES = (404, 429, 503)
OPERATIONS = [
    Operation("get", "/", "The chat page", "text/html", open=True),
    Operation("get", "/health", "Whether the model is loaded", replies.Health, open=True, refusals=(503,)),
    Operation("get", "/v1/models", "The models of this server", replies.ModelList, refusals=(503,)),
    Operation("get", "/props", "What runs here and how", replies.Props, refusals=(503,)),
    Operation("get", "/metrics", "Counters for Prometheus", METRICS_TYPE),
    Operation("get", "/openapi.json", "This document", "application/json"),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation (OpenAI)",
        replies.ChatCompletion,
        ChatRequest,
        streams=True,
        refusals=_GENERATES,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a text (OpenAI)",
        replies.Completion,
        CompletionRequest,
        streams=True,
        refusals=_GENERATES,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer a conversation (OpenAI)",
        replies.Response,
        ResponsesRequest,
        streams=True,
        refusals=_GENERATES,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation (Anthropic)",
        replies.Message,
        MessagesRequest,
        streams=True,
        refusals=_GENERATES,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count a prompt's tokens (Anthropic)",
        replies.Counted,
        PromptFields,
        refusals=(404, 503),
    ),
    Operation("post", "/tokenize", "Text to token ids", replies.Tokens, TokenizeRequest, refusals=(503,)),
    Operation("post", "/detokenize", "Token ids to text", replies.Text, DetokenizeRequest, refusals=(503,)),
    Operation(
        "post",
        "/apply-template",
        "A conversation as the model reads it",
        replies.Rendered,
        ApplyTemplateRequest,
        refusals=(404, 503),
    ),
]
_REASONS = {
    400: "A parameter cannot be honoured; the message names it",
    401: "The API key is missing or wrong",
    404: "There is no such model here",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "The Host header names another server",
    429: "Too many requests wait; Retry-After says when to come back",
    503: "The model is loading, or the server is shutting down",
}


@cache
def document(keys: bool) -> dict[str, Any]:
    """`keys`: whether requests need an API key."""
    kinds = [(model, "validation") for model in _models()]
    _, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = definitions["$defs"]
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, keys)
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "warpsmith", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": components,
    }


def _models() -> list[type[BaseModel]]:
    named: list[type[BaseModel]] = [replies.Error, replies.AnthropicError]
    for operation in OPERATIONS:
        named += [model for model in (operation.body, operation.reply) if isinstance(model, type)]
    return list(dict.fromkeys(named))


def _operation(operation: Operation, keys: bool) -> dict[str, Any]:
    reply = operation.reply
    good = {"application/json": _schema(reply)} if isinstance(reply, type) else {reply: {}}
    if operation.streams:
        good["text/event-stream"] = {"schema": EVENT}
    answers: dict[str, Any] = {"200": {"description": operation.summary, "content": good}}
    refusals = {*operation.refusals, 421, *((401,) if keys and not operation.open else ())}
    if operation.body is not None:
        refusals |= {400, 413, 415}
    error = replies.AnthropicError if operation.path.startswith("/v1/messages") else replies.Error
    for status in sorted(refusals):
        answers[str(status)] = {"description": _REASONS[status], "content": {"application/json": _schema(error)}}
    result: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if operation.body is not None:
        result["requestBody"] = {"required": True, "content": {"application/json": _schema(operation.body)}}
    if keys and not operation.open:
        result["security"] = [{"key": []}]
    return result


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{_name(model)}"}}


@cache
def _names() -> dict[type[BaseModel], str]:
    kinds = [(model, "validation") for model in _models()]
    named, _ = models_json_schema(kinds, ref_template="{model}")  # type: ignore[arg-type]
    return {model: schema["$ref"] for (model, _), schema in named.items()}  # type: ignore[misc]


def _name(model: type[BaseModel]) -> str:
    return _names()[model]
