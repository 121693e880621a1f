"""Latency of one batch. Prompts are random token ids and every answer has one length, so that two runs do the same work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.benchmarking.checks import check_at_least
from jaxinfer.config import option
from jaxinfer.request import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyOptions:
    """One batch, over and over."""

    input_len: int = option(32, "tokens per prompt")
    output_len: int = option(128, "tokens per answer")
    batch_size: int = option(8, "prompts at once")
    num_warmup: int = option(2, "rounds before the measured ones")
    num_iters: int = option(10, "measured rounds")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "input_len", "output_len", "batch_size", "num_iters")
        check_at_least(self, 0, "num_warmup")


def summarise(seconds: Sequence[float]) -> dict[str, float]:
    """`avg_latency` and `p10_latency` to `p99_latency`, in seconds (linear interpolation between measurements)."""
    import numpy as np  # here, as the command line reads this file's options without it

    percentiles = np.percentile(np.asarray(seconds, np.float64), PERCENTILES)
    return {"avg_latency": math.fsum(seconds) / len(seconds)} | {
        f"p{rank}_latency": float(value) for rank, value in zip(PERCENTILES, percentiles, strict=True)
    }


def random_prompts(vocab_size: int, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids, others for each seed: equal ones would be found in the prefix cache."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, vocab_size, (num_prompts, num_tokens)).tolist()


def measure_latency(llm: LLM, options: LatencyOptions, *, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Time a whole batch from submission to its last token.

    Raises:
        RequestError: when a prompt with its answer does not fit into the context.
    """
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    seconds = []
    for seed in range(options.num_warmup + options.num_iters):
        prompts = random_prompts(llm.description.vocab_size, options.batch_size, options.input_len, seed)
        started = clock()
        llm.generate(prompts, params, show_progress=False)
        seconds.append(clock() - started)
    figures = summarise(seconds[options.num_warmup :])
    return {
        "bench": "latency",
        "model": llm.description.model_name,
        **asdict(options),
        **figures,
        "output_tokens_per_second": options.batch_size * options.output_len / figures["avg_latency"],
    }
