"""Rendering as Hugging Face does it, messages that are wrong, and templates that would not end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer import chat_template
from jaxinfer.chat_template import ChatTemplate
from jaxinfer.errors import RequestError

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for m in messages %}{{ m['role'] + ':' + m.content }}{% endfor %}", "user:hi"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ bos_token }}{{ missing }}{% if tools is defined %}t{% endif %}", "<s>"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ range(2, 9)[::-1] | list | length }}{{ range(3) | length }}{{ 2 in range(3) }}", "73True"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ '-' * 3 + 'x' }}{{ 2 ** 3 }}{{ messages[0].content.strip().split('i')[0] }}", "---x8h"),
    ],
)
def test_rendering(source: str, text: str) -> None:
    assert ChatTemplate(source).render(USER, bos_token="<s>") == text


def test_text_parts_are_joined_and_other_fields_are_kept() -> None:
    source = "{% for m in messages %}[{{ m.content }}|{{ m.name }}|{{ m.tool_calls | length }}]{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"function": {"name": "f"}}]
    messages = [{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert ChatTemplate(source).render(messages) == "[a\nb|x|0][||1]"


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "non-empty"),
        (None, "non-empty"),
        ("hi", "non-empty"),
        ({"role": "user", "content": "hi"}, "non-empty"),
        ([5], r"messages\[0\]"),
        ([{}], r"messages\[0\]\.role"),
        ([*USER, {"role": "zz", "content": "x"}], r"messages\[1\]\.role.*'zz'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "assistant", "content": None}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": []}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "zz"}]}], r"messages\[0\]\.content.*zz"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"messages\[0\]\.content"),
    ],
)
def test_wrong_messages_are_refused(messages: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        ChatTemplate("{{ messages }}").render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{% if %}", "not valid Jinja"),
        ("{{ x | nope }}", "not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ missing.field }}", "undefined"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ raise_exception('') }}", "TemplateError"),
    ],
)
def test_faults_of_a_template_are_request_errors(source: str, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        ChatTemplate(source).render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{% for i in range(90000) %}{{ '%0200d' % i }}{% endfor %}", "4194304 characters"),
        ("{{ 'x' * 9999999 }}", "4194304 characters"),
        ("{{ 9999999 * [1] }}", "4194304 characters"),
        ("{{ 9 ** 999999 }}", "powers"),
        ("{{ range(10 ** 9) | list }}", "[Rr]ange"),
    ],
)
def test_size_is_bounded(source: str, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "body",
    [
        "{% set r = [1] * 99999 %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% continue %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n) ~ m(n) }}{% endmacro %}{{ m(1) }}",
        "{{ messages[0] }}" * 9,
        "{{ messages }}" * 10,
    ],
)
def test_time_is_bounded(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that only counts how often it is asked: the test takes no time and depends on none. The limit is 9 questions.
    ticks = (count / 9 for count in range(10**9))
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * chat_template.MAX_RENDER_SECONDS)
    monkeypatch.setattr(chat_template, "time", clock)
    with pytest.raises(RequestError, match="limit of 5 s"):
        ChatTemplate(body).render(USER)
