"""EngineConfig -> Engine: what "auto" means, in which order things are loaded, compiled and allocated."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import Mesh

from jaxinfer import sharding
from jaxinfer.batching import BatchShape, Buckets
from jaxinfer.checkpoints.cache_dir import cache_dir
from jaxinfer.checkpoints.load import declare_parameters, load_parameters
from jaxinfer.checkpoints.resolve import open_checkpoint
from jaxinfer.checkpoints.source import Checkpoint
from jaxinfer.client import EngineDescription
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.kv.block_pool import GroupedPools
from jaxinfer.kv.cache import layer_shapes
from jaxinfer.kv.groups import KVGroupSpec, ceil_div
from jaxinfer.metrics import compile_counter
from jaxinfer.models.config import find
from jaxinfer.quant import weight as quant
from jaxinfer.runner import ModelRunner
from jaxinfer.scheduler import Scheduler
from jaxinfer.tokenizer import Tokenizer

DEFAULT_MAX_MODEL_LEN = 8192
INVARIANT_ROWS = 8
"""Rows to which every dot is padded where bits must not depend on the batch, and where one row is slow (int8)."""
POOL_GRID = 64
"""The default pool is a multiple of this many blocks: the pool's size is part of every compiled program."""
CPU_POOL_BYTES = 2 * 2**30

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done ("weights", "programs"), how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class StartupTimings:
    """What starting took, in seconds; loading and compiling overlap."""

    load_seconds: float
    compile_seconds: float
    total_seconds: float
    num_programs: int


def silent(what: str, done: int, total: int) -> None:
    """Progress for nobody."""


def build_engine(config: EngineConfig, on_progress: OnProgress = silent) -> tuple[Engine, StartupTimings]:
    """Open the checkpoint, compile while the weights load, allocate the KV pool.

    Raises:
        CheckpointError, UnsupportedModelError: the model's files.
        ConfigError: options that do not fit the model or the machine.
    """
    started = time.monotonic()
    checkpoint = open_checkpoint(config.model)
    architecture = find(checkpoint.config, str(checkpoint.path))
    model_config = architecture.Config.from_hf(checkpoint.config, str(checkpoint.path))
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer.vocab_size > model_config.vocab_size:
        raise CheckpointError(
            f"has {tokenizer.vocab_size} tokens, more than config.json's vocab_size {model_config.vocab_size}",
            file=str(checkpoint.path),
            field="tokenizer",
        )
    use_compile_cache(config.compile_cache_dir)
    counter = compile_counter()
    mesh = sharding.make_mesh(config.parallel.tensor_parallel_size)
    dtype = resolve_dtype(config.dtype, mesh)
    quantization = quant.method(config.quantization)
    model = architecture.Model(model_config, mesh, dtype)
    slots = declare_parameters(model, mesh, quantization)
    groups = architecture.kv_groups(model_config, dtype)
    max_model_len = resolve_max_model_len(config, model_config.max_positions)
    num_blocks = resolve_num_blocks(config, groups, max_model_len, mesh)
    min_rows = INVARIANT_ROWS if is_batch_invariant(config) or quantization is not None else 1
    block_size, limits = config.cache.block_size, config.scheduler
    buckets = Buckets.build(limits.max_num_seqs, limits.max_num_batched_tokens, min_rows)
    runner = ModelRunner(
        model,
        mesh=mesh,
        kv_shapes=layer_shapes(groups, [num_blocks] * len(groups), block_size, mesh),
        buckets=buckets,
        shape=BatchShape.build(len(groups), max_model_len, block_size, limits.max_num_seqs),
        vocab_size=model_config.vocab_size,
        valid_vocab_size=tokenizer.vocab_size,
    )
    with ThreadPoolExecutor(max_workers=1) as pool:
        compiling = pool.submit(_timed, lambda: runner.compile(lambda done, total: on_progress("programs", done, total)))
        load = lambda: load_parameters(slots, checkpoint, mesh, quantization, lambda done, total: on_progress("weights", done, total))  # noqa: E731
        try:
            _, load_seconds = _timed(load)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        num_programs, compile_seconds = compiling.result()
    runner.start(model)
    pools = GroupedPools(groups, [num_blocks] * len(groups), block_size)
    eos_token_ids = resolve_eos_token_ids(checkpoint, tokenizer)
    scheduler = Scheduler(
        limits, pools, max_model_len=max_model_len, max_num_logit_rows=buckets.max_num_logit_rows, eos_token_ids=eos_token_ids
    )
    description = EngineDescription(
        model_name=checkpoint.name,
        max_model_len=max_model_len,
        vocab_size=tokenizer.vocab_size,
        num_kv_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=limits.max_num_seqs,
        max_prompt_tokens=scheduler.max_seq_tokens - 1,
        eos_token_ids=eos_token_ids,
    )
    engine = Engine(
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        description=description,
        compile_counter=counter,
        seed=config.seed,
    )
    total = time.monotonic() - started
    return engine, StartupTimings(load_seconds, compile_seconds, total, num_programs)


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    started = time.monotonic()
    result = run()
    return result, time.monotonic() - started


