"""Parts `bfloat16`, `int8_weight_only`, `int8`, `int4`: the whole engine on a model of Llama-3-8B's shape with random weights."""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.async_scheduling import HOST_CALLS, annotated, gaps_of, spans_of
from benchmarks.gpu.random_model import LLAMA_3_8B, TINY, load_random, random_checkpoint
from benchmarks.gpu.rows import Rows
from jaxinfer import startup
from jaxinfer.batching import Buckets
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.request import GenerationRequest, RequestId, SamplingParams
from jaxinfer.step_trace import StepTrace
from pallas_kernels.common.timing import busy, kernel_spans


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is measured."""

    config: dict[str, Any]
    rows: tuple[int, ...] = (1, 32, 256)
    prompt_tokens: int = 128
    steps: int = 64
    prefill_tokens: int = 4096
    repeats: int = 3
    profiled_steps: int = 8

    @property
    def max_model_len(self) -> int:
        return max(self.prefill_tokens, self.prompt_tokens + 4 * self.steps + 64) + 64


FULL = Sizes(config=LLAMA_3_8B)
SMALL = Sizes(config=TINY, rows=(1, 4), prompt_tokens=8, steps=6, prefill_tokens=64, repeats=1, profiled_steps=3)


def measure(rows: Rows, *, storage: str, is_tiny: bool, bytes_per_second: float | None, dump: Path | None) -> None:
    """Start, then prefill, then decode at every number of rows, the most telling first."""
    sizes = SMALL if is_tiny else FULL
    with rows.row(what="start", storage=storage) as row:
        engine, timings = build(sizes, storage)
        row |= {"load_seconds": timings.load_seconds, "compile_seconds": timings.compile_seconds, "programs": timings.num_programs}
        row |= {"weight_bytes": engine.runner.weight_bytes, "attention": engine.runner.attention_implementation or "auto"}
    if "failed" in row:
        return
    with rows.row(what="captured", storage=storage) as row:
        row |= captured_kernels(dump)
    for num_rows in sizes.rows:
        if not rows.is_out_of_time(needs=0 if is_tiny else 6, what=f"decode {num_rows} rows"):
            with rows.row(what="decode", storage=storage, rows=num_rows) as row:
                row |= measure_decode(engine, sizes, num_rows, bytes_per_second)
    if not rows.is_out_of_time(needs=0 if is_tiny else 5, what="prefill"):
        with rows.row(what="prefill", storage=storage, tokens=sizes.prefill_tokens) as row:
            row |= measure_prefill(engine, sizes)
    for num_rows in sizes.rows:
        if not rows.is_out_of_time(needs=0 if is_tiny else 8, what=f"profile of {num_rows} rows"):
            with rows.row(what="profile", storage=storage, rows=num_rows) as row:
                row |= profile_decode(engine, sizes, num_rows)


def build(sizes: Sizes, storage: str) -> tuple[Engine, Any]:
    """The engine, with only those compiled shapes that are measured: the others would take minutes."""
    most = max(sizes.rows)
    limits = {"max_num_seqs": most, "max_num_batched_tokens": max(sizes.prefill_tokens, most), "max_model_len": sizes.max_model_len}
    per_row = -(-(sizes.prompt_tokens + 4 * sizes.steps + 64) // 16)
    blocks = max(most * per_row, -(-sizes.max_model_len // 16) + 1)
    config = EngineConfig.from_options(
        model=f"random-{sizes.config['hidden_size']}",
        quantization="none" if storage == "bfloat16" else storage,
        compile_cache_dir=Path(jax.config.jax_compilation_cache_dir) if jax.config.jax_compilation_cache_dir else None,
        host_kv_bytes=0,
        num_kv_blocks=blocks,
        prefix_caching="off",
        **limits,
    )
    checkpoint = random_checkpoint(config.model, sizes.config)
    with only_shapes({*sizes.rows, limits["max_num_batched_tokens"]}):
        return startup.build_engine(config, checkpoint=checkpoint, load=load_random)


@contextmanager
def only_shapes(num_tokens: set[int]) -> Generator[None]:
    """Let `build_engine` compile steps of these sizes alone; a size that is no bucket's takes the next larger one."""

    class Few(Buckets):
        @classmethod
        def build(cls, *limits: int) -> Buckets:
            every = Buckets.build(*limits)
            wanted = {next(spec.num_tokens for spec in every.specs if spec.num_tokens >= size) for size in num_tokens}
            return Buckets(tuple(spec for spec in every.specs if spec.num_tokens in wanted), every.max_num_logit_rows)

    startup.Buckets = Few
    try:
        yield
    finally:
        startup.Buckets = Buckets


