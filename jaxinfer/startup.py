"""EngineConfig -> Engine: what "auto" means, in which order things are loaded, compiled and allocated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer import sharding
from jaxinfer.batching import BatchShape, Buckets
from jaxinfer.checkpoints.cache_dir import cache_dir
from jaxinfer.checkpoints.load import Storage, WeightSlot, declare_parameters, load_parameters
from jaxinfer.checkpoints.resolve import open_checkpoint
from jaxinfer.checkpoints.source import Checkpoint
from jaxinfer.client import EngineDescription
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.kv.cache import layer_shapes, spread_over
from jaxinfer.kv.disk import DiskBlocks
from jaxinfer.kv.offload import BlockMover
from jaxinfer.kv.sizing import resolve_host_slots, resolve_num_blocks
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.kv_setup import kv_identity, make_tiers, measure_break_even
from jaxinfer.metrics import compile_counter
from jaxinfer.models.config import find
from jaxinfer.quant import measured
from jaxinfer.quant import weight as quant
from jaxinfer.runner import ModelRunner
from jaxinfer.scheduler import Scheduler
from jaxinfer.tokenizer import Tokenizer
from pallas_kernels.common.dispatch import UnsupportedByKernel

INTERPRETER_THREADS = 8
"""CPU devices, and so threads, for kernels that are interpreted: their warpgroups wait for each other."""

DEFAULT_MAX_MODEL_LEN = 8192
OnProgress = Callable[[str, int, int], None]
"""Called with what is being done ("weights", "programs"), how much of it is done, and how much there is."""
LoadParameters = Callable[[list[WeightSlot], Checkpoint, Mesh, Callable[[int, int], None]], None]
"""As `load_parameters`."""


@dataclass(frozen=True, slots=True)
class StartupTimings:
    """What starting took, in seconds; loading and compiling overlap."""

    load_seconds: float
    compile_seconds: float
    total_seconds: float
    num_programs: int


def silent(what: str, done: int, total: int) -> None:
    """Progress for nobody."""


def build_engine(
    config: EngineConfig,
    on_progress: OnProgress = silent,
    *,
    checkpoint: Checkpoint | None = None,
    load: LoadParameters = load_parameters,
) -> tuple[Engine, StartupTimings]:
    """Open the checkpoint, compile while the weights load, allocate the KV pool.

    Args:
        config: everything a person may set.
        on_progress: see `OnProgress`.
        checkpoint: one that is open, instead of `config.model`.
        load: fills the parameters; another one than `load_parameters` may do so without reading, to measure a model of which
            there are no weights.

    Raises:
        CheckpointError, UnsupportedModelError: the model's files.
        ConfigError: options that do not fit the model or the machine.
    """
    started = time.monotonic()
    checkpoint = checkpoint or open_checkpoint(config.model)
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
    is_interpretable = config.attention_implementation == "mosaic"
    mesh = sharding.make_mesh(config.parallel.tensor_parallel_size, min_cpu_devices=INTERPRETER_THREADS if is_interpretable else 1)
    dtype = resolve_dtype(config.dtype, mesh)
    max_model_len = resolve_max_model_len(config, model_config.max_positions)
    model = architecture.Model(model_config, mesh, dtype, max_model_len)
    slots = declare_parameters(model, mesh, checkpoint, resolve_storage(config), model_config.unused_tensors)
    groups = spread_over(architecture.kv_groups(model_config, resolve_kv_dtype(config.cache.kv_cache_dtype, dtype)), mesh)
    block_size, limits = config.cache.block_size, config.scheduler
    num_blocks = resolve_num_blocks(config.cache, limits, groups, max_model_len, mesh)
    buckets = Buckets.build(limits.max_num_seqs, limits.max_num_batched_tokens, resolve_min_rows(config.batch_invariant, slots))
    host_slots = resolve_host_slots(config.cache, groups, num_blocks)
    disk_path = config.cache.disk_kv_path
    disk = DiskBlocks(disk_path, config.cache.disk_kv_bytes) if disk_path is not None else None
    kv_shapes = layer_shapes(groups, num_blocks, block_size, mesh)
    mover = BlockMover(kv_shapes, groups, mesh, disk=disk, checks_crc=config.cache.kv_checksums == "on")
    runner = ModelRunner(
        model,
        mesh=mesh,
        mover=mover,
        kv_shapes=kv_shapes,
        buckets=buckets,
        shape=BatchShape.build(len(groups), max_model_len, block_size, limits.max_num_seqs),
        vocab_size=model_config.vocab_size,
        valid_vocab_size=tokenizer.vocab_size,
        attention_implementation=resolve_attention_implementation(config.attention_implementation, mesh),
    )
    with ThreadPoolExecutor(max_workers=1) as pool:
        compiling = pool.submit(_timed, lambda: _compile(runner, lambda done, total: on_progress("programs", done, total)))

        def on_tensor(done: int, total: int) -> None:
            if compiling.done():
                compiling.result()  # what does not compile is told before the rest is read
            on_progress("weights", done, total)

        try:
            _, load_seconds = _timed(lambda: load(slots, checkpoint, mesh, on_tensor))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        num_programs, compile_seconds = compiling.result()
    runner.start(model)
    pools = GroupedPools(groups, num_blocks, block_size)
    tiers = make_tiers(
        config.cache,
        pools,
        host_slots=host_slots,
        identity=kv_identity(runner, groups, checkpoint.config, block_size) if disk is not None else b"",
        disk=disk,
        break_even=measure_break_even(runner, block_size) if host_slots else None,
    )
    eos_token_ids = resolve_eos_token_ids(checkpoint, tokenizer)
    scheduler = Scheduler(
        limits,
        pools,
        max_model_len=max_model_len,
        max_num_logit_rows=buckets.max_num_logit_rows,
        eos_token_ids=eos_token_ids,
        tiers=tiers,
        preemption=config.cache.preemption,
    )
    description = EngineDescription(
        model_name=checkpoint.name,
        max_model_len=max_model_len,
        vocab_size=tokenizer.vocab_size,
        num_kv_blocks=sum(num_blocks),
        block_size=block_size,
        max_num_seqs=limits.max_num_seqs,
        max_prompt_tokens=scheduler.max_seq_tokens - 1,
        eos_token_ids=eos_token_ids,
        scheduling_policy=limits.scheduling_policy,
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


def _compile(runner: ModelRunner, on_program: Callable[[int, int], None]) -> int:
    """Compile every program; an implementation that was asked for and refuses is the fault of whoever asked."""
    try:
        return runner.compile(on_program)
    except UnsupportedByKernel as refusal:
        name, option = runner.attention_implementation, "--attention-implementation"
        if name is None:
            raise
        raise ConfigError(f"{option} {name} does not run this model here: {refusal.reason}", option=option) from refusal


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


def resolve_attention_implementation(name: str, mesh: Mesh) -> str | None:
    """The implementation that every step takes, None for the fastest; whether it can is seen when it is compiled.

    Raises:
        ConfigError: a GPU's kernel would be interpreted on several devices, which jax's interpreter does not keep apart.
    """
    if name == "mosaic" and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        raise ConfigError(
            f"--attention-implementation mosaic is interpreted on a CPU, where --tensor-parallel-size must be 1, got {mesh.size}",
            option="--attention-implementation",
        )
    return None if name == "auto" else name


def resolve_kv_dtype(name: str, dtype: jnp.dtype) -> str:
    """What keys and values are kept in, a numpy dtype's name: as the activations unless asked otherwise."""
    return {"auto": str(dtype), "fp8": "float8_e4m3fn"}.get(name, name)


