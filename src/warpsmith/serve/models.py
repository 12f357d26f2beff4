"""What the APIs' requests have in common. Every field is honoured or refused by name; unknown ones are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_TOOLS = 512

Json = dict[str, Any]


class Strict(BaseModel):
    """Parameters: nothing is converted, nothing unknown is let through."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)


class Loose(BaseModel):
    """Parts of a conversation: clients send back what other servers gave them, and more of it than we render."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


def _text_only(parts: Any) -> Any:
    if isinstance(parts, list):
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind.split("_")[-1] in ("url", "image", "audio", "file", "video", "document"):
                raise PydanticCustomError(
                    "text_only", "this model reads text only, so {kind} parts are refused", {"kind": kind}
                )
    return parts


def _boolean(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise PydanticCustomError("bool", "must be a boolean")
    return value


TextOnly = BeforeValidator(_text_only)
Off = Annotated[Literal[False] | None, BeforeValidator(_boolean)]  # a 0 would equal False
Stop = Annotated[
    str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None, Field(default=None)
]
Temperature = Annotated[float | None, Field(default=None, ge=0, le=100)]
Fraction = Annotated[float | None, Field(default=None, ge=0, le=1)]
TopK = Annotated[int | None, Field(default=None, ge=-1, le=1 << 30)]
MaxTokens = Annotated[int | None, Field(default=None, ge=1, le=1 << 30)]


class SamplerFields(Strict):
    """How tokens are chosen, in the names of OpenAI, llama.cpp and vLLM."""

    temperature: Temperature = None
    top_p: Fraction = None
    top_k: TopK = None
    min_p: Fraction = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repeat_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    repeat_last_n: Annotated[int | None, Field(ge=-1, le=1 << 30)] = None
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,7}$")], Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(max_length=1024),
    ] = None
    seed: Annotated[int | None, Field(ge=-1, lt=1 << 63)] = None
    stop: Stop = None
    ignore_eos: bool | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: there is none to leave out


class JsonSchemaFormat(Strict):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None  # as llama.cpp has it, with json_object


class FormatFields(Strict):
    """What the answer must fit; at most one of these."""

    response_format: ResponseFormat | None = None
    json_schema: Json | None = None
    grammar: Annotated[str | None, Field(min_length=1)] = None
    regex: Annotated[str | None, Field(min_length=1)] = None


class FunctionDefinition(Loose):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Loose):
    type: Literal["function"]
    function: FunctionDefinition


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Harmless(Strict):
    """Taken and without effect: none of these can change an answer of this server."""

    user: str | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    client_metadata: Json | None = None
