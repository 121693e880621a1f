"""Reads the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, heading: str) -> str:
    """What stands under a heading of any level, up to the next heading."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no section {heading!r}"
    return found[1]


def code_words(text: str) -> list[str]:
    """Everything in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def first_column(text: str) -> list[str]:
    """What the first column of a table names in backticks."""
    return [word for line in text.splitlines() if line.startswith("|") for word in code_words(line.split("|")[1])]


def python_blocks(page: str) -> list[str]:
    """The Python examples of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
