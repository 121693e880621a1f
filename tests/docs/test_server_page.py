"""docs/server.md names what the server has, no more and no less, and its example runs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from aiohttp import web

import serving
from serving import routes
from serving.errors import CONTEXT_LENGTH_EXCEEDED
from serving.protocol.chat import ChatBody
from serving.protocol.completions import CompletionBody
from serving.protocol.fields import IGNORED_FIELDS, UNSUPPORTED_FIELDS, GenerationBody
from tests.docs.pages import code_words, first_column, python_blocks, section
from tests.serving.conftest import served

PAGE = "server.md"
COMMON = set(GenerationBody.model_fields)


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("Both generation routes", COMMON),
        ("Chat only", set(ChatBody.model_fields) - COMMON),
        ("Completions only", set(CompletionBody.model_fields) - COMMON),
    ],
)
def test_tables_name_the_fields(heading: str, fields: set[str]) -> None:
    named = first_column(section(PAGE, heading))
    assert len(named) == len(set(named))
    assert set(named) == fields


@pytest.mark.parametrize(("heading", "fields"), [("Ignored", IGNORED_FIELDS), ("Refused", UNSUPPORTED_FIELDS)])
def test_lists_name_the_fields(heading: str, fields: frozenset[str]) -> None:
    assert sorted(code_words(section(PAGE, heading))) == sorted(fields)


def test_routes() -> None:
    there = {
        f"{route.method} {route.path.replace(':.+', '')}"
        for module in routes.ALL
        for route in module.routes
        if isinstance(route, web.RouteDef)
    }
    assert set(first_column(section(PAGE, "Routes"))) == there


async def test_metrics() -> None:
    async with served() as server:
        _, text = await server.get("/metrics")
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE "))
    # A histogram of this library also has a gauge of its own, the time it was made.
    there = {name: kind for name, kind in kinds.items() if not name.endswith("_created")}
    rows = [line.split("|")[1:3] for line in section(PAGE, "Metrics").splitlines() if line.startswith("| `")]
    assert {name.strip(" `"): kind.strip() for name, kind in rows} == there


def test_error_codes() -> None:
    """Every `code` that the server's source gives an error."""
    source = "".join(path.read_text(encoding="utf-8") for path in Path(serving.__file__).parent.rglob("*.py"))
    codes = {*re.findall(r'\bcode="(\w+)"', source), CONTEXT_LENGTH_EXCEEDED}
    table = [line.split("|")[2] for line in section(PAGE, "Errors").splitlines() if line.startswith("|")]
    assert {word for cell in table for word in code_words(cell)} - {"code"} == codes


async def test_openai_example(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = python_blocks(PAGE)
    async with served() as server:
        code = code.replace("http://127.0.0.1:8000", server.url)
        await asyncio.to_thread(exec, compile(code, PAGE, "exec"), {})
    # The fake engine says the prompt again and again.
    assert capsys.readouterr().out.endswith("Once upon a timeOnce upon a timeOnce upon a timeOnce upon a time")
