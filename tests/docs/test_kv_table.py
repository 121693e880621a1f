"""docs/kv_memory.md says what was measured, all of it, and not with `--small`."""

from __future__ import annotations

from tests.docs.kv_table import PAGE, PARTS, START, newest, render


def test_page_is_what_was_measured() -> None:
    _, start, made = PAGE.read_text(encoding="utf-8").partition(START)
    assert start
    assert made.strip() == render().strip(), "run `python -m tests.docs.kv_table`"


def test_the_result_is_whole() -> None:
    result = newest()
    assert list(result["measured"]) == list(PARTS)
    assert not result["is_small"]
