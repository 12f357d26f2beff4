"""The application: every route, and what happens to errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from warpsmith.errors import WarpsmithError
from warpsmith.serve.chat import chat_completions
from warpsmith.serve.completions import completions
from warpsmith.serve.errors import ApiError, api_error
from warpsmith.serve.guard import MAX_BODY, Guard
from warpsmith.serve.http import json_response
from warpsmith.serve.messages import count_tokens, messages
from warpsmith.serve.openapi import document
from warpsmith.serve.responses import responses
from warpsmith.serve.service import Service
from warpsmith.serve.utilities import (
    apply_template,
    detokenize,
    embeddings,
    health,
    metrics,
    model,
    models,
    props,
    tokenize,
)

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
PAGE_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def make_app(
    service: Service,
    *,
    hosts: Sequence[str] | None = None,
    origins: Sequence[str] = (),
    max_body: int = MAX_BODY,
) -> Starlette:
    """`hosts`: names that requests may address (None: any). `origins`: web pages that may call from elsewhere."""
    middleware = [Middleware(Guard, api_keys=service.api_keys, hosts=hosts, max_body=max_body)]
    if origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
        middleware.insert(0, cors)

    async def openapi(request: Request) -> Response:
        return json_response(document(bool(service.api_keys)))

    routes = [
        _get("/", page),
        _get("/page/{name}", page),
        _get("/health", health),
        _get("/v1/health", health),
        _get("/v1/models", models),
        _get("/v1/models/{name:path}", model),
        _get("/props", props),
        _get("/metrics", metrics),
        _get("/openapi.json", openapi),
        _post("/v1/chat/completions", chat_completions),
        _post("/v1/completions", completions),
        _post("/v1/responses", responses),
        _post("/v1/messages", messages),
        _post("/v1/messages/count_tokens", count_tokens),
        _post("/v1/embeddings", embeddings),
        _post("/tokenize", tokenize),
        _post("/detokenize", detokenize),
        _post("/apply-template", apply_template),
    ]
    refused = (ApiError, WarpsmithError, ValidationError, HTTPException, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(refused, _answer_error)
    handlers[ClientDisconnect] = _nobody_listens
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.state.service = service
    service.metrics.watch(service.worker)
    return app


Handler = Callable[[Request], Awaitable[Response]]


def _get(path: str, handler: Handler) -> Route:
    return Route(path, handler, methods=["GET"])


def _post(path: str, handler: Handler) -> Route:
    return Route(path, handler, methods=["POST"])


async def page(request: Request) -> Response:
    """The chat page: files of this package and nothing else."""
    name = request.path_params.get("name", "index.html")
    folder = files("warpsmith.serve") / "page"
    kind = PAGE_TYPES.get(name.rpartition(".")[2])
    if kind is None or name not in {file.name for file in folder.iterdir()}:
        raise ApiError(404, f"There is no {request.url.path}.")
    return Response((folder / name).read_bytes(), media_type=kind, headers=PAGE_HEADERS)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        known = ApiError(
            error.status_code,
            f"{request.method} {request.url.path}: {error.detail}.",
            headers=dict(error.headers or {}),
        )
    else:
        known = api_error(error)
    return json_response(known.body(request.url.path), known.status, known.headers)


async def _nobody_listens(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
