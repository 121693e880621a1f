"""A streaming load client: many requests with random prompts against a server, and what they felt like."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxinfer.errors import ConfigError
from serving.load_options import LoadOptions

FALLBACK_VOCAB_SIZE = 30_000
FIRST_ORDINARY_ID = 256
"""Ids below are special tokens or single bytes in most vocabularies."""


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it, in seconds."""

    num_prompt_tokens: int
    num_tokens: int = 0
    first_token_seconds: float = 0.0
    end_to_end_seconds: float = 0.0
    gaps_seconds: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def per_token_seconds(self) -> float:
        """Mean time of a token after the first."""
        return (self.end_to_end_seconds - self.first_token_seconds) / max(self.num_tokens - 1, 1)


async def run_load(options: LoadOptions, *, on_done: Callable[[RequestRecord], None]) -> dict[str, Any]:
    """Send the load and return its figures, named as `vllm bench serve` names them.

    Raises:
        ConfigError: when there is no server at base_url, or it lists no model.
    """
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=options.timeout)
    base_url = options.base_url.rstrip("/")
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        model, vocab_size = await _find_model(session, base_url, options)
        compiles_before = await _read_recompiles(session, base_url)
        started = time.perf_counter()
        records = await _send_all(session, base_url, model, vocab_size, options, on_done)
        duration = time.perf_counter() - started
        compiles_after = await _read_recompiles(session, base_url)
    recompiles = None if compiles_before is None or compiles_after is None else int(compiles_after - compiles_before)
    return {
        "model": model,
        **figures(records, duration),
        "jaxinfer_recompiles_total": compiles_after if compiles_after is None else int(compiles_after),
        "recompiles_during_run": recompiles,
    }


def figures(records: Sequence[RequestRecord], duration_seconds: float) -> dict[str, Any]:
    """Throughputs per second and mean, median and p99 in milliseconds over the requests that completed."""
    done = [record for record in records if record.error is None]
    total_input, total_output = sum(r.num_prompt_tokens for r in done), sum(r.num_tokens for r in done)
    values: dict[str, Any] = {
        "duration": duration_seconds,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input": total_input,
        "total_output": total_output,
        "request_throughput": len(done) / duration_seconds,
        "output_throughput": total_output / duration_seconds,
        "total_token_throughput": (total_input + total_output) / duration_seconds,
    }
    samples = {
        "ttft": [r.first_token_seconds for r in done],
        "tpot": [r.per_token_seconds for r in done if r.num_tokens > 1],
        "itl": [gap for r in done for gap in r.gaps_seconds],
        "e2el": [r.end_to_end_seconds for r in done],
    }
    for name, seconds in samples.items():
        values[f"mean_{name}_ms"] = 1e3 * statistics.fmean(seconds) if seconds else None
        values[f"median_{name}_ms"] = 1e3 * statistics.median(seconds) if seconds else None
        values[f"p99_{name}_ms"] = 1e3 * _percentile(seconds, 0.99) if seconds else None
    return values


def _percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values, as numpy does it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


async def _find_model(session: aiohttp.ClientSession, base_url: str, options: LoadOptions) -> tuple[str, int]:
    try:
        async with session.get(f"{base_url}/v1/models") as response:
            body = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigError(f"no server answers at {base_url}: {error}", option="--base-url") from error
    cards = body.get("data") if isinstance(body, dict) else None
    if not cards:
        message = body.get("error", {}).get("message", "") if isinstance(body, dict) else ""
        raise ConfigError(f"the server at {base_url} lists no model {message}".strip(), option="--base-url")
    card = next((card for card in cards if card["id"] == options.model), cards[0])
    return options.model or card["id"], card.get("vocab_size") or FALLBACK_VOCAB_SIZE


async def _read_recompiles(session: aiohttp.ClientSession, base_url: str) -> float | None:
    """None from a server that does not count them."""
    async with session.get(f"{base_url}/metrics") as response:
        text = await response.text()
    found = re.search(r"^jaxinfer_recompiles_total (\S+)", text, re.MULTILINE)
    return None if found is None else float(found[1])


async def _send_all(
    session: aiohttp.ClientSession,
    base_url: str,
    model: str,
    vocab_size: int,
    options: LoadOptions,
    on_done: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    rng = random.Random(options.seed)
    in_flight = asyncio.Semaphore(options.max_concurrency)
    low = min(FIRST_ORDINARY_ID, vocab_size // 2)

    async def send(prompt: list[int]) -> RequestRecord:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": options.random_output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with in_flight:
            record = await _send_one(session, f"{base_url}/v1/completions", body, len(prompt))
        on_done(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for _ in range(options.num_prompts):
            prompt = [rng.randrange(low, vocab_size) for _ in range(options.random_input_len)]
            tasks.append(group.create_task(send(prompt)))
            if math.isfinite(options.request_rate):
                await asyncio.sleep(rng.expovariate(options.request_rate))
    return [task.result() for task in tasks]


async def _send_one(session: aiohttp.ClientSession, url: str, body: dict[str, Any], num_prompt_tokens: int) -> RequestRecord:
    record = RequestRecord(num_prompt_tokens)
    started = last = time.perf_counter()
    is_done = False
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                record.error = f"status {response.status}: {(await response.text())[:200]}"
                return record
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                    break
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    record.error = str(event["error"].get("message"))[:200]
                    return record
                if event.get("usage"):
                    record.num_tokens = event["usage"]["completion_tokens"]
                if event.get("choices"):
                    if record.first_token_seconds == 0.0:
                        record.first_token_seconds = now - started
                    else:
                        record.gaps_seconds.append(now - last)
                    last = now
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:200]
        return record
    record.end_to_end_seconds = last - started
    if not is_done or record.num_tokens == 0:
        record.error = "the stream ended early"
    return record
