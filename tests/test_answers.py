"""Thoughts, text and tool calls in a stream: the same at every split, and what the template wrote comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warpsmith.model.chat import default_template, render
from warpsmith.serve.answer import (
    AnswerParser,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Part,
    Reasoning,
    opens_thinking,
)
from warpsmith.serve.arguments import Parameters

TOOLS: dict[str, Any] = {
    "get": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "get_more": {"type": "object", "properties": {"a": {}, "b": {"type": ["object", "null"]}, "c": {"type": "array"}}},
}

PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=get>",
    "<function=get_more>",
    "<function=other>",
    "<function=not a name>",
    "</function>",
    "<parameter=city>",
    "<parameter=days>",
    "<parameter=b>",
    "</parameter>",
    '{"name": "get", "arguments": {"city": "</tool_call>"}}',
    '{"city": "Graz"}',
    "{",
    "get",
    "get_more",
    "\n",
    " ",
    "<",
    "</",
    "5",
    "null",
    'say "ä"\\',
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=14).map("".join)


def parts_of(parser: AnswerParser, chunks: Sequence[str]) -> list[Part]:
    """What a stream of chunks is parsed to, with neighbours of one kind joined."""
    joined: list[Part] = []
    for part in [*(part for chunk in chunks for part in parser.push(chunk)), *parser.finish()]:
        last = joined[-1] if joined else None
        if isinstance(part, Content | Reasoning | CallArguments):
            assert part.text, "an empty piece came out"
        if isinstance(part, Content | Reasoning) and type(last) is type(part):
            joined[-1] = type(part)(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and last.index == part.index:
            joined[-1] = CallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


def parse(text: str, thinking: bool = False, tools: dict[str, Any] | None = TOOLS) -> list[Part]:
    return parts_of(AnswerParser(thinking, tools), [text])


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [CallStart(index, name), CallArguments(index, arguments), CallEnd(index)]


@given(texts, st.booleans(), st.booleans(), st.data())
@example("<tool_call>\n<function=get>\nx{1}</function>", False, True, None)
@example("<function=get></function> a  b", False, True, None)
def test_the_parts_do_not_depend_on_the_split(text: str, thinking: bool, tools: bool, data: Any) -> None:
    def parser() -> AnswerParser:
        return AnswerParser(thinking, TOOLS if tools else None)

    whole = parts_of(parser(), [text])
    assert parts_of(parser(), list(text)) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parts_of(parser(), chunks) == whole


@given(st.text().filter(lambda text: "<" not in text), st.booleans())
def test_text_without_markers_is_passed_on(text: str, tools: bool) -> None:
    assert parse(text, tools=TOOLS if tools else None) == ([Content(text)] if text else [])


@given(texts)
def test_without_tools_and_thoughts_nothing_is_touched(text: str) -> None:
    text = "x" + text
    assert parse(text, tools=None) == [Content(text)]


# Thoughts


def test_thoughts_are_split_from_the_answer() -> None:
    assert parse("\nhm \n</think>\n\nYes.\n", thinking=True) == [Reasoning("hm"), Content("Yes.\n")]
    assert parse(" <think>\nhm\n</think>\n\nYes.") == [Reasoning("hm"), Content("Yes.")]
    assert parse("\n</think>\n\nYes.", thinking=True) == [Content("Yes.")]
    assert parse("still at it </thi", thinking=True) == [Reasoning("still at it </thi")]


def test_a_tag_in_the_middle_of_an_answer_is_text() -> None:
    assert parse("The tag <think> opens.") == [Content("The tag <think> opens.")]


def test_a_tool_call_ends_thoughts_that_were_not_closed() -> None:
    text = "I look.\n<tool_call>\n<function=get>\n</function>\n</tool_call>"
    assert parse(text, thinking=True) == [Reasoning("I look."), *call(0, "get", "{}")]
    quoted = "The tag <tool_call> is for calls.\n</think>\n\nYes."
    assert parse(quoted, thinking=True) == [Reasoning("The tag <tool_call> is for calls."), Content("Yes.")]


@pytest.mark.parametrize("on", [True, False])
def test_the_prompt_says_whether_thoughts_are_open(on: bool) -> None:
    messages = [{"role": "user", "content": "What does <think> mean?"}]
    assert opens_thinking(render(default_template(), messages, enable_thinking=on)) is on


# Tool calls

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
free_text = st.text().filter(lambda text: "</parameter>" not in text)
inner = st.text(alphabet="abc {}[]\"'\\ä\n<>=", max_size=5)
values = st.recursive(
    st.one_of(scalars, inner),
    lambda child: st.one_of(st.lists(child, max_size=3), st.dictionaries(inner, child, max_size=3)),
    max_leaves=5,
).filter(lambda value: "</parameter>" not in json.dumps(value))
KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def rendered(calls: list[dict[str, Any]], content: str = "") -> str:
    """The text of an answer with these calls, as the chat template writes it."""
    answer = {"role": "assistant", "content": content, "tool_calls": [{"function": call} for call in calls]}
    text = render(default_template(), [{"role": "user", "content": "?"}, answer], add_generation_prompt=False)
    return text.partition("<think>\n\n</think>\n\n")[2].removesuffix("<|im_end|>\n")


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.one_of(values, free_text), max_size=4), st.integers(1, 9))
def test_what_the_template_writes_comes_back_typed_by_the_schema(arguments: dict[str, Any], size: int) -> None:
    kinds = {key: next(kind for kind, test in KINDS.items() if test(value)) for key, value in arguments.items()}
    tools = {"f": {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}}}
    text = rendered([{"name": "f", "arguments": arguments}], "Look:")
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    said, start, *middle, end = parts_of(AnswerParser(False, tools), chunks)
    assert (said, start, end) == (Content("Look:"), CallStart(0, "f"), CallEnd(0))
    assert json.loads("".join(part.text for part in middle)) == arguments


@given(st.dictionaries(st.text(max_size=3), values, max_size=3), st.booleans(), st.integers(1, 9))
def test_calls_in_json_come_back(arguments: dict[str, Any], as_string: bool, size: int) -> None:
    given: Any = json.dumps(arguments) if as_string else arguments
    text = f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': given})}\n</tool_call>"
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    start, middle, end = parts_of(AnswerParser(False, TOOLS), chunks)
    assert (start, end) == (CallStart(0, "f"), CallEnd(0))
    assert json.loads(middle.text) == arguments


def test_several_calls_are_numbered_and_spaces_between_them_are_dropped() -> None:
    text = rendered([{"name": "get", "arguments": {"city": "Graz", "days": 2}}, {"name": "get_more"}], "So:")
    assert parse(text + "\n") == [
        Content("So:"),
        *call(0, "get", '{"city": "Graz", "days": 2}'),
        *call(1, "get_more", "{}"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>get\n{"city": "Graz"}</tool_call>',
        "<tool_call>\nget\n<parameter=city>\nGraz\n</parameter>\n</tool_call>",
        "<function=get>\n<parameter=city>Graz</parameter>\n</function>",
        '<tool_call><function=get>{"city": "Graz"}</function></tool_call>',
        '<tool_call>{"function": {"name": "get", "parameters": {"city": "Graz"}}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"city": "Graz"}}',
    ],
)
def test_variants_of_a_call(text: str) -> None:
    assert parse(text) == call(0, "get", '{"city": "Graz"}')


def test_a_call_of_an_unknown_tool_is_a_call_for_the_client_to_refuse() -> None:
    assert parse("<tool_call>\n<function=other>\n</function>\n</tool_call>") == call(0, "other", "{}")


@pytest.mark.parametrize(
    "text",
    ["A <tool_call> is a tag.", "<tool_call>other</tool_call>", "<function=other>", '<tool_call>{"name": 3}', "a\n\n "],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert parse(text) == [Content(text)]


def test_a_call_that_breaks_off_has_no_end() -> None:
    text = "<tool_call>\n<function=get>\n<parameter=city>\nGra"
    assert parse(text) == [CallStart(0, "get"), CallArguments(0, '{"city": "Gra')]


# Types


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"$ref": "#/$defs/flag"}, "false", False),
        ({"$ref": "#/$defs/loop"}, "text", "text"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "plain", "plain"),
        (None, "3", 3),
        ({"type": 5}, "x", "x"),
    ],
)
def test_arguments_are_typed(schema: Any, text: str, value: Any) -> None:
    parameters = Parameters(
        {"properties": {"x": schema}, "$defs": {"flag": {"type": "boolean"}, "loop": {"$ref": "#/$defs/loop"}}}
    )
    result = parameters.value("x", text)
    assert (result, type(result)) == (value, type(value))


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(), st.sampled_from(["string", "#/properties/x", "#", "#/"])),
        lambda child: st.one_of(
            st.lists(child, max_size=3),
            st.dictionaries(st.sampled_from(["type", "anyOf", "enum", "$ref", "properties", "x"]), child, max_size=3),
        ),
    ),
    st.text(),
)
def test_no_schema_and_no_text_can_break_it(schema: Any, text: str) -> None:
    json.dumps(Parameters(schema).value("x", text))
