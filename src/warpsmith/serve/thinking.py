"""Whether to think and how long: the spellings that clients use for it, as one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from warpsmith.serve.errors import refused
from warpsmith.serve.models import Effort, Json, Strict

# Tokens of thought by effort. The model knows no effort of its own; None is no limit.
BUDGETS: dict[str, int | None] = {"low": 1024, "medium": 8192, "high": None, "xhigh": None, "max": None}

Budget = Annotated[int | None, Field(ge=0, le=1 << 30)]


class ThinkingSwitch(Strict):
    """As Anthropic and Z.ai spell it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget = None
    display: Literal["summarized", "omitted"] | None = None
    clear_thinking: bool | None = None


class ThinkingFields(Strict):
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: ThinkingSwitch | None = None
    thinking_budget: Budget = None
    chat_template_kwargs: Json | None = None


def thinking_of(fields: ThinkingFields) -> tuple[bool | None, int | None, dict[str, Any]]:
    """Whether to think (None: as the model does), at most how long, and what else the template is told."""
    variables = dict(fields.chat_template_kwargs or {})
    said: dict[str, bool] = {}
    if "enable_thinking" in variables:
        value = variables.pop("enable_thinking")
        if not isinstance(value, bool):
            raise refused("chat_template_kwargs", "chat_template_kwargs.enable_thinking is not a boolean.", "")
        said["chat_template_kwargs.enable_thinking"] = value
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        if name in variables:
            raise refused("chat_template_kwargs", f"chat_template_kwargs may not set {name}.")
    if any(not name.isidentifier() for name in variables):
        raise refused("chat_template_kwargs", "chat_template_kwargs has a name that no template could use.")
    if fields.enable_thinking is not None:
        said["enable_thinking"] = fields.enable_thinking
    if fields.reasoning_effort is not None:
        said["reasoning_effort"] = fields.reasoning_effort in BUDGETS
    if fields.thinking is not None:
        said["thinking"] = fields.thinking.type != "disabled"
    if len(set(said.values())) > 1:
        raise refused(list(said)[-1], f"{' and '.join(said)} contradict each other.", "Send one of them.")
    budgets = [
        budget
        for budget in (
            fields.thinking_budget,
            fields.thinking.budget_tokens if fields.thinking else None,
            BUDGETS.get(fields.reasoning_effort or "high"),
        )
        if budget is not None
    ]
    return next(iter(said.values()), None), min(budgets, default=None), variables
