"""Chat: the renderer against transformers', our template against the family's rules, templates that mean harm."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpsmith.errors import BadFile, BadRequest
from warpsmith.model import sandbox
from warpsmith.model.chat import declared_sampling, default_template, render

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "description": "<b> & é", "parameters": {"type": "object"}}}


def call(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


LONG = [
    {"role": "system", "content": " be kind\n"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "<think>\nold thought\n</think>\n\nold answer"},
    {"role": "user", "content": [{"type": "text", "text": "sec"}, {"type": "text", "text": "ond "}]},
    {
        "role": "assistant",
        "reasoning_content": "look it up ",
        "content": "One moment.",
        "tool_calls": [call("look", {"n": 3, "s": "two\nlines", "l": [1, {"é": None}]}), call("rest", {})],
    },
    {"role": "tool", "content": "r1"},
    {"role": "tool", "content": "r2"},
    {"role": "assistant", "content": "", "tool_calls": [call("look", {"d": {"k": True}})]},
    {"role": "tool", "content": "r3"},
]

# Uses what chat templates of several families use, to compare environments rather than prompts.
EXERCISE = """
{%- macro shout(text, times=2) -%}
    {{ text | upper }}{{ '!' * times }}
{%- endmacro -%}
{%- set ns = namespace(count=0, seen=[]) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- set ns.seen = ns.seen + [message.role] %}
    {{ loop.index0 ~ ':' ~ shout(message.role) }} {{ message['content'] | default('none', true) | trim }}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function.arguments | tojson(indent=2) }}{{ tool_call | tojson | length }}
            {%- for key, value in tool_call.function.arguments | items | sort %}
                {{- key }}={{ value if value is string else value | tojson(sort_keys=true, separators=(',', ':')) }};
            {%- endfor %}
        {%- endfor %}
    {%- endif %}
    {%- if 'x' in (message.content or '') or ns.count > 3 %}{% break %}{% endif %}
{% endfor %}
{% generation %}{{ ns.seen | join(', ') }}{% endgeneration %}
{{ 'a,b,c'.split(',')[-1].strip().title() }} {{ '%s-%03d' % ('n', 7) }} {{ '{:>4}'.format('r') }} {{ [3, 1, 2] | sort }}
{{ messages[::-1][0].role }} {{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | list }}
{{ tools | tojson if tools else 'no tools' }} {{ documents is none }} {{ enable_thinking is defined }} {{ flavour }}
{{ none }} {{ undefined_name }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 5 }} {{ 'é<&>' | tojson }} {{ 1.5 | round | int }}
{% if add_generation_prompt %}GO{% endif %}
"""


@pytest.fixture(scope="module")
def transformers_render():
    module = pytest.importorskip("transformers.utils.chat_template_utils")

    def render(template, messages, **options):
        return module.render_jinja_template([messages], chat_template=template, **options)[0][0]

    return render


@pytest.mark.parametrize("template", [EXERCISE, default_template(), default_template(thinking=False)])
@pytest.mark.parametrize("messages", [[USER], LONG, LONG[:4], LONG[3:]])
@pytest.mark.parametrize(
    "options", [{}, {"tools": [TOOL]}, {"enable_thinking": False}, {"add_generation_prompt": False}]
)
def test_the_environment_is_that_of_transformers(transformers_render, template, messages, options):
    options = {"add_generation_prompt": True, "flavour": "plain", **options}
    flat = [
        {**m, "content": "".join(p["text"] for p in m["content"])} if isinstance(m["content"], list) else m
        for m in messages
    ]
    ours = render(template, messages, **options)
    assert ours == transformers_render(template, flat, **options)
    assert "hi" in ours or "sec" in ours


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.none() | st.text(max_size=20)},
            optional={"reasoning_content": st.text(max_size=8)},
        ),
        max_size=6,
    )
)
def test_random_conversations_as_transformers(transformers_render, messages):
    messages = [*messages, USER]
    ours = render(default_template(), messages)
    assert ours == transformers_render(default_template(), messages, add_generation_prompt=True)
    assert ours.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n")


# Our own template


def test_one_question():
    assert render(default_template(), [USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert render(default_template(), [USER], add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("default", "asked", "thinks"),
    [(True, None, True), (True, False, False), (True, True, True), (False, None, False), (False, True, True)],
)
def test_thinking(default, asked, thinks):
    prompt = render(default_template(default), [USER], enable_thinking=asked)
    end = "<think>\n" if thinks else "<think>\n\n</think>\n\n"
    assert prompt.endswith("<|im_start|>assistant\n" + end)


def test_a_long_conversation():
    assert render(default_template(), LONG) == (
        "<|im_start|>system\nbe kind<|im_end|>\n"
        "<|im_start|>user\nfirst<|im_end|>\n"
        "<|im_start|>assistant\nold answer<|im_end|>\n"
        "<|im_start|>user\nsecond<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nlook it up\n</think>\n\nOne moment.\n\n"
        "<tool_call>\n<function=look>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\ntwo\nlines\n</parameter>\n"
        '<parameter=l>\n[1, {"é": null}]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=rest>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        '<tool_call>\n<function=look>\n<parameter=d>\n{"k": true}\n</parameter>\n</function>\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nr3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_tools_come_before_the_system_text():
    prompt = render(default_template(), LONG[:2], tools=[TOOL, TOOL])
    line = json.dumps(TOOL, ensure_ascii=False)
    head = "<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
    assert prompt.startswith(f"{head}{line}\n{line}\n</tools>\n\n")
    assert "\n\nbe kind<|im_end|>\n<|im_start|>user\n" in prompt
    assert render(default_template(), [USER], tools=[]) == render(default_template(), [USER])


def test_a_tool_response_is_not_a_question():
    response = {"role": "user", "content": "<tool_response>\n1\n</tool_response>"}
    answer = {"role": "assistant", "content": "done"}
    assert "<think>\n\n</think>\n\ndone" in render(default_template(), [USER, response, answer])
    with pytest.raises(BadRequest, match="no message from the user"):
        render(default_template(), [response, answer])


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "system", "content": "x"}], [USER, {"role": "system", "content": "x"}], [USER, {"role": "cat"}]],
)
def test_conversations_our_template_refuses(messages):
    with pytest.raises(BadRequest, match="refuses this conversation"):
        render(default_template(), messages)


# Messages


def test_arguments_may_be_a_string_of_json():
    def ask(arguments):
        return render(
            default_template(), [USER, {"role": "assistant", "content": "", "tool_calls": [call("f", arguments)]}]
        )

    assert ask('{"a": [1]}') == ask({"a": [1]})
    assert ask("") == ask({})
    for arguments in ("{", "[1]", 3, ["a"]):
        with pytest.raises(BadRequest, match="Message 1 has a tool call"):
            ask(arguments)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_names_of_reasoning(field):
    prompt = render(default_template(), [USER, {"role": "assistant", "content": "a", field: "because"}])
    assert "<think>\nbecause\n</think>\n\na" in prompt


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "'text'"),
        ({"role": "user", "content": ["x"]}, "part of type None"),
        ({"role": "user", "content": 3}, "content of message 1"),
        ({"content": "x"}, "Message 1"),
        ("hello", "Message 1"),
        ({"role": "assistant", "tool_calls": [3]}, "Message 1"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "Message 1"),
        ({"role": "user", "content": "x", "extra": object()}, "not JSON"),
    ],
)
def test_messages_that_are_refused(message, named):
    with pytest.raises(BadRequest, match=named):
        render(default_template(), [USER, message])


def test_the_callers_messages_are_left_alone():
    before = copy.deepcopy(LONG)
    render(default_template(), LONG, tools=[TOOL])
    assert before == LONG


def test_extra_variables_and_the_date():
    assert render("{{ eos_token }}{{ strftime_now('%Y') | length }}", [USER], eos_token="<e>") == "<e>4"


# Templates that are broken or mean harm


@pytest.mark.parametrize("template", ["{% if %}", "{{ x", "{% for a in b %}", "{{ 1 | nothing }}"])
def test_broken_templates(template):
    with pytest.raises(BadFile, match="not valid at line 1"):
        render(template, [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10000000) }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    ],
)
def test_failing_templates(template):
    with pytest.raises(BadFile, match=r"The chat template (fails|is not valid)") as caught:
        render(template, [USER])
    assert "\n" not in str(caught.value)


GROW = "{% set ns = namespace(s='ab', n=9) %}{% for i in range(99) %}{% set ns.s = STEP %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 9999999999 }}",
        "{{ 9999999999 * [1] }}",
        GROW.replace("STEP", "ns.s + ns.s"),
        GROW.replace("STEP", "ns.s ~ ns.s"),
        GROW.replace("STEP", "ns.s.replace('a', 'aa').replace('b', 'bb')"),
        GROW.replace("STEP", "[ns.s, ns.s] | join"),
        GROW.replace("STEP", "'%s%s' % (ns.s, ns.s)"),
        GROW.replace("STEP", "'{0}{0}'.format(ns.s)"),
        GROW.replace("STEP", "(ns.s, ns.s)") + "{{ ns.s }}",
        GROW.replace("STEP", "[ns.s, ns.s]") + "{{ ns.s | tojson }}",
        GROW.replace("STEP", "[ns.s, ns.s]") + "{{ ns.s | trim }}",
        GROW.replace("STEP", "[ns.s, ns.s]") + "{{ ns.s == [ns.s] }}",
        "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = x %}{% endfor %}",
        "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ 9 ** 99999999 }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ 'a\t'.expandtabs(tabsize=999999999) }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ ('\n' * 9999) | indent(99999) }}",
        "{{ [1] | slice(9999999999) | list }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=999999999) }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{{ (['a' * 9999] * 99999) | join }}",
        "{{ ''.join(['a' * 9999] * 99999) }}",
        "{{ [1, 2] | tojson(indent=999999999) }}",
        "{{ 'x' }}" * 200_000,
    ],
)
def test_templates_without_end(template, monkeypatch):
    monkeypatch.setattr(sandbox, "_MAX_SECONDS", 1.0)
    with pytest.raises(BadFile, match="more work than a prompt needs"):
        render(template, [USER])


def test_long_conversations_are_within_the_budget():
    words = {"role": "user", "content": "word " * 100_000}
    answer = {"role": "assistant", "content": "x" * 500_000}
    assert len(render(default_template(), [words, answer] * 3)) > 2_900_000
    assert len(render(default_template(), [USER, {"role": "assistant", "content": "x"}] * 500)) > 30_000


# Sampling


def test_sampling_that_a_file_declares():
    assert declared_sampling() == {}
    declared = declared_sampling({"general.sampling.temp": 0.6, "general.sampling.top_k": 40, "general.name": "x"})
    assert declared == {"top_k": 40, "temperature": 0.6}
    for value in (-1, "20", True, float("nan"), [1]):
        with pytest.raises(BadFile, match=r"general\.sampling\.top_p"):
            declared_sampling({"general.sampling.top_p": value})
