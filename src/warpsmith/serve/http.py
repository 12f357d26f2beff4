"""Bodies in, JSON and event streams out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from warpsmith.serve.errors import ApiError
from warpsmith.serve.job import Job

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

MAX_DEPTH = 64  # of JSON: what is nested deeper is an attack on whoever walks it

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


async def parse(request: Request, model: type[M]) -> M:
    """The body as the endpoint's parameters. Its size was limited on the way in."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body must be JSON.", param=None, kind="invalid_request_error")
    body = await request.body()
    _check_depth(body)
    return model.model_validate_json(body)


def _check_depth(body: bytes) -> None:
    """Refuse deep nesting before anything recursive sees it. Brackets in strings do not count."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth, quoted, skip = 0, False, False
    for byte in body:
        if skip:
            skip = False
        elif quoted:
            skip, quoted = byte == 0x5C, byte != 0x22
        elif byte == 0x22:
            quoted = True
        elif byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ApiError(400, f"The body is nested deeper than {MAX_DEPTH} levels. Make it flatter.")
        elif byte in b"]}":
            depth -= 1


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is given up when the client is gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


def sse(data: Any, event: str | None = None) -> str:
    """One server-sent event."""
    text = data if isinstance(data, str) else dumps(data)
    return (f"event: {event}\n" if event else "") + f"data: {text}\n\n"


class EventStream(StreamingResponse):
    """Events of some jobs, which end with it: also where the client is gone before the first chunk is asked for."""

    def __init__(self, chunks: AsyncIterator[str], jobs: Sequence[Job]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._jobs = jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for job in self._jobs:
                job.cancel()
