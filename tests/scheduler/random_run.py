"""Random use of a scheduler in 24 settings: what is drawn is what users, the device and the disk may do at any moment."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.config import PreemptionMode, SchedulingPolicy
from jaxinfer.errors import RequestError
from jaxinfer.kv.disk_index import DiskIndex
from jaxinfer.kv.groups import KVGroupSpec
from jaxinfer.kv.tiers import TierLimits
from tests.scheduler.cases import FULL, LATENT, STOP, constant_hash, make_request, window_group
from tests.scheduler.replay import Harness

MAX_LIVING = 12
DOCUMENTS = tuple(tuple(random.Random(seed).choices(range(3, 24), k=64)) for seed in range(3))
SALTS = ("", "", "", "pepper")


@dataclass(frozen=True)
class Setting:
    """What a harness is made from, and how far planning runs ahead of the results.

    `pool` is the device's blocks in every group, as a multiple of what the longest sequence takes; 0: a single block.
    `host` and `disk` count blocks.
    """

    groups: tuple[KVGroupSpec, ...]
    block_size: int
    pool: float
    depth: int = 1
    host: int = 0
    disk: int = 0
    preemption: PreemptionMode = "auto"
    policy: SchedulingPolicy = "priority"
    max_model_len: int = 40
    max_num_seqs: int = 4
    extra_tokens: int = 12
    """Of a step, beside one for each sequence."""
    extra_rows: int = 4
    min_tokens_moved: int = 0
    faults: tuple[float, float] = (0.0, 0.0)
    """Shares of the disk's reads and writes that fail."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return (3, 5)[: len(self.groups)]

    def harness(self, seed: int, left_on_disk: Iterable[tuple[bytes, int]] = ()) -> Harness:
        """A harness that finds blocks of these keys and groups on its disk."""
        size = self.block_bytes
        entries = [(key, group, size[group]) for key, group in left_on_disk]
        num_blocks = max(1, int(self.pool * self.max_model_len / self.block_size))
        limits = TierLimits(
            host_slots=(self.host,) * len(size) if self.host else (),
            block_bytes=size,
            min_swap_tokens=self.min_tokens_moved,
            min_fetch_tokens=self.min_tokens_moved,
        )
        return Harness(
            groups=self.groups,
            block_size=self.block_size,
            num_blocks=(num_blocks,) * len(size),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_seqs + self.extra_tokens,
            max_num_logit_rows=self.max_num_seqs + self.extra_rows,
            scheduling_policy=self.policy,
            preemption=self.preemption,
            limits=limits,
            disk=DiskIndex(self.disk * max(size), entries) if self.disk else None,
            read_faults=self.faults[0],
            write_faults=self.faults[1],
            seed=seed,
            check_period=8,
            **self.options,
        )


WINDOW, WIDE = window_group(5), window_group(16)
CONSTANT = {"key_hash": constant_hash}
SETTINGS = (
    # The device alone.
    Setting((FULL,), 4, 1.6, depth=0),
    Setting((FULL,), 1, 1.3, depth=1, policy="fcfs", options=CONSTANT),
    Setting((FULL, WINDOW), 2, 1.5, depth=2, policy="fair"),
    Setting((LATENT,), 8, 2.5, depth=1, max_num_seqs=5, extra_tokens=0, extra_rows=0),
    Setting((FULL,), 8, 0, depth=1, policy="fcfs"),
    Setting((WINDOW,), 4, 0, depth=0),
    Setting((FULL, WIDE), 4, 1.4, depth=1, options={"prefix_caching": False}),
    Setting((WIDE,), 2, 0.6, depth=2, options=CONSTANT),
    # With host memory.
    Setting((FULL,), 4, 1.4, depth=0, host=3),
    Setting((FULL,), 4, 1.6, depth=1, host=40, preemption="swap", options=CONSTANT),
    Setting((FULL, WINDOW), 2, 1.3, depth=1, host=60, preemption="swap", policy="fcfs"),
    Setting((FULL,), 1, 1.4, depth=2, host=30, preemption="recompute", options=CONSTANT | {"long_prefill_token_threshold": 5}),
    Setting((LATENT, WIDE), 4, 1.4, depth=2, host=12, policy="fair", options={"max_num_partial_prefills": 1}),
    Setting((FULL,), 8, 1.0, depth=1, host=4, preemption="swap", policy="fair", max_num_seqs=3),
    Setting((FULL,), 2, 1.5, depth=1, host=30, preemption="swap", options={"prefix_caching": False}),
    Setting((WIDE,), 4, 0.7, depth=1, host=20, preemption="swap", min_tokens_moved=6),
    # With a disk, too.
    Setting((FULL,), 4, 1.4, depth=0, host=6, disk=60, policy="fcfs", options=CONSTANT),
    Setting((FULL,), 4, 1.3, depth=1, host=8, disk=2, faults=(0.2, 0.0)),
    Setting((FULL, WINDOW), 2, 1.2, depth=1, host=10, disk=200, preemption="swap", options=CONSTANT),
    Setting((FULL,), 2, 1.4, depth=2, host=12, disk=30, faults=(0.3, 0.0005), policy="fair"),
    Setting((LATENT,), 8, 2.0, depth=1, host=3, disk=40, faults=(1.0, 0.0), preemption="swap"),
    Setting((FULL, WIDE), 4, 1.3, depth=2, host=20, disk=12, faults=(0.1, 0.0), options=CONSTANT),
    Setting(
        (WIDE,), 2, 0.7, depth=1, host=9, disk=50, options=CONSTANT | {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 3}
    ),
    Setting((FULL,), 1, 1.3, depth=1, host=50, disk=100, max_model_len=24, min_tokens_moved=4, faults=(0.05, 0.0)),
)