def resolve_storage(config: EngineConfig) -> Storage:
    """How weights are stored; what "auto" means here was measured beforehand, see `quant.measured`."""
    name, is_packed = config.quantization, config.quantization == "auto"
    zero_point, embeddings = config.quantization_zero_point, config.quantize_embeddings
    has_zero_point = measured.ZERO_POINT_PAYS if zero_point == "auto" else zero_point == "on"
    make = partial(quant.method, group_size=config.quantization_group_size, zero_point=has_zero_point)
    vocabulary = None
    if embeddings == "off":
        vocabulary = Storage()
    elif embeddings == "auto" and name in measured.VOCABULARY_METHODS:
        vocabulary = Storage(method=make(measured.VOCABULARY_METHODS[name]))
    return Storage(method=None if is_packed else make(name), keeps_packed=is_packed, vocabulary=vocabulary)


def resolve_min_rows(batch_invariant: str, slots: Sequence[WeightSlot]) -> int:
    """The least rows of a step: what it takes that bits do not depend on the batch.

    "auto" asks for no more than costs nothing: a lone row of floats takes half the time of 8, while packed matrices give the
    same bits at any number and int8 rows are padded in any case. It is therefore "on" unless there are matrices of floats.
    """
    weights = [getattr(slot.module, slot.name).get_value() for slot in slots if len(slot.spec.shape) > 1]
    if batch_invariant != "on":
        weights = [weight for weight in weights if isinstance(weight, quant.QuantizedWeight)]
    return max(map(quant.min_rows, weights), default=1)


def resolve_max_model_len(config: EngineConfig, max_positions: int) -> int:
    """The model's context, or what was asked for if the model can do it."""
    asked = config.scheduler.max_model_len
    if asked is not None and asked > max_positions:
        raise ConfigError(f"--max-model-len {asked} exceeds the model's context of {max_positions} tokens", option="--max-model-len")
    return asked or min(max_positions, DEFAULT_MAX_MODEL_LEN)


def resolve_eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config.json's, which may be several, and the tokenizer's."""
    listed = checkpoint.generation_config.get("eos_token_id", [])
    listed = [listed] if isinstance(listed, int) else listed
    return tuple(sorted({*(token_id for token_id in listed if token_id < tokenizer.vocab_size), *tokenizer.eos_token_ids}))
