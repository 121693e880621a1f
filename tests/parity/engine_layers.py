"""The engine's own model, one block at a time: a sequence in paged KV, with whatever hidden state the caller puts in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxinfer import sharding
from jaxinfer.batching import BatchShape, build_forward_batch
from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.load import Storage, declare_parameters, load_parameters
from jaxinfer.forward_batch import ForwardBatch, StepSpec, unpack
from jaxinfer.kv.cache import allocate, layer_shapes
from jaxinfer.messages import NO_POSITIONS, ScheduledRequest, SchedulerOutput, SeqId
from jaxinfer.models.config import find
from jaxinfer.quant.weight import method
from jaxinfer.request import RequestId, SamplingParams

BLOCK_SIZE = 16


class EngineLayers:
    """A checkpoint loaded as the engine loads it, float32 activations."""

    def __init__(self, path: Path, quantization: str):
        checkpoint = open_checkpoint(str(path))
        architecture = find(checkpoint.config, str(path))
        config = architecture.Config.from_hf(checkpoint.config, str(path))
        self._mesh = sharding.make_mesh(1)
        self._model = architecture.Model(config, self._mesh, jnp.dtype("float32"), config.max_positions)
        slots = declare_parameters(self._model, self._mesh, checkpoint, Storage(method=method(quantization)))
        load_parameters(slots, checkpoint, self._mesh)
        self._groups = architecture.kv_groups(config, "float32")

    def start(self, token_ids: Sequence[int]) -> None:
        """Begin a sequence, in blocks that do not lie in order; the KV cache is empty."""
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        self._kv = allocate(layer_shapes(self._groups, [num_blocks], BLOCK_SIZE, self._mesh))
        request = ScheduledRequest(
            seq_id=SeqId(0),
            request_id=RequestId("parity"),
            index=0,
            generation=0,
            slot=0,
            token_ids=list(token_ids),
            num_computed_tokens=0,
            num_prompt_tokens=len(token_ids),
            num_output_tokens=0,
            block_ids=[list(range(num_blocks, 0, -1))],
            is_sampling=False,
            is_first_of_slot=True,
            prompt_logprob_positions=NO_POSITIONS,
            params=SamplingParams(),
        )
        spec = StepSpec(num_tokens=len(token_ids), num_rows=1, num_logit_rows=1)
        shape = BatchShape.build(1, num_blocks * BLOCK_SIZE, BLOCK_SIZE, 1)
        packed = build_forward_batch(SchedulerOutput([request], len(token_ids), 0, []), [], spec, shape)
        self._batch: ForwardBatch = unpack(jnp.asarray(packed), spec, 1, shape.max_blocks_per_row)
        self._embedded, self._rotation = self._model.embed(self._batch.token_ids, self._batch)

    def embedded(self) -> np.ndarray:
        """Token vectors `[T, E]`."""
        return np.asarray(self._embedded)

    def layer(self, index: int, x: np.ndarray) -> np.ndarray:
        """Block `index` on hidden states `[T, E]`."""
        x_in = jnp.asarray(x, jnp.float32)
        out, self._kv[index : index + 1] = self._model.run(
            x_in, self._rotation, self._kv[index : index + 1], self._batch, start=index, stop=index + 1
        )
        return np.asarray(out)

    def head(self, x: np.ndarray) -> np.ndarray:
        """Logits `[T, V]` of hidden states `[T, E]`."""
        return np.asarray(self._model.head(jnp.asarray(x, jnp.float32)))
