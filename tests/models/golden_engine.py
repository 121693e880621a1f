"""A golden model in the real engine: loaded, paged, scheduled; driven by token ids."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from jaxinfer import sharding
from jaxinfer.batching import BatchShape, Buckets, build_forward_batch, logit_rows
from jaxinfer.checkpoints.load import Storage, declare_parameters, load_parameters
from jaxinfer.checkpoints.prequantized import unpack_quantized
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor
from jaxinfer.client import EngineDescription
from jaxinfer.config import SchedulerConfig
from jaxinfer.engine import Engine
from jaxinfer.forward_batch import StepSpec, unpack
from jaxinfer.kv.cache import allocate, layer_shapes
from jaxinfer.kv.groups import KVGroupSpec
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.messages import ScheduledRequest, SchedulerOutput, SeqId
from jaxinfer.metrics import compile_counter
from jaxinfer.models.config import find
from jaxinfer.request import GenerationRequest, RequestId, SamplingParams
from jaxinfer.runner import ModelRunner
from jaxinfer.scheduler import Scheduler
from tests.engine.lookup_model import byte_tokenizer

BLOCK_SIZE = 4
NUM_BLOCKS = 48
MAX_NUM_SEQS = 4
MAX_TOKENS = 64
FLOATS = Storage()


@dataclasses.dataclass(frozen=True)
class Golden:
    """What transformers computed: token ids of prompt and continuation, logits of all but the last."""

    token_ids: list[list[int]]
    logits: list[np.ndarray]


def read_golden(folder: Path) -> Golden:
    tensors = load_file(folder / "golden.safetensors")
    count = len(tensors) // 2
    return Golden([tensors[f"token_ids.{i}"].tolist() for i in range(count)], [tensors[f"logits.{i}"] for i in range(count)])


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def replaced(config: Any, fields: Mapping[str, Any]) -> Any:
    """A dataclass with fields replaced; a mapping replaces fields of the dataclass that stands there."""
    changes = {name: replaced(getattr(config, name), value) if isinstance(value, Mapping) else value for name, value in fields.items()}
    return dataclasses.replace(config, **changes)


def load_model(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    max_model_len: int,
    fields: Mapping[str, Any] | None = None,
    num_devices: int = 1,
    dtype: str = "float32",
    kv_dtype: str = "float32",
    storage: Storage = FLOATS,
) -> tuple[Any, Any, tuple[KVGroupSpec, ...], Any]:
    """Model, its Config, its KV groups and the mesh; `fields` replaces fields of the Config."""
    stored = {name: LazyTensor(array.shape, str(array.dtype), lambda array=array: array) for name, array in tensors.items()}
    config, lazy = unpack_quantized(config, stored, "golden")
    architecture = find(config, "config.json")
    model_config = replaced(architecture.Config.from_hf(config, "config.json"), fields or {})
    checkpoint = Checkpoint(
        name="golden", path=Path("golden"), config=config, tensors=lazy, generation_config={}, tokenizer_source=byte_tokenizer
    )
    mesh = sharding.make_mesh(num_devices)
    model = architecture.Model(model_config, mesh, jnp.dtype(dtype), max_model_len)
    load_parameters(declare_parameters(model, mesh, checkpoint, storage, model_config.unused_tensors), checkpoint, mesh)
    return model, model_config, architecture.kv_groups(model_config, kv_dtype), mesh


def make_engine(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, max_model_len: int, **options: Any) -> Engine:
    """The engine around the model, with two step shapes: a small one to decode with, and one for a whole prompt.

    `options` are those of `load_model`.
    """
    model, model_config, groups, mesh = load_model(config, tensors, max_model_len=max_model_len, **options)
    buckets = Buckets((StepSpec(8, MAX_NUM_SEQS, MAX_NUM_SEQS), StepSpec(MAX_TOKENS, MAX_NUM_SEQS, MAX_TOKENS)), MAX_TOKENS)
    num_blocks = [NUM_BLOCKS] * len(groups)
    runner = ModelRunner(
        model,
        mesh=mesh,
        kv_shapes=layer_shapes(groups, num_blocks, BLOCK_SIZE, mesh),
        buckets=buckets,
        shape=BatchShape.build(len(groups), max_model_len, BLOCK_SIZE, MAX_NUM_SEQS),
        vocab_size=model_config.vocab_size,
        valid_vocab_size=model_config.vocab_size,
    )
    counter = compile_counter()
    runner.compile(lambda done, total: None)
    runner.start(model)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS),
        GroupedPools(groups, num_blocks, BLOCK_SIZE),
        max_model_len=max_model_len,
        max_num_logit_rows=buckets.max_num_logit_rows,
        eos_token_ids=(),
    )
    description = EngineDescription(
        model_name="golden",
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        num_kv_blocks=sum(num_blocks),
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_prompt_tokens=scheduler.max_seq_tokens - 1,
        eos_token_ids=(),
    )
    return Engine(scheduler=scheduler, runner=runner, tokenizer=byte_tokenizer(), description=description, compile_counter=counter, seed=1)


def greedy(engine: Engine, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
    """The continuations of all prompts in one batch."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        engine.add_request(GenerationRequest(request_id=RequestId(str(index)), prompt_token_ids=tuple(prompt), params=params))
    while engine.has_work:
        for delta in engine.step():
            for output in delta.outputs:
                tokens[delta.request_id].extend(output.token_ids)
    return list(tokens.values())


def forward(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], sequences: Sequence[list[int]], *, max_model_len: int, **options: Any
) -> list[np.ndarray]:
    """Logits of all tokens of all sequences, in one step of one program; `options` are those of `load_model`."""
    model, _, groups, mesh = load_model(config, tensors, max_model_len=max_model_len, **options)
    lengths = [len(sequence) for sequence in sequences]
    spec = StepSpec(sum(lengths), len(lengths), sum(lengths))
    num_blocks = -(-max(lengths) // BLOCK_SIZE)
    shape = BatchShape.build(len(groups), num_blocks * BLOCK_SIZE, BLOCK_SIZE, len(lengths))
    rows = [_row(index, sequence, [list(range(index * num_blocks + 1, (index + 1) * num_blocks + 1))] * len(groups))
            for index, sequence in enumerate(sequences)]  # fmt: skip
    packed = build_forward_batch(SchedulerOutput(rows, sum(lengths), sum(lengths), []), logit_rows(rows), spec, shape)
    kv = allocate(layer_shapes(groups, [num_blocks * len(lengths)] * len(groups), BLOCK_SIZE, mesh))
    graph, state = nnx.split(model)

    @jax.jit
    def run(state: Any, kv: Any, packed: Any) -> Any:
        module: Any = nnx.merge(graph, state)
        batch = unpack(packed, spec, len(groups), shape.max_blocks_per_row)
        x, rotation = module.embed(batch.token_ids, batch)
        return module.head(module.run(x, rotation, kv, batch)[0])

    return np.split(np.asarray(run(state, kv, packed)), np.cumsum(lengths)[:-1])


def _row(index: int, token_ids: list[int], block_ids: list[list[int]]) -> ScheduledRequest:
    return ScheduledRequest(
        seq_id=SeqId(index),
        request_id=RequestId(str(index)),
        index=0,
        generation=0,
        slot=index,
        token_ids=token_ids,
        num_computed_tokens=0,
        num_prompt_tokens=len(token_ids),
        num_output_tokens=0,
        block_ids=block_ids,
        is_sampling=False,
        is_first_of_slot=True,
        prompt_logprob_positions=range(len(token_ids)),
        params=SamplingParams(),
    )
