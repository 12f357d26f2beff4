"""The small endpoints: health, models, tokens, templates, properties, metrics."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from warpsmith import __version__
from warpsmith.engine.request import sampling_for
from warpsmith.model.chat import declared_sampling
from warpsmith.serve.chat import Message, template_messages
from warpsmith.serve.errors import ApiError, refused
from warpsmith.serve.http import json_response, parse
from warpsmith.serve.models import MAX_MESSAGES, MAX_TOOLS, Strict, Tool
from warpsmith.serve.service import Service
from warpsmith.serve.thinking import ThinkingFields, thinking_of

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


async def health(request: Request) -> Response:
    service: Service = request.app.state.service
    service.llm  # noqa: B018  503 while it loads
    return json_response({"status": "ok"})


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    name = request.path_params["name"]
    service.check_model(name)
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    llm = service.llm
    meta = {
        "n_vocab": llm.config.vocab,
        "n_ctx": llm.context,
        "n_ctx_train": llm.config.context,
        "n_embd": llm.config.hidden,
        "n_params": llm.checkpoint.parameters,
        "size": llm.checkpoint.nbytes,
    }
    return {"id": name, "object": "model", "created": service.created, "owned_by": "warpsmith", "meta": meta}


class TokenizeRequest(Strict):
    content: str
    add_special: bool | None = None  # no model of this family begins a text with a mark
    parse_special: bool | None = None
    with_pieces: bool | None = None


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await parse(request, TokenizeRequest)
    tokenizer = service.llm.tokenizer
    ids = tokenizer.encode(body.content, special=body.parse_special is not False)
    if not body.with_pieces:
        return json_response({"tokens": ids})
    return json_response({"tokens": [{"id": id, "piece": _piece(tokenizer.token_bytes(id))} for id in ids]})


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


class DetokenizeRequest(Strict):
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await parse(request, DetokenizeRequest)
    if body.tokens and max(body.tokens) >= service.llm.config.vocab:
        raise refused("tokens", f"Token ids must be below {service.llm.config.vocab}.", "Use this model's tokenizer.")
    return json_response({"content": service.llm.tokenizer.decode(body.tokens)})


class ApplyTemplateRequest(ThinkingFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None


async def apply_template(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await parse(request, ApplyTemplateRequest)
    service.check_model(body.model)
    thinking, _, variables = thinking_of(body)
    tools = [tool.model_dump(exclude_none=True, include={"type", "function"}) for tool in body.tools or ()]
    prompt = await service.chat_prompt(template_messages(body.messages), tools, thinking, variables)
    return json_response({"prompt": prompt.text, "tokens": len(prompt.ids)})


async def props(request: Request) -> Response:
    """What runs here. Paths of the server are nobody's business."""
    service: Service = request.app.state.service
    llm = service.llm
    sampling = sampling_for({}, declared_sampling(llm.checkpoint.metadata))
    settings = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    scheduler = llm.scheduler
    return json_response(
        {
            "build_info": f"warpsmith {__version__}",
            "model_alias": service.names[0],
            "chat_template": service.chat_template,
            "default_generation_settings": {"n_ctx": llm.context, "params": settings},
            "total_slots": scheduler.parallel,
            "modalities": {"vision": False, "audio": False},
            "device": llm.device,
            "draft": scheduler.proposer.name if scheduler.proposer else None,
            "tools": "tools" in service.chat_template,
            "thinking": "enable_thinking" in service.chat_template,
        }
    )


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=METRICS_TYPE)


async def embeddings(request: Request) -> Response:
    raise ApiError(501, "This server makes no embeddings.", code="not_supported")