# ---- decode --------------------------------------------------------------------------------------------------------------


@contextmanager
def decoding(engine: Engine, sizes: Sizes, num_rows: int) -> Generator[None]:
    """All rows past their prompts, none near its end."""
    draws = np.random.default_rng(num_rows)
    params = SamplingParams(temperature=0.0, max_tokens=4 * sizes.steps + 48, ignore_eos=True)
    for index in range(num_rows):
        prompt = tuple(draws.integers(0, 256, sizes.prompt_tokens).tolist())
        engine.add_request(GenerationRequest(request_id=RequestId(f"row-{index}"), prompt_token_ids=prompt, params=params))
    try:
        per_step = engine.runner.buckets.specs[-1].num_tokens
        for _ in range(-(-num_rows * sizes.prompt_tokens // per_step) + 4):
            engine.step()
        yield
    finally:
        for request_id in engine.running_ids:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()


def step_bytes(engine: Engine, sizes: Sizes, num_rows: int) -> tuple[int, int]:
    """Bytes that one decode step has to read: the weights but for the embedding's other rows, and the keys and values."""
    config = sizes.config
    embedding = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner._weights) if leaf.shape[:1] == (config["vocab_size"],))
    weights = engine.runner.weight_bytes - embedding // 2  # the output matrix is stored as the embedding is
    context = sizes.prompt_tokens + sizes.steps // 2
    itemsize = 4 if jax.devices()[0].platform == "cpu" else 2
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * itemsize
    return weights, num_rows * context * per_token


def measure_decode(engine: Engine, sizes: Sizes, num_rows: int, bytes_per_second: float | None) -> dict[str, Any]:
    """Tokens a second, and what share of the time the weights and the KV would take at the copy's speed."""
    compiled = engine.counters.num_recompiles
    seconds = []
    with decoding(engine, sizes, num_rows):
        for _ in range(sizes.repeats):
            started = time.perf_counter()
            for _ in range(sizes.steps):
                engine.step()
            seconds.append((time.perf_counter() - started) / sizes.steps)
        engine.trace = StepTrace()
        for _ in range(sizes.profiled_steps):
            engine.step()
        ahead, engine.trace = engine.trace.share_ahead, None
    step = statistics.median(seconds)
    weights, kv = step_bytes(engine, sizes, num_rows)
    figures = {"step_milliseconds": step * 1e3, "tokens_per_second": num_rows / step, "weight_bytes": weights, "kv_bytes": kv}
    figures |= {"share_enqueued_ahead": ahead, "recompiles": engine.counters.num_recompiles - compiled}
    if bytes_per_second:
        figures["share_of_bandwidth"] = (weights + kv) / bytes_per_second / step
    return figures


def measure_prefill(engine: Engine, sizes: Sizes) -> dict[str, Any]:
    """Time to the first token of one prompt on an idle engine, and the rate of its products."""
    draws = np.random.default_rng(0)
    seconds = []
    for repeat in range(sizes.repeats + 1):
        prompt = tuple(draws.integers(0, 256, sizes.prefill_tokens - 1).tolist())
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.add_request(GenerationRequest(request_id=RequestId(f"prefill-{repeat}"), prompt_token_ids=prompt, params=params))
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds.append(time.perf_counter() - started)
    ttft = statistics.median(seconds[1:])
    return {"ttft_milliseconds": ttft * 1e3, "tokens_per_second": len(prompt) / ttft, "flops_per_second": _flops(sizes) / ttft}


