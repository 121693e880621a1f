"""What the parts share: engines of one shape, real text, and the machine's own rates."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.evaluation.corpus import brown_text
from jaxinfer.quant.int8 import NUM_TERMS
from pallas_kernels.int8_matmul import int8_matmul

MODEL = "smollm2-135m"
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16
KV_BYTES_PER_TOKEN = 46_080
"""30 layers, keys and values of 3 heads of 64, float32."""
FLOPS_PER_TOKEN = 212.3e6
"""Twice the 106.2e6 weights of the layers; the vocabulary's matrix is only met where a token is sampled."""
FLOPS_PER_PAIR = 69_120
"""Of a query and a key: 4 x 9 query heads x 64 x 30 layers."""
LAYER_WEIGHTS = 106.2e6
SMALL_POOL = 320
"""Blocks; 10 sequences of 512 tokens."""
LARGE_POOL = 3328
"""Blocks; 32 sequences of 1,600 tokens with room to spare, so that nobody waits for memory."""
COPIED_BYTES = 2**28
LEAST = 0.9
"""Rates vary by a tenth: what is faster than this share of its floor means that the floor is wrong."""


@dataclass(frozen=True)
class Machine:
    """Rates measured before anything else, from which the floors are computed."""

    copy_bytes_per_second: float
    """One thread's memory copy; each byte counted once."""
    disk_write_bytes_per_second: float
    disk_read_bytes_per_second: float
    """A file that is not in the page cache."""
    flops_per_second: float
    """Of the matrix product that prompts consist of, at 512 tokens; of the model, not of the terms that int8 doubles."""

    def copy_seconds(self, num_tokens: int, num_copies: int = 1) -> float:
        return num_copies * num_tokens * KV_BYTES_PER_TOKEN / self.copy_bytes_per_second

    def prefill_seconds(self, num_tokens: int, num_before: int = 0) -> float:
        pairs = num_tokens * num_before + num_tokens * (num_tokens + 1) / 2
        return (num_tokens * FLOPS_PER_TOKEN + pairs * FLOPS_PER_PAIR) / self.flops_per_second


@dataclass(frozen=True)
class Bench:
    """How to measure. `is_small`: little work, to see that it runs; its figures mean nothing."""

    machine: Machine
    quantization: str
    repeats: int
    is_small: bool
    tell: Callable[[str], None]
    scratch: Path

    def start(self, num_kv_blocks: int, **options: Any) -> LLM:
        started = time.perf_counter()
        llm = LLM(
            model=MODEL,
            quantization=self.quantization,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_kv_blocks,
            show_progress=False,
            **options,
        )
        greedy(llm, [list(range(300, 332))], 4)  # the first step pays for what is lazy
        self.tell(f"engine with {num_kv_blocks} blocks, {options}: {time.perf_counter() - started:.1f} s")
        return llm


class Part(Protocol):
    """A module of this package."""

    def floor(self, bench: Bench) -> dict[str, Any]:
        """What the machine's rates say beforehand."""
        ...

    def measure(self, bench: Bench) -> dict[str, Any]:
        """Figures, and `holds`: each claim by name with whether it came true."""
        ...


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Any]:
    """Outputs of exactly `max_tokens` each."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([list(prompt) for prompt in prompts], params, show_progress=False)


def text_ids(llm: LLM, num_tokens: int) -> list[int]:
    """The beginning of the Brown corpus."""
    ids: list[int] = []
    for sample in brown_text():
        ids += llm.tokenizer.encode(sample)
        if len(ids) >= num_tokens:
            return ids[:num_tokens]
    raise ValueError(f"the corpus has only {len(ids)} tokens, {num_tokens} are wanted")


def evict(llm: LLM) -> None:
    """Push every cached block off the device, as other prompts would; an idle engine only."""
    pools = llm.engine.scheduler.pools.pools
    taken = [pool.allocate(pool.num_available) for pool in pools]
    for pool, blocks in zip(pools, taken, strict=True):
        assert blocks is not None
        pool.release(blocks)
    llm.engine.runner.move_blocks(llm.engine.scheduler.take_moves())


def drop_page_cache(folder: Path) -> None:
    """Let the next reader of these files go to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_machine(scratch: Path) -> Machine:
    """The best of a few times of each."""
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.zeros_like(source)
    copy = best(lambda: np.copyto(target, source))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "bytes"
        write = best(lambda: _write(path, source), times=2)
        drop_page_cache(Path(folder))
        read = best(lambda: path.read_bytes(), times=1)
    return Machine(COPIED_BYTES / copy, COPIED_BYTES / write, COPIED_BYTES / read, _matmul_rate())


def _write(path: Path, content: np.ndarray) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _matmul_rate() -> float:
    """Of SmolLM2's gate and up, 512 tokens in int8."""
    rows, inputs, outputs = 512, 576, 3072
    generator = np.random.default_rng(0)
    weight = jnp.asarray(generator.integers(-127, 128, (outputs, inputs)), jnp.int8)
    scales = jnp.ones(outputs, jnp.float32)
    x = jnp.asarray(generator.standard_normal((rows, inputs)), jnp.float32)
    run = jax.jit(lambda x: int8_matmul(x, weight, scales, num_terms=NUM_TERMS))
    jax.block_until_ready(run(x))
    return 2 * rows * inputs * outputs / best(lambda: jax.block_until_ready(run(x)), times=200)


def best(run: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of a few calls."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
