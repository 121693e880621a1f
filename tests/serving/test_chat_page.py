"""The chat page in a real browser."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, async_playwright, expect

from tests.serving.chromium import chromium_path
from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import FakeEngine

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]

MARKDOWN = "A **bold** `word` <img src=x onerror=alert(1)>\n\n```python\nprint(1)\n```\n"


@pytest.fixture
async def server(serve: Serve) -> Served:
    return await serve(FakeEngine(step_seconds=0.004, max_model_len=4096))


@pytest.fixture(scope="session")
def browser_path() -> str | None:
    return chromium_path()


@pytest.fixture
async def page(server: Served, browser_path: str | None) -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=browser_path, args=CHROMIUM_FLAGS)
        page = await browser.new_page(viewport={"width": 390, "height": 760})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("console", lambda message: problems.append(message.text) if "Content Security Policy" in message.text else None)
        await page.goto(server.url)
        await expect(page.locator("#model")).to_have_text("fake-model")
        yield page
        await browser.close()
        assert problems == []


async def set_field(page: Page, name: str, value: str) -> None:
    await page.click("#toggle")
    await page.fill(f"#{name}", value)
    await page.click("#toggle")


async def ask(page: Page, text: str) -> None:
    await page.fill("#input", text)
    await page.press("#input", "Enter")


async def test_an_answer_is_streamed_and_shown_as_text(page: Page):
    # The fake engine repeats the prompt: "user:" + the question + "\nassistant:".
    await set_field(page, "max-tokens", str(len("user:" + MARKDOWN)))
    await ask(page, MARKDOWN)
    await page.wait_for_selector(".assistant:not(.busy)")
    assert await page.inner_text(".assistant strong") == "bold"
    assert await page.inner_text(".assistant p code") == "word"
    assert await page.inner_text(".assistant pre code") == "print(1)"
    assert "<img src=x onerror=alert(1)>" in await page.inner_text(".assistant")
    assert await page.locator(".message img").count() == 0
    facts = await page.inner_text(".assistant .facts")
    assert "first token" in facts
    assert "tokens/s" in facts
    assert await page.evaluate("document.documentElement.scrollWidth") == 390


async def test_the_conversation_goes_along(page: Page, server: Served):
    await set_field(page, "max-tokens", "7")
    await ask(page, "one")
    await page.wait_for_selector(".assistant:not(.busy)")
    await ask(page, "two")
    await page.wait_for_selector(".assistant:not(.busy) >> nth=1")
    assert bytes(server.engine.requests_seen[1].prompt_token_ids) == b"user:one\nassistant:user:on\nuser:two\nassistant:"
    await page.click("#new")
    assert await page.locator(".message").count() == 0
    await ask(page, "three")
    await page.wait_for_selector(".assistant:not(.busy)")
    assert bytes(server.engine.requests_seen[2].prompt_token_ids) == b"user:three\nassistant:"


async def test_escape_stops_the_answer(page: Page, server: Served):
    await set_field(page, "max-tokens", "4000")
    await ask(page, "hello")
    await page.wait_for_selector(".busy .facts:not(:empty)")
    await page.keyboard.press("Escape")
    await page.wait_for_selector(".assistant:not(.busy)")
    assert "stopped" in await page.inner_text(".assistant .facts")
    assert await page.is_visible("#send")
    await page.wait_for_timeout(200)
    assert len(server.engine.aborted) == 1


async def test_an_error_is_shown_and_can_be_tried_again(page: Page):
    await set_field(page, "temperature", "900")
    await ask(page, "hello")
    await page.wait_for_selector(".error")
    assert "temperature" in await page.inner_text(".error span")
    await set_field(page, "temperature", "1")
    await set_field(page, "max-tokens", "5")
    await page.click(".error button")
    await page.wait_for_selector(".assistant:not(.busy) .facts:not(:empty)")
    assert await page.locator(".error").count() == 0
    assert await page.locator(".user").count() == 1
