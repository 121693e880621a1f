"""The device side of a step: compiles every shape ahead of time, then runs SchedulerOutput -> StepOutput.

The only file that jits a step. A step is two programs: `forward` (model and KV cache) gives logits, `sample` gives
tokens; split so that greedy and full sampling do not double the number of the large one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32

from jaxinfer import forward_batch
from jaxinfer.batching import BatchShape, Buckets, LogitRow, SlotTables, build_forward_batch
from jaxinfer.forward_batch import StepSpec, fed_tokens, packed_views, unpack
from jaxinfer.in_flight import InFlightStep
from jaxinfer.kv.cache import LayerKV, allocate
from jaxinfer.kv.costs import MoveCosts
from jaxinfer.kv.offload import BlockMover
from jaxinfer.messages import BlockMove, ScheduledRequest, SchedulerOutput
from jaxinfer.sampling import PenaltyState, SampleResult, new_penalty_state, sample_full, sample_greedy
from jaxinfer.sampling.batch import SamplingRow, build_sampling_batch, empty_biases, empty_mask, unpack_sampling
from jaxinfer.sampling.batch import field_shapes as sampling_shapes
from jaxinfer.sampling.feed import fed_token_buffers, feed_penalty_state
from jaxinfer.sampling.feed import field_shapes as feed_shapes

MEASURED_TOKENS = 64
"""A prefill of about this size is timed when the engine starts."""
MEASURED_TIMES = 3


class ModelRunner:
    """Owns the weights, the KV arrays and the sampler's state; one thread calls it.

    Args:
        model: one of the classes in `models`: `embed`, `run` and `head`. Its weights may still be ShapeDtypeStructs; `start`
            brings the arrays, which may load while this compiles.
        mesh: every program is jitted over it, also on one device.
        kv_shapes: each layer's arrays, see `kv.cache.layer_shapes`.
        buckets: the shapes to compile.
        shape: what the packed buffer needs to know.
        vocab_size: columns of the logits; those from `valid_vocab_size` on are padding and are never chosen.
        mover: copies KV blocks within the device and between it, host memory and disk; None: nobody asks for that.
        attention_implementation: see `ForwardBatch`.
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        mesh: Mesh,
        kv_shapes: list[LayerKV],
        buckets: Buckets,
        shape: BatchShape,
        vocab_size: int,
        valid_vocab_size: int,
        mover: BlockMover | None = None,
        attention_implementation: str | None = None,
    ):
        self.mesh = mesh
        self.buckets = buckets
        self.shape = shape
        self.mover = mover
        self.vocab_size = vocab_size
        self.valid_vocab_size = valid_vocab_size
        self.attention_implementation = attention_implementation
        self._graph, state = nnx.split(model)
        self._weights, self._tree = jax.tree.flatten(state)
        self._kv: list[LayerKV] = kv_shapes
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._forward: dict[StepSpec, Callable[..., Any]] = {}
        self._greedy: dict[int, Callable[..., Any]] = {}
        self._full: dict[int, Callable[..., Any]] = {}
        self._feed: Callable[..., Any]
        self._max_tokens = buckets.specs[-1].num_tokens
        self._tables = SlotTables(shape)

    # ---- compiling -------------------------------------------------------------------------------------------------

    def compile(self, on_program: Callable[[int, int], None]) -> int:
        """Compile every program in threads; `on_program(done, total)` after each. Returns their number."""
        jobs: list[Callable[[], None]] = [partial(self._compile_forward, spec) for spec in reversed(self.buckets.specs)]
        num_sampled = {spec.num_logit_rows for spec in self.buckets.specs}
        jobs += [partial(self._compile_full, num_rows) for num_rows in num_sampled]
        jobs += [partial(self._compile_greedy, num_rows) for num_rows in num_sampled]
        jobs.append(self._compile_feed)
        jobs += self.mover.compile_jobs() if self.mover is not None else []
        # Tracing holds the interpreter's lock, compiling does not.
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            try:
                for done, future in enumerate(as_completed([pool.submit(job) for job in jobs])):
                    future.result()
                    on_program(done + 1, len(jobs))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # whatever is wrong is told before the rest is compiled
                raise
        return len(jobs)

    def lower_forward(self, spec: StepSpec) -> jax.stages.Lowered:
        """The program of a step's model, not compiled yet: (weights, KV, last tokens, packed batch) -> (KV, logits).

        The mesh may be of devices that are not there (`jax.experimental.topologies`).
        """

        def forward(weights, kv, last_tokens, packed):
            model: Any = nnx.merge(self._graph, jax.tree.unflatten(self._tree, weights))
            batch = unpack(packed, spec, self.shape.num_groups, self.shape.max_blocks_per_row, self.attention_implementation)
            x, rotation = model.embed(fed_tokens(batch, last_tokens), batch)
            x, kv = model.run(x, rotation, kv, batch)
            return kv, model.head(x[batch.logits_indices])

        packed = self._ints(sum_sizes(forward_batch.field_shapes(spec, self.shape.num_groups, self.shape.max_blocks_per_row)))
        kv_shardings = jax.tree.map(lambda array: array.sharding, self._kv)
        jitted = jax.jit(forward, donate_argnums=1, out_shardings=(kv_shardings, self._everywhere))
        # float32 means float32: some backends round the operands of a dot unless told not to.
        with jax.default_matmul_precision("highest"):
            return jitted.lower(self._weights, self._kv, self._ints(self.shape.num_slots), packed)

    def _compile_forward(self, spec: StepSpec) -> None:
        self._forward[spec] = self.lower_forward(spec).compile()

    def lower_greedy(self, num_rows: int) -> jax.stages.Lowered:
        """The program that gives each of `num_rows` rows of logits its likeliest token."""

        def greedy(logits, last_tokens, packed):
            tokens = sample_greedy(logits, self.valid_vocab_size)
            slots = forward_batch.unpack_fields(packed, sampling_shapes(num_rows))["slots"]
            return tokens, last_tokens.at[slots].set(tokens, mode="drop")

        jitted = jax.jit(greedy, donate_argnums=1, out_shardings=self._everywhere)
        last_tokens, packed = self._ints(self.shape.num_slots), self._ints(sum_sizes(sampling_shapes(num_rows)))
        return jitted.lower(self._logits(num_rows), last_tokens, packed)

    def _compile_greedy(self, num_rows: int) -> None:
        self._greedy[num_rows] = self.lower_greedy(num_rows).compile()

    def lower_full(self, num_rows: int) -> jax.stages.Lowered:
        """The program that samples `num_rows` rows of logits as their requests ask."""

        def full(logits, last_tokens, state, packed, biases, allowed_mask):
            tensors, slots = unpack_sampling(packed, biases, allowed_mask, num_rows)
            result = sample_full(logits, tensors, state, slots, self.valid_vocab_size)
            return result, last_tokens.at[slots].set(result.token_ids, mode="drop")

        jitted = jax.jit(full, donate_argnums=1, out_shardings=self._everywhere)
        return jitted.lower(
            self._logits(num_rows),
            self._ints(self.shape.num_slots),
            self._struct(jax.eval_shape(partial(new_penalty_state, self.shape.num_slots, self.vocab_size))),
            self._ints(sum_sizes(sampling_shapes(num_rows))),
            self._struct(empty_biases(num_rows)),
            self._struct(empty_mask(num_rows, self.vocab_size)),
        )

    def _compile_full(self, num_rows: int) -> None:
        self._full[num_rows] = self.lower_full(num_rows).compile()

    def _compile_feed(self) -> None:
        state = self._struct(jax.eval_shape(partial(new_penalty_state, self.shape.num_slots, self.vocab_size)))
        feed = partial(feed_penalty_state, max_tokens=self._max_tokens)
        jitted = jax.jit(feed, donate_argnums=0, out_shardings=self._everywhere)
        packed = self._ints(sum_sizes(feed_shapes(self._max_tokens, self.shape.num_slots)))
        self._feed = jitted.lower(state, self._ints(self.shape.num_slots), packed).compile()

    def _ints(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._everywhere)

    def _logits(self, num_rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, self.vocab_size), jnp.float32, sharding=self._everywhere)

    def _struct(self, tree: Any) -> Any:
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._everywhere), tree)

    # ---- starting --------------------------------------------------------------------------------------------------

    def start(self, model: nnx.Module) -> None:
        """Take the loaded weights, allocate the KV cache and the sampler's state, and run every program once."""
        self._weights = jax.tree.leaves(nnx.split(model)[1])
        self._kv = allocate(self._kv)
        self._last_tokens = self._put(np.zeros(self.shape.num_slots, np.int32))
        state = jax.eval_shape(partial(new_penalty_state, self.shape.num_slots, self.vocab_size))
        self._penalty_state: PenaltyState = jax.tree.map(lambda array: self._put(np.zeros(array.shape, array.dtype)), state)
        self._no_biases = {num_rows: self._put(empty_biases(num_rows)) for num_rows in self._full}
        self._no_mask = {num_rows: self._put(empty_mask(num_rows, self.vocab_size)) for num_rows in self._full}

    def measure_moves(self) -> MoveCosts:
        """What copies of blocks cost on this machine; before the first step."""
        assert self.mover is not None, "there is nobody who moves blocks"
        self._kv, costs = self.mover.measure(self._kv)
        return costs

    def _put(self, array: np.ndarray) -> Array:
        return jax.device_put(array, self._everywhere)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on all devices."""
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in self._weights)

    def weights_digest(self) -> bytes:
        """SHA-256 of every weight's bytes; reads them all."""
        digest = hashlib.sha256()
        for leaf in self._weights:
            digest.update(f"{leaf.shape} {leaf.dtype}".encode())
            digest.update(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).data)
        return digest.digest()

    def measure_prefill(self) -> tuple[float, float]:
        """Fixed seconds of a step and seconds of a token more, from two of the compiled shapes."""
        small, large = (
            self.buckets.specs[0],
            next(spec for spec in self.buckets.specs if spec.num_tokens >= MEASURED_TOKENS or spec is self.buckets.specs[-1]),
        )
        seconds = dict.fromkeys((small, large), float("inf"))
        for spec in (small, large) * MEASURED_TIMES:
            packed, views = packed_views(forward_batch.field_shapes(spec, self.shape.num_groups, self.shape.max_blocks_per_row))
            # All tokens in one row, written to the trash block, so that nothing is skipped as padding.
            views["query_start_loc"][1:] = spec.num_tokens
            views["context_lens"][0] = spec.num_tokens
            views["positions"][:] = np.arange(spec.num_tokens)
            started = time.perf_counter()
            self._kv, logits = self._forward[spec](self._weights, self._kv, self._last_tokens, packed)
            jax.block_until_ready(logits)
            seconds[spec] = min(seconds[spec], time.perf_counter() - started)
        if seconds[large] <= seconds[small]:  # disturbed, or one shape only: a token still costs something
            return 0.0, seconds[large] / large.num_tokens
        per_token = (seconds[large] - seconds[small]) / (large.num_tokens - small.num_tokens)
        return max(0.0, seconds[small] - per_token * small.num_tokens), per_token

    @contextmanager
    def replaced_weights(self, replace: Callable[[str, Array], Array]) -> Generator[None]:
        """Run with other weights for a while, for research: `replace(path, array)` gives each one's stand-in.

        `path` is where the array lies in the model, such as `layers.3.attention.qkv.weight`; shape and dtype must stay.
        """
        kept = self._weights
        paths = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, _ in jax.tree.leaves_with_path(jax.tree.unflatten(self._tree, kept))
        ]
        self._weights = [replace(path.removesuffix(".value"), array) for path, array in zip(paths, kept, strict=True)]
        try:
            yield
        finally:
            self._weights = kept

    # ---- running ---------------------------------------------------------------------------------------------------
    # The programs take numpy arrays as they are: a device_put of its own costs several times what the call adds for one.

    def launch(self, output: SchedulerOutput, rows: list[LogitRow], sampling_rows: Sequence[SamplingRow]) -> InFlightStep:
        """Enqueue one step, its moves of blocks first, and return without waiting for it.

        `rows` are those of `batching.logit_rows`, and `sampling_rows` has an entry for each of them.
        """
        self.move(output)
        logits = self.forward(output, rows)
        return InFlightStep(output, rows, self._launch_sampler(output.scheduled, sampling_rows, logits))

    def move(self, output: SchedulerOutput) -> None:
        """Enqueue what a step does to blocks before its rows are computed."""
        self.move_blocks(output.moves)
        if output.cancelled_fetches or output.fetches:
            assert self.mover is not None, "blocks are to be fetched and there is nobody to do it"
            self.mover.cancel(output.cancelled_fetches)
            self.mover.fetch(output.fetches)

    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Enqueue moves of blocks, in their order."""
        if moves:
            assert self.mover is not None, "blocks are to be moved and there is nobody to do it"
            self._kv = self.mover.run(self._kv, moves)

    def forward(self, output: SchedulerOutput, rows: Sequence[LogitRow]) -> Float32[Array, "M V"]:
        """The step without sampling: writes KV and gives the logits of `rows`, padding rows after them."""
        spec = self.buckets.bucket_for(output)
        packed = build_forward_batch(output, rows, spec, self.shape, self._tables)
        self._kv, logits = self._forward[spec](self._weights, self._kv, self._last_tokens, packed)
        return logits

    def _launch_sampler(
        self, scheduled: Sequence[ScheduledRequest], sampling_rows: Sequence[SamplingRow], logits: Float32[Array, "M V"]
    ) -> Int32[Array, "M"] | SampleResult:
        num_rows = logits.shape[0]
        for fed in fed_token_buffers(scheduled, self._max_tokens, self.shape.num_slots):
            self._penalty_state = self._feed(self._penalty_state, self._last_tokens, fed)
        batch = build_sampling_batch(sampling_rows, num_rows, self.shape.trash_slot, self.vocab_size)
        if not batch.needs_full:
            tokens, self._last_tokens = self._greedy[num_rows](logits, self._last_tokens, batch.packed)
            return tokens
        biases = self._no_biases[num_rows] if batch.biases is None else batch.biases
        mask = self._no_mask[num_rows] if batch.allowed_mask is None else batch.allowed_mask
        result, self._last_tokens = self._full[num_rows](logits, self._last_tokens, self._penalty_state, batch.packed, biases, mask)
        return result


def sum_sizes(shapes: dict[str, tuple[int, ...]]) -> int:
    """Elements of all fields of a packed buffer."""
    return sum(int(np.prod(shape)) for shape in shapes.values())
