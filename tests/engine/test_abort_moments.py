"""A request is aborted at every moment of its life: all blocks come back, and nobody else notices.

The moments are found by looking at the scheduler between steps and at held threads, never by waiting for some time. Those that need
a server (tokenizing, compiling constraints, writing, draining) are in `tests/serving/test_abort_moments.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.engine import Engine
from jaxinfer.messages import DiskEntry, HostSource, StoreBlock
from jaxinfer.request import RequestId, RequestOutput, RequestStatus
from tests.engine.tiered_engine import (
    CANARY,
    GREEDY,
    add,
    answer,
    assert_idle,
    finish,
    held_disk,
    make_base,
    sequence,
    settle,
    step,
    tiered_engine,
)

VICTIM = RequestId("victim")
SHARED = [(k * 5) % 250 for k in range(41)]
"""A prompt of ten full blocks that a lower tier has."""
FILLER = [(k * 3 + 1) % 250 for k in range(90)]
"""Drives everything else out of a pool of 24 blocks."""


@pytest.fixture(scope="module")
def base() -> Engine:
    return make_base()


Reach = Callable[[Engine, int], Generator[list[RequestOutput]]]
"""Brings the victim to the moment and gives those who run beside it."""


def companion(engine: Engine, number: int, max_tokens: int = 12) -> RequestOutput:
    """A neighbour with a prompt of its own."""
    return add(engine, f"companion {number}", [number % 250, 7, 9, number // 250], GREEDY.replace(max_tokens=max_tokens))


def reach(engine: Engine, is_there: Callable[[], bool], *outputs: RequestOutput) -> None:
    """Step until the moment has come."""
    for _ in range(200):
        if is_there():
            return
        step(engine, *outputs)
    raise AssertionError("the moment never came")


def rows_in_flight(engine: Engine) -> list[Any]:
    """The victim's rows of steps that were launched and have not landed."""
    return [row for one, _ in engine._in_flight for row in one.output.scheduled if row.request_id == VICTIM]


def queued(engine: Engine, number: int) -> Generator[list[RequestOutput]]:
    others = [companion(engine, number), companion(engine, number + 1)]
    step(engine, *others)
    add(engine, VICTIM, [number, *SHARED], GREEDY.replace(n=1 + number % 3))
    reach(engine, lambda: len(others[0].outputs[0].token_ids) > number % 4, *others)
    waiting = engine.scheduler._requests[VICTIM]
    assert len(waiting) == 1 + number % 3 and all(one.slot is None and one.status is RequestStatus.WAITING for one in waiting)
    yield others


def between_chunks(engine: Engine, number: int) -> Generator[list[RequestOutput]]:
    others = [companion(engine, number)]
    victim = add(engine, VICTIM, [number, *FILLER])
    for _ in range(1 + number % 2):
        step(engine, *others, victim)
    assert 0 < sequence(engine, VICTIM).num_computed_tokens < len(FILLER) and not engine._in_flight
    yield others


def in_step(engine: Engine, number: int) -> Generator[list[RequestOutput]]:
    others = [companion(engine, number)]
    victim = add(engine, VICTIM, [number, *FILLER], GREEDY.replace(n=1 + number % 2, max_tokens=20))
    for _ in range(1 + number % 9):
        step(engine, *others, victim)
    assert rows_in_flight(engine)
    yield others


def last_step(engine: Engine, number: int) -> Generator[list[RequestOutput]]:
    others = [companion(engine, number)]
    max_tokens = 1 + number % 5
    victim = add(engine, VICTIM, [number, 3, 4], GREEDY.replace(max_tokens=max_tokens))
    reach(engine, lambda: any(row.num_output_tokens == max_tokens - 1 for row in rows_in_flight(engine)), *others, victim)
    assert not victim.is_finished
    yield others


def _swapped_out(engine: Engine, number: int) -> tuple[RequestOutput, RequestOutput]:
    """Step until the younger of two that do not both fit was swapped out."""
    other = add(engine, "companion", [number, *range(19)], GREEDY.replace(max_tokens=40))
    victim = add(engine, VICTIM, [number, *range(50, 69)], GREEDY.replace(max_tokens=40))
    reach(engine, lambda: sequence(engine, VICTIM).swapped is not None, other, victim)
    return other, victim


def swap_out(engine: Engine, number: int) -> Generator[list[RequestOutput]]:
    moved: list[Any] = []
    move_blocks = engine.runner.move_blocks

    def record(moves: Any) -> None:
        moved[:] = moves
        move_blocks(moves)

    engine.runner.move_blocks = record  # type: ignore[method-assign]
    try:
        other, _ = _swapped_out(engine, number)
    finally:
        engine.runner.move_blocks = move_blocks  # type: ignore[method-assign]
    seq = sequence(engine, VICTIM)
    assert seq.swapped is not None and seq.status is RequestStatus.PREEMPTED
    stored = {move.host_slot for move in moved if isinstance(move, StoreBlock)}
    assert stored and stored <= set(seq.swapped.slots[0]), "its blocks left in another step"
    yield [other]


