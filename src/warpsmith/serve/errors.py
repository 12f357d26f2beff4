"""Errors as each API words them."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError

from warpsmith.errors import BadRequest, WarpsmithError
from warpsmith.serve.job import Busy, Closing, Loading

LOG = logging.getLogger("warpsmith.serve")

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    421: "permission_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    421: "permission_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A refusal with an HTTP status. `facts` go beside the message where the API has room for them."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind, self.headers, self.facts = kind, headers or {}, facts

    def openai(self) -> dict[str, Any]:
        kind = self.kind or _OPENAI_TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error | self.facts}

    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body(self, path: str) -> dict[str, Any]:
        """As the API that owns this path words it."""
        return self.anthropic() if path.startswith("/v1/messages") else self.openai()


def refused(param: str, problem: str, fix: str = "Leave it out.") -> ApiError:
    """A parameter that cannot be honoured."""
    return ApiError(400, f"{problem} {fix}".strip(), param=param)


def api_error(error: Exception) -> ApiError:
    """Any error as one that can be sent. What nobody raised on purpose tells nothing of its insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="queue_full", headers={"retry-after": str(error.retry_after)})
    if isinstance(error, Loading):
        return ApiError(503, error.problem, code="loading", headers={"retry-after": "1"})
    if isinstance(error, Closing):
        return ApiError(503, str(error), code="shutting_down", headers={"retry-after": "5"})
    if isinstance(error, BadRequest):
        return ApiError(400, str(error))
    if isinstance(error, WarpsmithError):
        return ApiError(500, str(error), kind="server_error")
    LOG.error("something failed inside the server", exc_info=error)
    return ApiError(500, "Something failed inside the server; its log says what.", kind="server_error")


def _invalid(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, by name."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    path = [str(step) for step in first["loc"] if isinstance(step, int) or str(step).isidentifier()]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        message = f"{name} is not a parameter of this server. Leave it out; docs/server.md lists those there are."
    elif first["type"] == "missing":
        message = f"{name} is missing."
    else:
        message = f"{name}: {first['msg']}." if name else f"{first['msg']}."
    return ApiError(400, message, param=name or None)