def _flops(sizes: Sizes) -> float:
    """Of the products of a prompt, and of half of its square in attention."""
    config, tokens = sizes.config, sizes.prefill_tokens
    width, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights = width * head_dim * (2 * heads + 2 * kv_heads) + 3 * width * config["intermediate_size"]
    return config["num_hidden_layers"] * (2.0 * weights * tokens + 2.0 * tokens**2 * heads * head_dim)


# ---- profile ---------------------------------------------------------------------------------------------------------------


def profile_decode(engine: Engine, sizes: Sizes, num_rows: int) -> dict[str, Any]:
    """Gaps between programs, how busy the device was, how many graphs and lone kernels a step launched, and the longest kernels."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder, decoding(engine, sizes, num_rows):
        undo = [annotated(getattr(engine, owner), name) for owner, name in HOST_CALLS]
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(sizes.profiled_steps):
                engine.step()
        for call in undo:
            call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        host, programs = spans_of(profile)
        kernels = kernel_spans(profile)
    gaps = gaps_of(programs)
    starts = [span.begin for span in programs if "forward" in span.name]
    period = statistics.median(after - before for before, after in pairwise(starts)) if len(starts) > 1 else None
    figures: dict[str, Any] = {"step_milliseconds": period, "gap_milliseconds": statistics.median(gaps) if gaps else None}
    if period and gaps:
        figures["host_gap_share"] = max(0.0, figures["gap_milliseconds"]) / period
    figures["host_milliseconds"] = {
        name: round(statistics.median(span.end - span.begin for span in host if span.name == name), 4)
        for name in {span.name for span in host}
    }
    return figures | kernel_figures(kernels, len(starts))


def kernel_figures(kernels: list[tuple[float, float, str]], num_steps: int) -> dict[str, Any]:
    """What ran on the streams of a GPU, per step."""
    if not kernels or not num_steps:
        return {"kernels": "not here: the profile has no streams of a GPU"}
    times: Counter[str] = Counter()
    for begin, end, name in kernels:
        times[name] += (end - begin) / 1e6 / num_steps
    graphs = sum("graph" in name.lower() for _, _, name in kernels)
    spread = max(end for _, end, _ in kernels) - min(begin for begin, _, _ in kernels)
    return {
        "graphs_per_step": graphs / num_steps,
        "kernels_per_step": (len(kernels) - graphs) / num_steps,
        "busy_share": busy(kernels) / spread,
        "longest_milliseconds": {name[:80]: round(value, 4) for name, value in times.most_common(15)},
    }


def captured_kernels(dump: Path | None) -> dict[str, Any]:
    """How many of the launches of each forward program are in a command buffer (a CUDA graph), by the programs that XLA dumped."""
    files = sorted(dump.glob("*forward*thunk_sequence_after_thunk_passes.txt")) if dump is not None and dump.is_dir() else []
    if not files:
        return {"reason": "not here: nothing was dumped (on a CPU, or because the program came from the compile cache)"}
    return {file.name.partition(".thunk_sequence")[0]: count_thunks(file.read_text()) for file in files}


def count_thunks(text: str) -> dict[str, Any]:
    """Thunks in XLA's dump, a line each, such as `012: kCustomKernel [...`; those of a command buffer are indented under it."""
    captured, buffers = 0, 0
    lone: Counter[str] = Counter()
    buffer_indent: int | None = None
    for indent, kind in re.findall(r"^( *)\d+: k(\w+)", text, flags=re.MULTILINE):
        if buffer_indent is not None and len(indent) <= buffer_indent:
            buffer_indent = None
        if buffer_indent is not None:
            captured += 1
        elif kind == "CommandBuffer":
            buffers, buffer_indent = buffers + 1, len(indent)
        else:
            lone[kind] += 1
    return {"command_buffers": buffers, "captured": captured, "not_captured": dict(lone)}