def swap_in(engine: Engine, number: int) -> Generator[list[RequestOutput]]:
    other, victim = _swapped_out(engine, number)
    seq = sequence(engine, VICTIM)
    with untouched_fetches(engine, is_running=number % 2 == 0):
        reach(engine, lambda: seq.fetch is not None, other, victim)
        assert seq.swapped is not None and seq.fetch is not None and seq.fetch.ticket in outstanding(engine)
    yield [] if other.is_finished else [other]


def host_copy(engine: Engine, number: int) -> Generator[list[RequestOutput]]:
    others = [companion(engine, number)] if number % 3 else []
    with untouched_fetches(engine, is_running=number % 2 == 0):
        _reach_fetch(engine, HostSource, others)
    yield others


def disk_read(engine: Engine, number: int) -> Generator[list[RequestOutput]]:
    others = [companion(engine, number)] if number % 3 else []
    with held_disk(engine) as is_reading:
        _reach_fetch(engine, DiskEntry, others)
        assert is_reading.wait(60)
        yield others


def _reach_fetch(engine: Engine, kind: type, others: list[RequestOutput]) -> None:
    victim = add(engine, VICTIM, SHARED)
    seq = sequence(engine, VICTIM)
    reach(engine, lambda: seq.fetch is not None, *others, victim)
    assert seq.fetch is not None and seq.fetch.ticket in outstanding(engine)
    sources = [target.source for target in seq.fetch.targets]
    assert len(sources) == 10 and all(isinstance(source, kind) for source in sources)


def outstanding(engine: Engine) -> set[int]:
    """Tickets of fetches whose end the scheduler has not heard of."""
    assert engine.runner.mover is not None
    staging = engine.runner.mover._staging
    return {*staging._running, *(result.ticket for result in staging._results)}


@contextmanager
def untouched_fetches(engine: Engine, *, is_running: bool) -> Generator[None]:
    """With `is_running` a step does not wait for fetches, so that one that it begins is under way when it returns."""
    mover = engine.runner.mover
    assert mover is not None
    wait = mover.wait
    if is_running:
        mover.wait = lambda max_seconds=None: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        mover.wait = wait  # type: ignore[method-assign]


@dataclass(frozen=True)
class Moment:
    """How to come there, and what engine it takes."""

    reach: Reach
    options: dict[str, Any] = field(default_factory=dict)
    shared_is: str = "nowhere"


MOMENTS = {
    "queued": Moment(queued, {"max_num_seqs": 2}),
    "between chunks": Moment(between_chunks, {"async_scheduling": "off"}),
    "in step": Moment(in_step),
    "last step": Moment(last_step),
    "swap out": Moment(swap_out, {"num_blocks": 20, "host_slots": 60, "preemption": "swap"}),
    "swap in": Moment(swap_in, {"num_blocks": 20, "host_slots": 60, "preemption": "swap"}),
    "swap in without a prefix cache": Moment(swap_in, {"num_blocks": 20, "host_slots": 60, "preemption": "swap", "prefix_caching": False}),
    "host copy": Moment(host_copy, {"num_blocks": 24, "host_slots": 400}, shared_is="on host"),
    "disk read": Moment(disk_read, {"host_slots": 8}, shared_is="on disk"),
}


def prepare(base: Engine, moment: Moment, folder: Path) -> Engine:
    """An engine that has the shared prompt where the moment needs it."""
    options = moment.options
    if moment.shared_is == "on disk":
        options = options | {"folder": folder}
        first = tiered_engine(base, **options)
        answer(first, SHARED)
        first.close()
    engine = tiered_engine(base, **options)
    if moment.shared_is == "on host":
        answer(engine, SHARED)
        answer(engine, FILLER)
    return engine


@pytest.mark.parametrize("num_rounds", [10, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", MOMENTS)
def test_every_block_comes_back_and_nobody_notices(name: str, num_rounds: int, base: Engine, tmp_path: Path) -> None:
    moment = MOMENTS[name]
    threads = set(threading.enumerate())
    engine = prepare(base, moment, tmp_path / "kv")
    answer(engine, CANARY)
    for number in range(num_rounds):
        with contextmanager(moment.reach)(engine, number) as others:
            engine.abort(VICTIM)
            engine.scheduler.check()
            assert VICTIM not in engine.running_ids
            if not others:
                settle(engine)
                assert_idle(engine)
            finish(engine, *others, add(engine, "canary", CANARY))  # a delta of the victim would be a fault here
        settle(engine)
        assert_idle(engine)
    finished = engine.snapshot().finished_by_reason
    assert finished is not None and finished["abort"] == num_rounds
    if moment.shared_is != "nowhere":
        assert answer(engine, SHARED).num_cached_tokens == 40, "the prompt did not lie where every round looked for it"
    engine.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)  # the disk's, which was told to end
        assert not thread.is_alive()
