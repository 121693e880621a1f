"""A model whose next token is arithmetic on every token of its KV cache, and an engine around it.

The value vector of a token is its id; a query of zeros attends evenly, so attention gives the mean of all ids, and the next
token is `(7 * sum + 3 * length) % vocab`. A wrong block, slot, position or length anywhere changes it. The oracle is two
lines of Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer import sharding
from jaxinfer.batching import BatchShape, Buckets
from jaxinfer.client import EngineDescription
from jaxinfer.config import PreemptionMode, SchedulerConfig
from jaxinfer.engine import Engine
from jaxinfer.kv.cache import LayerKV, layer_shapes
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.kv.offload import BlockMover, block_bytes
from jaxinfer.kv.prefix import PrefixIndex
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.kv.tiers import KVTiers, TierLimits
from jaxinfer.metrics import compile_counter
from jaxinfer.runner import ModelRunner
from jaxinfer.scheduler import Scheduler
from jaxinfer.tokenizer import Tokenizer
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.write_kv import write_kv

VOCAB_SIZE = 257
"""Every byte, and the end of sequence; the model has more rows, which are padding."""
NUM_PADDED_ROWS = 7
EOS = 256
HEAD_DIM = 16
GROUPS = (
    KVGroupSpec(
        kind="full",
        layers=(0,),
        tensors=tuple(KVTensorSpec(name=name, num_heads=1, head_dim=HEAD_DIM, dtype="float32") for name in ("keys", "values")),
    ),
)


def next_token(tokens: Sequence[int]) -> int:
    """The oracle."""
    return (7 * sum(tokens) + 3 * len(tokens)) % VOCAB_SIZE


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens, end of sequence ignored."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class LookupModel(nnx.Module):
    """`embed`, `run` and `head`, as the runner calls them; logits fall by one per step away from the next token."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones((1,), jnp.float32))

    def embed(self, token_ids: Any, batch: Any) -> tuple[Any, Any]:
        return token_ids.astype(jnp.float32), batch.positions

    def run(self, x: Any, rotation: Any, kv: list[LayerKV], batch: Any) -> tuple[Any, list[LayerKV]]:
        num_tokens = x.shape[0]
        vectors = jnp.zeros((num_tokens, 1, HEAD_DIM), jnp.float32).at[:, 0, 0].set(x)
        keys, values, _, _ = write_kv(kv[0].keys, kv[0].values, vectors, vectors, batch.slot_mapping[0])
        queries = jnp.zeros((num_tokens, 1, HEAD_DIM), jnp.float32)
        mean = paged_attention(queries, keys, values, batch.block_tables[0], batch.query_start_loc, batch.context_lens, scale=1.0)[:, 0, 0]
        length = rotation + 1
        total = jnp.round(mean * length.astype(jnp.float32)).astype(jnp.int32)
        following = (7 * total + 3 * length) % VOCAB_SIZE
        return following[:, None], [LayerKV(keys, values)]

    def head(self, x: Any) -> Any:
        distance = jnp.abs(jnp.arange(VOCAB_SIZE + NUM_PADDED_ROWS)[None, :] - x).astype(jnp.float32)
        # Padding rows would win every time if they could be chosen.
        return jnp.where(jnp.arange(VOCAB_SIZE + NUM_PADDED_ROWS)[None, :] < VOCAB_SIZE, -distance, 1e4) * self.weight.get_value()[0]


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 ends the sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # GPT-2's order: printable bytes stand for themselves, the others for characters from 256 on, in order of the bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    assert sorted(character.values()) == alphabet
    vocabulary = {character[byte]: byte for byte in range(256)} | {"<end>": EOS}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<end>"}, eos_token_ids=(EOS,))


def make_engine(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 128,
    num_blocks: int = 200,
    block_size: int = 4,
    seed: int = 1,
    prefix_caching: bool = False,
    host_slots: int = 0,
    preemption: PreemptionMode = "recompute",
    clock: Callable[[], float] = time.monotonic,
    **scheduler_options: Any,
) -> Engine:
    """The real engine around the model, compiled and started; `scheduler_options` are further fields of SchedulerConfig."""
    mesh = sharding.make_mesh(1)
    model = LookupModel()
    buckets = Buckets.build(max_num_seqs, max_num_batched_tokens, 8)
    kv_shapes = layer_shapes(GROUPS, [num_blocks], block_size, mesh)
    runner = ModelRunner(
        model,
        mesh=mesh,
        kv_shapes=kv_shapes,
        buckets=buckets,
        shape=BatchShape.build(1, max_model_len, block_size, max_num_seqs),
        vocab_size=VOCAB_SIZE + NUM_PADDED_ROWS,
        valid_vocab_size=VOCAB_SIZE,
        mover=BlockMover(kv_shapes, GROUPS, mesh, max_staged_blocks=8),
    )
    counter = compile_counter()
    runner.compile(lambda done, total: None)
    runner.start(model)
    pools = GroupedPools(GROUPS, [num_blocks], block_size)
    limits = TierLimits(host_slots=(host_slots,), block_bytes=(block_bytes(GROUPS[0], block_size),)) if host_slots else TierLimits()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **scheduler_options),
        pools,
        max_model_len=max_model_len,
        max_num_logit_rows=buckets.max_num_logit_rows,
        eos_token_ids=(EOS,),
        tiers=KVTiers(pools, PrefixIndex(block_size, 1) if prefix_caching else None, limits),
        preemption=preemption,
    )
    description = EngineDescription(
        model_name="lookup",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        num_kv_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_prompt_tokens=scheduler.max_seq_tokens - 1,
        eos_token_ids=(EOS,),
    )
    return Engine(
        scheduler=scheduler,
        runner=runner,
        tokenizer=byte_tokenizer(),
        description=description,
        compile_counter=counter,
        seed=seed,
        clock=clock,
    )


def check_nothing_is_left(engine: Engine) -> None:
    """End what runs; then every block is back, whatever was done with the engine, and nothing was compiled."""
    for request_id in engine.running_ids:
        engine.abort(request_id)
    while engine.has_work:
        assert engine.step() == []
    engine.scheduler.check()
    snapshot = engine.snapshot()
    assert snapshot.num_kv_blocks_free == snapshot.num_kv_blocks_total
    assert snapshot.num_recompiles == 0
