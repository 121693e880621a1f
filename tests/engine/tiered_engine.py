"""Engines with every tier around the lookup model: many accountings, one after the other, on programs compiled once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxinfer import sharding
from jaxinfer.config import PreemptionMode, SchedulerConfig
from jaxinfer.engine import Engine
from jaxinfer.kv.cache import layer_shapes
from jaxinfer.kv.disk import DiskBlocks
from jaxinfer.kv.disk_index import DiskIndex
from jaxinfer.kv.offload import BlockMover, block_bytes
from jaxinfer.kv.prefix import PrefixIndex
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.kv.tiers import KVTiers, TierLimits
from jaxinfer.request import GenerationRequest, RequestId, RequestOutput, SamplingParams
from jaxinfer.scheduler import Scheduler
from jaxinfer.sequence import Sequence as ScheduledSequence
from tests.engine.lookup_model import EOS, GROUPS, continuation, make_engine

BLOCK_SIZE = 4
BLOCK_BYTES = block_bytes(GROUPS[0], BLOCK_SIZE)
MOST_BLOCKS = 48
"""In the pool that is allocated; an engine's own may be smaller."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CANARY = list(range(3, 40, 2))


@functools.cache
def make_base() -> Engine:
    """What `tiered_engine` needs: weights, programs and an allocated pool; all tests of a process share them."""
    return make_engine(num_blocks=MOST_BLOCKS, block_size=BLOCK_SIZE)


def tiered_engine(
    base: Engine,
    *,
    num_blocks: int = MOST_BLOCKS,
    host_slots: int = 0,
    folder: Path | None = None,
    identity: bytes = b"lookup",
    checks_crc: bool = False,
    preemption: PreemptionMode = "recompute",
    prefix_caching: bool = True,
    max_num_seqs: int = 8,
    **scheduler_options: Any,
) -> Engine:
    """A new engine on the programs of `base`, which is of no use afterwards; its KV memory keeps whatever was there.

    `scheduler_options` are fields of SchedulerConfig.
    """
    mesh = sharding.make_mesh(1)
    disk = DiskBlocks(folder, 2**24) if folder is not None else None
    mover = BlockMover(
        layer_shapes(GROUPS, [MOST_BLOCKS], BLOCK_SIZE, mesh), GROUPS, mesh, disk=disk, checks_crc=checks_crc, max_staged_blocks=64
    )
    for compile_job in mover.compile_jobs():
        compile_job()
    pools = GroupedPools(GROUPS, [num_blocks], BLOCK_SIZE)
    tiers = KVTiers(
        pools,
        PrefixIndex(BLOCK_SIZE, 1, identity) if prefix_caching else None,
        TierLimits(host_slots=(host_slots,) if host_slots else (), block_bytes=(BLOCK_BYTES,)),
        DiskIndex(disk.max_bytes, disk.scan()) if disk is not None else None,
    )
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=32, **scheduler_options),
        pools,
        max_model_len=base.scheduler.max_model_len,
        max_num_logit_rows=base.scheduler.max_num_logit_rows,
        eos_token_ids=(EOS,),
        tiers=tiers,
        preemption=preemption,
    )
    base.runner.mover = mover
    return Engine(
        scheduler=scheduler,
        runner=base.runner,
        tokenizer=base.tokenizer,
        description=base.description,
        compile_counter=base._compile_counter,
        seed=1,
    )


def add(engine: Engine, name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: Any) -> RequestOutput:
    """Queue a request; returns where its deltas go."""
    engine.add_request(GenerationRequest(request_id=RequestId(name), prompt_token_ids=tuple(prompt), params=params, **fields))
    return RequestOutput.empty(RequestId(name), None, prompt, params.n)


def step(engine: Engine, *outputs: RequestOutput) -> None:
    """One step; its deltas go where they belong, and every block is accounted for afterwards."""
    by_name = {output.request_id: output for output in outputs}
    for delta in engine.step():
        by_name[delta.request_id].add(delta)
    engine.scheduler.check()


def finish(engine: Engine, *outputs: RequestOutput) -> None:
    """Step until these have ended, each with the tokens of the oracle."""
    while not all(output.is_finished for output in outputs):
        assert engine.has_work, "a request was lost"
        step(engine, *outputs)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert tokens and tokens == continuation(output.prompt_token_ids, len(tokens)), f"{output.request_id} has other tokens"


def answer(engine: Engine, prompt: Sequence[int], max_tokens: int = 8, name: str = "one") -> RequestOutput:
    """A request alone, checked against the oracle."""
    output = add(engine, name, prompt, GREEDY.replace(max_tokens=max_tokens))
    finish(engine, output)
    return output


def sequence(engine: Engine, name: str) -> ScheduledSequence:
    """The scheduler's side of a running request's only answer."""
    (one,) = engine.scheduler._requests[RequestId(name)]
    return one


def settle(engine: Engine) -> None:
    """Step until nothing is left to do; nobody may get anything any more."""
    while engine.has_work:
        assert engine.step() == []


def assert_idle(engine: Engine) -> None:
    """Nothing runs, and every block, host slot, staged block and compiled program is where it belongs."""
    scheduler, mover = engine.scheduler, engine.runner.mover
    assert not engine.has_work and engine.running_ids == ()
    scheduler.check()
    for pool in (*scheduler.pools.pools, *scheduler.tiers.host):
        assert pool.num_held == 0
        assert pool.num_free + pool.num_cached == pool.num_blocks
    assert mover is not None
    staging = mover._staging
    assert (staging.num_blocks, len(staging._queued), len(staging._running), len(staging._staged)) == (0, 0, 0, 0), "a fetch was left"
    assert not staging.finished() and not scheduler._fetching and not scheduler.tiers.moves and not engine._fetch_begins
    assert engine.snapshot().num_recompiles == 0


def wait_for_disk(engine: Engine) -> None:
    """Until everything that is queued was done; the next step hears of it."""
    assert engine.runner.mover is not None and engine.runner.mover._disk is not None
    engine.runner.mover._disk._worker.submit(int).result(60)


def end(engine: Engine) -> None:
    """After all of it, service is what it was."""
    answer(engine, CANARY)
    settle(engine)
    assert_idle(engine)
    engine.close()


@contextmanager
def held_disk(engine: Engine) -> Generator[threading.Event]:
    """The disk's thread stops before it reads a block; the event says that it did. Leaving lets it go on."""
    mover = engine.runner.mover
    assert mover is not None and mover._disk is not None
    disk, reached, released = mover._disk, threading.Event(), threading.Event()
    read = disk._read

    def hold(*args: Any) -> Any:
        reached.set()
        assert released.wait(60)
        return read(*args)

    disk._read = hold  # type: ignore[method-assign]
    try:
        yield reached
    finally:
        released.set()
        disk._read = read  # type: ignore[method-assign]
        wait_for_disk(engine)
