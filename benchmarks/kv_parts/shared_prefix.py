"""Many requests that begin with the same long text: prefix cache on against off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jaxinfer import LLM
from jaxinfer.step_trace import StepTimes, StepTrace

from .bench import BLOCK_SIZE, LARGE_POOL, LEAST, Bench, greedy, text_ids

PREFIX_TOKENS = 1500
ANSWER_TOKENS = 24
WANTED_PREFILL_RATIO = 5.0
WANTED_THROUGHPUT_RATIO = 3.0
QUESTIONS = ("What is said about {}?", "Who is named beside {}, and why?", "Summarise what happens around {} in one sentence.")
SUBJECTS = ("the jury", "the mayor", "Atlanta", "the election", "the bonds", "the law", "the city", "the report", "the vote", "the court")


def num_requests(bench: Bench) -> int:
    return 6 if bench.is_small else 64


def floor(bench: Bench) -> dict[str, Any]:
    """Tokens that must be computed: off all of them; on the prefix once, then questions and what does not fill a block."""
    count, question = num_requests(bench), 14
    rest = question + PREFIX_TOKENS % BLOCK_SIZE
    machine = bench.machine
    off = count * machine.prefill_seconds(PREFIX_TOKENS + question)
    on = machine.prefill_seconds(PREFIX_TOKENS) + count * machine.prefill_seconds(rest, PREFIX_TOKENS - rest)
    return {"prefill_seconds_off": off, "prefill_seconds_on": on, "prefill_ratio": off / on}


def measure(bench: Bench) -> dict[str, Any]:
    figures: dict[str, Any] = {"requests": num_requests(bench), "prefix_tokens": PREFIX_TOKENS, "answer_tokens": ANSWER_TOKENS}
    for setting in ("on", "off"):
        llm = bench.start(LARGE_POOL, prefix_caching=setting, host_kv_bytes=0)
        figures[setting] = run(llm, num_requests(bench))
        llm.close()
        bench.tell(f"  prefix caching {setting}: {figures[setting]}")
    on, off = figures["on"], figures["off"]
    figures["prefill_ratio"] = off["prefill_seconds"] / on["prefill_seconds"]
    figures["first_tokens_ratio"] = off["all_first_tokens_seconds"] / on["all_first_tokens_seconds"]
    figures["throughput_ratio"] = on["output_tokens_per_second"] / off["output_tokens_per_second"]
    figures["holds"] = {
        f"prefill at least {WANTED_PREFILL_RATIO:g} times cheaper": figures["prefill_ratio"] >= WANTED_PREFILL_RATIO,
        f"throughput at least {WANTED_THROUGHPUT_RATIO:g} times": figures["throughput_ratio"] >= WANTED_THROUGHPUT_RATIO,
        "no prefill is faster than its floor": all(
            figures[setting]["prefill_seconds"] >= LEAST * floor(bench)[f"prefill_seconds_{setting}"] for setting in ("on", "off")
        ),
    }
    return figures


def run(llm: LLM, count: int) -> dict[str, Any]:
    """All requests at once.

    `all_first_tokens_seconds`: until the last request has its first token.
    """
    prefix = text_ids(llm, PREFIX_TOKENS)
    questions = [QUESTIONS[index % 3].format(SUBJECTS[index % 10]) + f" ({index})" for index in range(count)]
    prompts = [[*prefix, *llm.tokenizer.encode("\n" + question)] for question in questions]
    trace = llm.engine.trace = StepTrace()
    clock, started = time.monotonic(), time.perf_counter()
    outputs = greedy(llm, prompts, ANSWER_TOKENS)
    elapsed = time.perf_counter() - started
    llm.engine.trace = None
    return {
        "prefill_seconds": prefill_seconds(trace.steps),
        "all_first_tokens_seconds": max(output.timings.first_token for output in outputs) - clock,
        "elapsed_seconds": elapsed,
        "output_tokens_per_second": count * ANSWER_TOKENS / elapsed,
        "steps": len(trace.steps),
        "cached_share": sum(output.num_cached_tokens for output in outputs) / sum(map(len, prompts)),
    }


def prefill_seconds(steps: Sequence[StepTimes]) -> float:
    """Device time of the steps with more tokens than rows, which are those that compute prompts.

    What is decoded in the same steps counts, with the cache on and off.
    """
    seconds, last_ready = 0.0, 0.0
    for step in steps:
        if step.num_tokens > step.num_rows:
            seconds += step.ready - max(step.launch_begin, last_ready)
        last_ready = step.ready
    return seconds
