"""The scheduler's own time per step, without a model: 256 sequences running and 10,000 waiting; a table, then one JSON line.

`python benchmarks/scheduler_time.py [--scheduling-policy fair] [--profile]`

Steady decode: contexts of 100 to 2,000 tokens, and prompts that enter as others end. What is timed is `schedule` and
`update`, one of each per step and one step ahead, as the engine calls them; what arrives is queued outside of that time. The
garbage collector runs as the server sets it. `cpu` figures count the thread's own time, which other
processes on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import time
from collections import deque
from typing import Any

import numpy as np

from jaxinfer.benchmarking.environment import describe_environment
from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.messages import SchedulerOutput, SeqId, StepOutput
from jaxinfer.request import GenerationRequest, RequestId, SamplingParams
from jaxinfer.simulation.options import SimulationOptions
from jaxinfer.simulation.server import build_server
from jaxinfer.simulation.timing import H200_LLAMA_8B
from jaxinfer.simulation.traces import ANSWER_TOKEN, END_TOKEN, Texts
from serving.garbage_collector import settle_garbage_collector

CONTEXTS = (100, 2000)
OUTPUTS = (100, 400)
NUM_BLOCKS = 60_000
PARAMS = SamplingParams(temperature=0.0, max_tokens=None)


class Bench:
    """A scheduler under steady load."""

    def __init__(self, args: argparse.Namespace):
        limits = SchedulerConfig(
            max_num_seqs=args.running, max_num_batched_tokens=4096, max_model_len=4096, scheduling_policy=args.scheduling_policy
        )
        cache = CacheConfig(num_kv_blocks=NUM_BLOCKS, prefix_caching=args.prefix_caching)
        self.scheduler = build_server(cache, limits, SimulationOptions(), H200_LLAMA_8B).scheduler
        self.num_waiting = args.waiting
        self.in_flight: deque[SchedulerOutput] = deque()
        self.num_outputs: dict[SeqId, int] = {}
        self.drawn = random.Random(0)
        self.texts = Texts(0, CONTEXTS[1])
        self.num_arrived = 0

    def fill(self) -> None:
        """Bring those who wait up to their number."""
        while self.scheduler.num_waiting < self.num_waiting:
            context, num_output_tokens = self.drawn.randint(*CONTEXTS), self.drawn.randint(*OUTPUTS)
            prompt = self.texts.text(self.num_arrived, max(1, context - num_output_tokens))
            request = GenerationRequest(
                request_id=RequestId(str(self.num_arrived)), prompt_token_ids=prompt, params=PARAMS, user=f"user-{self.num_arrived % 50}"
            )
            (seq,) = self.scheduler.add(request)
            self.num_outputs[seq.seq_id] = num_output_tokens
            self.num_arrived += 1

    def step(self) -> tuple[float, float]:
        """One step; returns wall and CPU seconds of the scheduler in it."""
        if len(self.in_flight) == 2:
            output = self.in_flight.popleft()
            sampled = StepOutput([self.sample(row) for row in output.scheduled])
            wall, cpu = time.perf_counter(), time.thread_time()
            updates = self.scheduler.update(output, sampled)
            spent = time.perf_counter() - wall, time.thread_time() - cpu
            for update in updates:
                if update.finish_reason is not None:
                    del self.num_outputs[update.seq_id]
            self.fill()
        else:
            spent = 0.0, 0.0
        wall, cpu = time.perf_counter(), time.thread_time()
        output = self.scheduler.schedule()
        spent = spent[0] + time.perf_counter() - wall, spent[1] + time.thread_time() - cpu
        assert output is not None
        self.in_flight.append(output)
        return spent

    def sample(self, row: Any) -> list[int]:
        if not row.is_sampling:
            return []
        return [ANSWER_TOKEN if row.num_output_tokens + 1 < self.num_outputs.get(row.seq_id, 0) else END_TOKEN]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--warm-up", type=int, default=600)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--scheduling-policy", choices=("fcfs", "priority", "fair"), default="priority")
    parser.add_argument("--prefix-caching", choices=("on", "off"), default="on")
    parser.add_argument("--profile", action="store_true", help="show where the time goes, instead of how much it is")
    args = parser.parse_args()
    bench = Bench(args)
    settle_garbage_collector()
    bench.fill()
    for _ in range(args.warm_up):
        bench.step()
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    spent, running = [], []
    for _ in range(args.steps):
        spent.append(bench.step())
        running.append(bench.scheduler.num_running)
    if args.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    milliseconds = np.asarray(spent) * 1e3
    figures: dict[str, float] = {}
    for name, column in (("wall", 0), ("cpu", 1)):
        values = milliseconds[:, column]
        figures |= {f"{name}_p50_ms": float(np.median(values)), f"{name}_p99_ms": float(np.quantile(values, 0.99))}
        figures |= {f"{name}_mean_ms": float(values.mean())}
    for name, value in figures.items():
        print(f"{name:14s} {value:8.3f}")
    counted = {"steps": args.steps, "mean_running": float(np.mean(running)), "waiting": bench.scheduler.num_waiting}
    settings = {"scheduling_policy": args.scheduling_policy, "prefix_caching": args.prefix_caching}
    print(json.dumps({"benchmark": "scheduler_time", **describe_environment(), **settings, **counted, **figures}))


if __name__ == "__main__":
    main()
