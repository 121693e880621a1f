"""Throughput of many requests that are all there from the start: continuous batching, and static batching beside it.

Static batching is what was there before: requests are taken in order of arrival in groups of max_num_seqs, a group is
prefilled and then decoded until its longest answer ends, and only then the next one starts. Rows whose own answer has
ended are still computed; their tokens are thrown away. Both run through the same engine and the same compiled steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxinfer.benchmarking.checks import check_at_least
from jaxinfer.benchmarking.kv_waste import KVWaste
from jaxinfer.benchmarking.lengths import BenchRequest, cut_to_context, draw_lengths, make_requests
from jaxinfer.config import option
from jaxinfer.request import GenerationRequest, RequestId, SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine import Engine
    from jaxinfer.llm import LLM

Group = Sequence[tuple[BenchRequest, int]]
"""Requests that are there at once, each with the number of tokens that are computed for it."""
OnTokens = Callable[[str, int, int], None]
"""Called after each step with what is being run, its wanted tokens so far, and how many there will be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputOptions:
    """Many requests, all there from the start, with lengths like ShareGPT's."""

    num_prompts: int = option(192, "requests")
    max_prompt_len: int = option(512, "tokens of the longest prompt; 1024 is ShareGPT as it is, other values scale every prompt")
    max_output_len: int = option(512, "tokens of the longest answer; 1024 is ShareGPT as it is, other values scale every answer")
    mix_seed: int = option(0, "seed of the lengths and of the prompts' token ids")
    compare: Literal["none", "static"] = option("none", "static: also run static batching and give the ratio")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_prompts", "max_prompt_len", "max_output_len")
        check_at_least(self, 0, "mix_seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """What one run did. Output tokens are the wanted ones; rates count no thrown away ones.

    `kv_waste_*` are of the blocks held, see KVWaste; `reserved_kv_waste_percent` is what the same sequences would have
    wasted with the context's length set aside for each, thrown away tokens taken as used.
    """

    elapsed_seconds: float
    requests_per_second: float
    total_tokens_per_second: float
    output_tokens_per_second: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_thrown_away_tokens: int
    num_steps: int
    num_preemptions: int
    mean_running_seqs: float
    kv_waste_percent: float
    kv_waste_blocks_per_seq: float
    max_kv_waste_blocks_per_seq: float
    reserved_kv_waste_percent: float


def measure_throughput(
    llm: LLM,
    options: ThroughputOptions,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_tokens: OnTokens = lambda what, done, total: None,
) -> dict[str, Any]:
    """Run the mix with continuous batching and, if asked for, with static batching.

    Returns the figures of continuous batching, `mix`, and with `compare="static"` also `static` (figures by the same
    names) and `ratio_to_static`, of wanted output tokens per second.
    """
    engine, description = llm.engine, llm.description
    drawn = draw_lengths(
        options.num_prompts, max_prompt_len=options.max_prompt_len, max_output_len=options.max_output_len, seed=options.mix_seed
    )
    lengths = cut_to_context(drawn, description.max_prompt_tokens + 1)
    requests = make_requests(lengths, vocab_size=description.vocab_size, seed=options.mix_seed)
    warm_up = BenchRequest(requests[0].prompt_token_ids, 1)
    BatchRun(engine, "warm-up", [[(warm_up, 1)]], on_tokens).run(clock)  # the first step pays for what is lazy
    continuous = BatchRun(engine, "continuous", [[(one, one.num_output_tokens) for one in requests]], on_tokens).run(clock)
    figures = {
        "bench": "throughput",
        "model": description.model_name,
        **asdict(options),
        "max_num_seqs": description.max_num_seqs,
        "mix": describe_mix(lengths) | {"num_cut_to_context": sum(old != new for old, new in zip(drawn, lengths, strict=True))},
        **asdict(continuous),
    }
    if options.compare == "static":
        static = BatchRun(engine, "static", static_groups(requests, description.max_num_seqs), on_tokens).run(clock)
        figures["static"] = asdict(static)
        figures["ratio_to_static"] = continuous.output_tokens_per_second / static.output_tokens_per_second
    return figures


def static_groups(requests: Sequence[BenchRequest], max_num_seqs: int) -> list[Group]:
    """Groups in order of arrival, the last one perhaps smaller; every row is computed for as long as its group's longest."""
    starts = range(0, len(requests), max_num_seqs)
    return [_to_the_longest(requests[start : start + max_num_seqs]) for start in starts]


def _to_the_longest(requests: Sequence[BenchRequest]) -> Group:
    longest = max(request.num_output_tokens for request in requests)
    return [(request, longest) for request in requests]


def describe_mix(lengths: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Mean, median and maximum of prompts and answers, in tokens."""
    import numpy as np

    described = {}
    for name, values in zip(("prompt", "output"), np.asarray(lengths).T, strict=True):
        described[f"mean_{name}_len"] = float(values.mean())
        described[f"median_{name}_len"] = float(np.median(values))
        described[f"max_{name}_len"] = int(values.max())
    return described


class BatchRun:
    """Runs groups of requests one after the other and counts; used once.

    Args:
        engine: idle.
        what: the run's name, for progress and request ids.
        groups: the requests of each group, each with the number of tokens that are computed for it: those beyond what
            it wants are thrown away. A request that reaches the end of the context first ends there.
        on_tokens: progress.
    """

    def __init__(self, engine: Engine, what: str, groups: Sequence[Group], on_tokens: OnTokens):
        self._engine = engine
        self._what = what
        self._groups = groups
        self._on_tokens = on_tokens
        self._waste = KVWaste(engine.scheduler.pools, reserved_tokens_per_seq=engine.description.max_model_len)
        self._missing: dict[RequestId, int] = {}
        self._num_wanted = sum(request.num_output_tokens for group in groups for request, _ in group)
        self._num_useful = 0
        self._num_computed = 0
        self._num_steps = 0

    def run(self, clock: Callable[[], float]) -> RunFigures:
        """Run it all.

        Raises:
            RequestError: when a prompt does not fit into the context.
        """
        num_preemptions = self._engine.scheduler.num_preemptions
        started = clock()
        for index, group in enumerate(self._groups):
            self._submit(index, group)
            while self._engine.has_work:
                self._step()
        return self._figures(clock() - started, self._engine.scheduler.num_preemptions - num_preemptions)

    def _submit(self, group_index: int, group: Group) -> None:
        for index, (request, max_tokens) in enumerate(group):
            request_id = RequestId(f"{self._what}-{group_index}-{index}")
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            # The runs have the same prompts: a salt of its own keeps each from the other's cached prefixes.
            self._engine.add_request(
                GenerationRequest(request_id=request_id, prompt_token_ids=request.prompt_token_ids, params=params, cache_salt=self._what)
            )
            self._missing[request_id] = request.num_output_tokens

    def _step(self) -> None:
        for delta in self._engine.step():
            num_new = sum(len(output.token_ids) for output in delta.outputs)
            num_useful = min(num_new, self._missing[delta.request_id])
            self._missing[delta.request_id] -= num_useful
            self._num_useful += num_useful
            self._num_computed += num_new
        self._num_steps += 1
        scheduler = self._engine.scheduler
        self._waste.observe(scheduler.num_running, scheduler.num_kv_tokens)
        self._on_tokens(self._what, self._num_useful, self._num_wanted)

    def _figures(self, elapsed_seconds: float, num_preemptions: int) -> RunFigures:
        num_prompt_tokens = sum(len(request.prompt_token_ids) for group in self._groups for request, _ in group)
        waste = self._waste
        return RunFigures(
            elapsed_seconds=elapsed_seconds,
            requests_per_second=len(self._missing) / elapsed_seconds,
            total_tokens_per_second=(num_prompt_tokens + self._num_useful) / elapsed_seconds,
            output_tokens_per_second=self._num_useful / elapsed_seconds,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=self._num_useful,
            num_thrown_away_tokens=self._num_computed - self._num_useful,
            num_steps=self._num_steps,
            num_preemptions=num_preemptions,
            mean_running_seqs=waste.mean_running_seqs,
            kv_waste_percent=waste.percent,
            kv_waste_blocks_per_seq=waste.blocks_per_seq,
            max_kv_waste_blocks_per_seq=waste.max_blocks_per_seq,
            reserved_kv_waste_percent=waste.reserved_percent,
        )
