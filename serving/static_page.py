"""The pages of serving/static: each is one file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from aiohttp import web


@cache
def load_page(name: str) -> tuple[str, str]:
    """A page and its Content-Security-Policy, which allows just the script and style written in it."""
    html = (files("serving") / "static" / name).read_text(encoding="utf-8")

    def hashes(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def page_response(name: str) -> web.Response:
    """200 with a page, and headers that keep it to itself."""
    html, policy = load_page(name)
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return web.Response(text=html, content_type="text/html", headers=headers)
