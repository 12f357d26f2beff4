"""The shape of every answer, for the OpenAPI document. The endpoints build plain dictionaries; tests hold both
against each other."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Health(Reply):
    status: Literal["ok"]


class ModelMeta(Reply):
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int


class Model(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    meta: ModelMeta


class ModelList(Reply):
    object: Literal["list"]
    data: list[Model]


class Piece(Reply):
    id: int
    piece: str | list[int]


class Tokens(Reply):
    tokens: list[int] | list[Piece]


class Text(Reply):
    content: str


class Rendered(Reply):
    prompt: str
    tokens: int


class Counted(Reply):
    input_tokens: int


class GenerationSettings(Reply):
    n_ctx: int
    params: dict[str, float]


class Modalities(Reply):
    vision: bool
    audio: bool


class Props(Reply):
    build_info: str
    model_alias: str
    chat_template: str
    default_generation_settings: GenerationSettings
    total_slots: int
    modalities: Modalities
    device: str
    draft: str | None
    tools: bool
    thinking: bool


class PromptDetails(Reply):
    cached_tokens: int


class CompletionDetails(Reply):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(Reply):
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int
    mode: str
    speculation_off: str | None
    left_out: list[str]
    acceptance_length: float
    seed: int | None


class Rival(Reply):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Rival):
    top_logprobs: list[Rival]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None


class Called(Reply):
    name: str
    arguments: str


class ToolCall(Reply):
    id: str
    type: Literal["function"]
    function: Called


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class TextLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Reply):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    timings: Timings


class ResponseUsageIn(Reply):
    cached_tokens: int


class ResponseUsageOut(Reply):
    reasoning_tokens: int
    accepted_prediction_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: ResponseUsageIn
    output_tokens: int
    output_tokens_details: ResponseUsageOut
    total_tokens: int


class OutputPart(Reply):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputItem(Reply):
    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputPart] = []
    summary: list[Any] = []
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    arguments: str = ""


class Incomplete(Reply):
    reason: Literal["max_output_tokens"]


class Response(BaseModel):
    """Also repeats what was asked for."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: Incomplete | None
    output: list[OutputItem]
    usage: ResponseUsage
    timings: Timings


class Block(Reply):
    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}


class MessageUsage(Reply):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class Message(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings


class ErrorBody(BaseModel):
    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Reply):
    error: ErrorBody


class AnthropicErrorBody(Reply):
    type: str
    message: str


class AnthropicError(Reply):
    type: Literal["error"] = Field(...)
    error: AnthropicErrorBody
