"""What every request passes first: its host, its key, its size. Plain ASGI, before anything is parsed."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warpsmith.serve.errors import ApiError
from warpsmith.serve.http import json_response

MAX_BODY = 32 << 20

# the page and its files hold no secret, and a browser cannot send a key for them; health is for load balancers
OPEN_PATHS = ("/", "/health", "/page/")


class Guard:
    """`hosts` are the names a request may address, None for any: on loopback a foreign name means that a web page has
    led a browser here (DNS rebinding). `origins` are the web pages that may call from elsewhere."""

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str] = (),
        hosts: Sequence[str] | None = None,
        max_body: int = MAX_BODY,
    ) -> None:
        self._app, self._hosts, self._max_body = app, hosts, max_body
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), str(scope["path"])
        try:
            self._check_host(headers)
            self._check_key(headers, path)
            self._check_length(headers)
        except ApiError as error:
            await json_response(error.body(path), error.status, error.headers)(scope, receive, send)
            return
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                raise _too_large(self._max_body)
            return message

        await self._app(scope, limited, send)

    def _check_host(self, headers: Headers) -> None:
        if self._hosts is None:
            return
        host = headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
        if name.lower() not in self._hosts:
            raise ApiError(421, f"This server is not {name[:100]!r}. Use localhost, or start it with --host.")

    def _check_key(self, headers: Headers, path: str) -> None:
        if not self._keys or path in OPEN_PATHS or path.startswith("/page/"):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode()
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all of them: time tells nothing
        if not any(matches):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self._max_body:
            raise _too_large(self._max_body)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The body is larger than {limit >> 20} MiB. Send less at once.", headers={"connection": "close"}
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
