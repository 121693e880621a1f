"""A sequence that had to give up its blocks comes back: swapped in from host memory, or computed again."""

from __future__ import annotations

import itertools
import time
from typing import Any

from jaxinfer import LLM, SamplingParams
from jaxinfer.request import GenerationRequest, RequestId

from .bench import SMALL_POOL, Bench, greedy, median, text_ids

LENGTHS = (16, 64, 128, 256, 512, 1024, 1500)
NUM_SEQUENCES, PROMPT_TOKENS, ANSWER_TOKENS = 32, 320, 192
NUM_OVERLOADS = 2
MODES = ("swap", "recompute")
_names = itertools.count()


def lengths(bench: Bench) -> tuple[int, ...]:
    return (64, 256) if bench.is_small else LENGTHS


def floor(bench: Bench) -> dict[str, Any]:
    """A swap in copies a block from host memory to staging and from there into the pool; computing again is a prefill."""
    machine = bench.machine
    swap = {length: machine.copy_seconds(length, 2) for length in lengths(bench)}
    recompute = {length: machine.prefill_seconds(length) for length in lengths(bench)}
    return {"swap_in_seconds": swap, "recompute_seconds": recompute, "ratio": {one: recompute[one] / swap[one] for one in swap}}


def measure(bench: Bench) -> dict[str, Any]:
    figures: dict[str, Any] = {"lengths": lengths(bench), "resume_seconds": {}, "preempt_seconds": {}, "overload": {}}
    llms = {}
    for mode in MODES:
        llm = bench.start(SMALL_POOL, prefix_caching="off", preemption=mode)
        if mode == "swap":
            limits = llm.engine.scheduler.tiers.limits
            figures["stated_break_even_tokens"] = {"swap": limits.min_swap_tokens, "fetch": limits.min_fetch_tokens}
        ids = text_ids(llm, max(LENGTHS))
        measured = {length: [preempt_and_resume(llm, ids[:length]) for _ in range(bench.repeats)] for length in lengths(bench)}
        figures["preempt_seconds"][mode] = {length: median([one for one, _ in pairs]) for length, pairs in measured.items()}
        figures["resume_seconds"][mode] = {length: median([one for _, one in pairs]) for length, pairs in measured.items()}
        bench.tell(f"  {mode}: resume {figures['resume_seconds'][mode]}")
        llms[mode] = llm
    for index in range(NUM_OVERLOADS):
        for mode in MODES if index % 2 else reversed(MODES):
            figures["overload"].setdefault(mode, []).append(overload(llms[mode], bench))
            bench.tell(f"  {mode}: overload {figures['overload'][mode][-1]}")
    for llm in llms.values():
        llm.close()
    return figures | judge(figures)


def judge(figures: dict[str, Any]) -> dict[str, Any]:
    """Swap's whole cost, storing included, against computing again; the engine's stated length must stand the test."""
    resume, preempt = figures["resume_seconds"], figures["preempt_seconds"]
    store = {length: max(0.0, preempt["swap"][length] - preempt["recompute"][length]) for length in figures["lengths"]}
    round_trip = {length: resume["swap"][length] + store[length] for length in figures["lengths"]}
    dearer = [length for length in figures["lengths"] if round_trip[length] >= resume["recompute"][length]]
    observed = min((length for length in figures["lengths"] if length > max(dearer, default=0)), default=None)
    stated = figures["stated_break_even_tokens"]["swap"]
    beyond = [length for length in figures["lengths"] if stated is not None and length >= stated]
    # The faster of a few runs in turn: what else the machine does only ever slows one down.
    speeds = {mode: max(run["output_tokens_per_second"] for run in runs) for mode, runs in figures["overload"].items()}
    return {
        "store_seconds": store,
        "round_trip_seconds": round_trip,
        "observed_break_even_tokens": observed,
        "overload_tokens_per_second": speeds,
        "overload_ratio": speeds["swap"] / speeds["recompute"],
        "holds": {
            "swap is cheaper at every length beyond the stated break-even": bool(beyond)
            and all(round_trip[length] < resume["recompute"][length] for length in beyond),
            "an overloaded pool gives more tokens with swap": speeds["swap"] > speeds["recompute"],
        },
    }


def preempt_and_resume(llm: LLM, prompt: list[int]) -> tuple[float, float]:
    """Seconds from the step that preempts to the next token of whoever caused it, and from admission to the victim's next token.

    The pool is filled from outside, so that the next block anybody needs is taken from the newer one of two sequences; its
    blocks come free again when the resume is to begin, and nobody else runs by then.
    """
    engine, pool = llm.engine, llm.engine.scheduler.pools.pools[0]
    # A sequence with bad words is never planned ahead, so after each of its tokens nothing of it is in flight.
    older = _add(llm, [1, 2, 3, 4, 5], bad_words=("qqq",))
    _step_until(llm, older)
    victim = _add(llm, prompt)
    _step_until(llm, victim)
    taken = pool.allocate(pool.num_available)
    assert taken is not None
    num_preemptions = engine.scheduler.num_preemptions
    started, has_advanced = time.perf_counter(), False
    while engine.scheduler.num_preemptions == num_preemptions:
        started = time.perf_counter()
        has_advanced = any(delta.request_id == older for delta in engine.step())
    if not has_advanced:
        _step_until(llm, older)
    preempted = time.perf_counter() - started
    _step_until(llm, older)
    pool.release(taken)
    engine.abort(older)
    started = time.perf_counter()
    _step_until(llm, victim)
    resumed = time.perf_counter() - started
    engine.abort(victim)
    engine.scheduler.check()
    return preempted, resumed


def _add(llm: LLM, prompt: list[int], **options: Any) -> RequestId:
    request_id = RequestId(f"preemption-{next(_names)}")
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, **options)
    llm.engine.add_request(GenerationRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=params))
    return request_id


def _step_until(llm: LLM, request_id: RequestId) -> None:
    """Until a request gets its next token."""
    while not any(delta.request_id == request_id for delta in llm.engine.step()):
        pass


def overload(llm: LLM, bench: Bench) -> dict[str, Any]:
    """32 sequences that want 512 tokens each, in a pool for 10 of them."""
    count, answer_tokens = (14, 160) if bench.is_small else (NUM_SEQUENCES, ANSWER_TOKENS)
    ids = text_ids(llm, count * PROMPT_TOKENS)
    counters = llm.engine.scheduler.counters
    before = llm.engine.scheduler.num_preemptions, counters.num_swapped_in_bytes, counters.num_recomputed_tokens
    started = time.perf_counter()
    greedy(llm, [ids[index * PROMPT_TOKENS : (index + 1) * PROMPT_TOKENS] for index in range(count)], answer_tokens)
    elapsed = time.perf_counter() - started
    return {
        "sequences": count,
        "output_tokens_per_second": count * answer_tokens / elapsed,
        "elapsed_seconds": elapsed,
        "preemptions": llm.engine.scheduler.num_preemptions - before[0],
        "swapped_in_bytes": counters.num_swapped_in_bytes - before[1],
        "recomputed_tokens": counters.num_recomputed_tokens - before[2],
    }