def use_compile_cache(folder: Path | None) -> None:
    """Keep compiled programs in `folder`; a folder that cannot be written is a warning of jax's own, not an error."""
    jax.config.update("jax_compilation_cache_dir", str(folder or cache_dir() / "compiled"))
    # The defaults skip programs that compile in under a second, which here is most of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def resolve_dtype(name: str, mesh: Mesh) -> jnp.dtype:
    """float32 on a CPU, where few have bfloat16 arithmetic; bfloat16 elsewhere."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return jnp.dtype(name if name != "auto" else "float32" if is_cpu else "bfloat16")


def is_batch_invariant(config: EngineConfig) -> bool:
    """ "auto" is on for int8, whose dots are padded to 8 rows in any case, and off otherwise: a lone float32 row pays for it."""
    return config.batch_invariant == "on" or (config.batch_invariant == "auto" and config.quantization == "int8")


def resolve_max_model_len(config: EngineConfig, max_positions: int) -> int:
    """The model's context, or what was asked for if the model can do it."""
    asked = config.scheduler.max_model_len
    if asked is not None and asked > max_positions:
        raise ConfigError(f"--max-model-len {asked} exceeds the model's context of {max_positions} tokens", option="--max-model-len")
    return asked or min(max_positions, DEFAULT_MAX_MODEL_LEN)


def resolve_num_blocks(config: EngineConfig, groups: tuple[KVGroupSpec, ...], max_model_len: int, mesh: Mesh) -> int:
    """What max_num_seqs sequences of max_model_len need, within the memory budget, on a coarse grid."""
    if config.cache.num_kv_blocks is not None:
        return config.cache.num_kv_blocks
    block_size = config.cache.block_size
    per_token = sum(
        tensor.num_heads * tensor.head_dim * jnp.dtype(tensor.dtype).itemsize * len(group.layers)
        for group in groups
        for tensor in group.tensors
    )
    wanted = config.scheduler.max_num_seqs * ceil_div(max_model_len, block_size)
    affordable = _pool_budget_bytes(mesh) // (per_token * block_size)
    blocks = min(wanted, max(affordable, ceil_div(max_model_len, block_size)))
    return ceil_div(blocks, POOL_GRID) * POOL_GRID


def _pool_budget_bytes(mesh: Mesh) -> int:
    """On a CPU a tenth of the machine's memory, 2 GiB at most; on a GPU 80 % of what is free, on every device."""
    device = mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is None:
        return min(CPU_POOL_BYTES, psutil.virtual_memory().total // 10)
    return int((stats["bytes_limit"] - stats["bytes_in_use"]) * 0.8) * mesh.size


def resolve_eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config.json's, which may be several, and the tokenizer's."""
    listed = checkpoint.generation_config.get("eos_token_id", [])
    listed = [listed] if isinstance(listed, int) else listed
    return tuple(sorted({*(token_id for token_id in listed if token_id < tokenizer.vocab_size), *tokenizer.eos_token_ids}))
