"""The page that draws the KV blocks, in a real browser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, async_playwright, expect

from tests.serving.chromium import chromium_path
from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import MODEL_NAME, FakeEngine
from tests.serving.test_chat_page import CHROMIUM_FLAGS
from tests.serving.test_connections import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

# The colour of the middle of a block's cell, and those of the legend.
PIXEL = """(block) => {
  const canvas = document.querySelector("canvas"), cell = Number(canvas.dataset.cell), columns = Number(canvas.dataset.columns);
  const scale = canvas.width / canvas.clientWidth, middle = (n) => Math.floor((n + .4) * cell * scale);
  const at = canvas.getContext("2d").getImageData(middle((block - 1) % columns), middle(Math.floor((block - 1) / columns)), 1, 1);
  return `rgb(${at.data[0]}, ${at.data[1]}, ${at.data[2]})`;
}"""
LEGEND = """() => Object.fromEntries(["free", "cached", "one", "shared"].map(
  (name) => [name, getComputedStyle(document.querySelector(`.legend .${name}`)).backgroundColor]))"""


@asynccontextmanager
async def opened(server: Served, **options: str) -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path(), args=CHROMIUM_FLAGS)
        page = await browser.new_page(viewport={"width": 1100, "height": 800}, **options)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if "Content Security Policy" in message.text else None)
        await page.goto(server.url + "/debug/kv")
        yield page
        await browser.close()
        assert problems == []


@asynccontextmanager
async def two_running(server: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Two requests that have started and stay where they are: blocks 1, 2, 3, 4 and 1, 5, 6, 7."""
    server.engine.num_cached_blocks = 3
    prompts = ["a" * 49, "b" * 49]
    tasks = [
        asyncio.create_task(server.complete(prompt, request_id=f"r{k}", max_tokens=400, ignore_eos=True))
        for k, prompt in enumerate(prompts)
    ]
    await wait_until(lambda: server.engine.snapshot().num_kv_blocks_held >= 7)
    monkeypatch.setattr(server.engine, "step", lambda: time.sleep(0.02) or [])
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
async def test_blocks_have_the_colours_of_their_states(serve: Serve, monkeypatch: pytest.MonkeyPatch, color_scheme: str):
    server = await serve(FakeEngine(step_seconds=0.2), debug_routes="on")
    async with two_running(server, monkeypatch), opened(server, color_scheme=color_scheme) as page:
        await page.wait_for_selector("#rows tr >> nth=1")
        legend = await page.evaluate(LEGEND)
        assert len(set(legend.values())) == 4
        for block, state in ((1, "shared"), (2, "one"), (7, "one"), (30, "free"), (61, "free"), (62, "cached"), (64, "cached")):
            assert await page.evaluate(PIXEL, block) == legend[state], block
        assert MODEL_NAME in await page.inner_text("#status")
        assert await page.inner_text("#n-cached") == "3"
        assert await page.inner_text("#n-shared") == "1"
        assert await page.evaluate("document.documentElement.scrollWidth") == 1100


async def test_a_click_on_a_sequence_makes_its_blocks_stand_out(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    server = await serve(FakeEngine(step_seconds=0.2), debug_routes="on")
    async with two_running(server, monkeypatch), opened(server) as page:
        await page.click("#rows tr:nth-child(2) button")
        await page.wait_for_selector("#rows tr.chosen")
        legend = await page.evaluate(LEGEND)
        for block, state in ((1, "shared"), (5, "one"), (6, "one")):
            assert await page.evaluate(PIXEL, block) == legend[state], block
        for block, state in ((2, "one"), (3, "one"), (30, "free"), (64, "cached")):
            assert await page.evaluate(PIXEL, block) != legend[state], block
        await page.keyboard.press("Escape")
        await page.wait_for_selector("#rows:not(:has(.chosen))")
        assert await page.evaluate(PIXEL, 2) == legend["one"]


async def test_a_block_tells_who_holds_it(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    server = await serve(FakeEngine(step_seconds=0.2), debug_routes="on")
    async with two_running(server, monkeypatch), opened(server) as page:
        await page.wait_for_selector("#rows tr >> nth=1")
        cell = int(await page.get_attribute("canvas", "data-cell"))
        await page.hover("canvas", position={"x": cell // 2, "y": cell // 2})
        await expect(page.locator("#block")).to_contain_text("Block 1: ")
        said = await page.inner_text("#block")
        assert "held by 2 sequences, findable by its prefix" in said
        assert "cmpl-r0, cmpl-r1" in said
        assert await page.locator("#rows tr.holds").count() == 2
        await page.click("canvas", position={"x": cell * 4 + cell // 2, "y": cell // 2})
        await page.mouse.move(0, 0)
        await expect(page.locator("#block")).to_have_text("Block 5: held by 1 sequence — cmpl-r1")
        await page.focus("canvas")
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator("#block")).to_have_text("Block 4: held by 1 sequence — cmpl-r0")


async def test_it_looks_every_second_but_not_while_hidden(serve: Serve):
    server = await serve(debug_routes="on")
    async with opened(server) as page:
        await wait_until(lambda: server.engine.num_maps >= 3)
        await page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await page.wait_for_timeout(300)  # A request that was under way.
        seen = server.engine.num_maps
        await page.wait_for_timeout(2500)
        assert server.engine.num_maps == seen
        await page.evaluate("Object.defineProperty(document, 'hidden', {value: false})")
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await wait_until(lambda: server.engine.num_maps >= seen + 2)


async def test_it_asks_for_the_key_and_sends_it(serve: Serve):
    server = await serve(debug_routes="on", api_key="secret")
    async with opened(server) as page:
        await page.wait_for_selector("#status.bad")
        assert "API key" in await page.inner_text("#status")
        await page.fill("#key", "secret")
        await page.press("#key", "Enter")
        await expect(page.locator("#status")).to_contain_text("live")
        assert await page.inner_text("#n-free") == "64"