class RandomRun:
    """Draws what happens next, one call or event at a time."""

    def __init__(self, setting: Setting, seed: int):
        self.setting, self.seed = setting, seed
        self.harness = setting.harness(seed)
        self.random = random.Random(seed)
        self.num_requests = 0

    def run(self, num_steps: int) -> None:
        """So many events, with a restart now and then, and everything that still waits to its end."""
        for number in range(1, num_steps + 1):
            self.step()
            if number % 64 == 0:
                self.harness.launch()
                self.harness.check_contents()
            if number % 1000 == 0:
                self.restart()
        self.harness.drain()

    def restart(self) -> None:
        """Another process, which has nothing from this one but what lies on disk."""
        self.harness.drain()
        self.harness.close()
        disk = self.harness.device.disk
        self.harness = self.setting.harness(self.seed, disk)
        self.harness.device.disk = disk

    def step(self) -> None:
        """One random event."""
        harness, draw = self.harness, self.random.random()
        if draw < 0.07:
            for _ in range(self.random.choice((1, 1, 1, 4))):
                self.add()
        elif draw < 0.075:
            self.abort()
        elif draw < 0.085:
            self.stop()
        elif draw < 0.26 and harness.device.outstanding:
            harness.acknowledge(self.random.choice(harness.device.outstanding))
        elif draw < 0.28 and harness.device.lost:
            harness.report_lost()
        elif len(harness.in_flight) > self.setting.depth or (draw < 0.32 and harness.in_flight):
            harness.land()
        else:
            harness.launch()

    def add(self) -> None:
        harness, draw = self.harness, self.random
        if len(harness.living) >= MAX_LIVING:
            return
        prompt, origin = self._prompt()
        self.num_requests += 1
        request = make_request(
            f"request {self.num_requests}",
            prompt,
            n=draw.choice((1, 1, 1, 3)),
            min_tokens=draw.randint(0, 4),
            max_tokens=draw.choice((None, None, 4, 30)),
            ignore_eos=draw.random() < 0.7,
            stop_token_ids=(STOP,) if draw.random() < 0.2 else (),
            prompt_logprobs=1 if draw.random() < 0.1 else None,
            repetition_penalty=1.5 if draw.random() < 0.2 else 1.0,
            bad_words=("never",) if draw.random() < 0.1 else (),
            user=draw.choice(("a", "a", "b", "c")),
            **self._relations(origin),
        )
        try:
            harness.scheduler.check_fits(request)
        except RequestError:
            return
        harness.add(request)

    def _relations(self, origin: Any) -> dict[str, Any]:
        draw = self.random
        relations: dict[str, Any] = {"cache_salt": draw.choice(SALTS)}
        if self.harness.config.scheduling_policy == "priority":
            relations["priority"] = draw.randint(-1, 1)
        if origin is not None and draw.random() < 0.7:
            relations |= {"fork_of": origin.request.request_id, "fork_index": origin.sequence.index}
            if draw.random() < 0.9:
                relations["cache_salt"] = origin.request.cache_salt
        return relations

    def _prompt(self) -> tuple[tuple[int, ...], Any]:
        """A beginning that others have too, and a tail that they may have."""
        harness, draw = self.harness, self.random
        most = max(1, harness.scheduler.max_seq_tokens - 1)
        origin = None
        if harness.living and draw.random() < 0.3:
            origin = draw.choice(list(harness.living.values())[-draw.choice((2, MAX_LIVING)) :])
            start = tuple(origin.tokens[: draw.randint(1, len(origin.tokens))] if draw.random() < 0.4 else origin.tokens)
        else:
            start = draw.choice(DOCUMENTS)[: draw.randint(1, most)]
        tail = tuple(draw.choices((3, 4), k=draw.choice((0, 0, 1, 2))))
        return (start + tail)[:most], origin

    def abort(self) -> None:
        if self.harness.living:
            self.harness.abort(self.random.choice(list(self.harness.living.values())).request.request_id)

    def stop(self) -> None:
        if self.harness.living:
            self.harness.finish(self.random.choice(list(self.harness.living.values())))
