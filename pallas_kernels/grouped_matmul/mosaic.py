"""The grouped product on Hopper: one kernel over all tiles, which finds each tile's expert by itself.

A thread block computes the product of one tile of rows with some outputs of the tile's expert, transposed: `wgmma` takes 64 rows at
least of its left operand, which outputs fill, and any multiple of 8 of its right one, as few as a tile may have. One warpgroup copies
both operands through a ring of stages, the others multiply 64 outputs each. Blocks that follow each other read the same rows, and
the tiles of one expert come one after another, so that its weight is in the cache when it is read again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.common import mosaic, tuned
from pallas_kernels.common.budget import MAX_SHARED_BYTES
from pallas_kernels.common.dispatch import UnsupportedByKernel

OUTPUTS = 64
"""Of one warpgroup: the rows of a `wgmma` instruction."""
TILE_K = 64
"""Inputs of a step: 128 bytes of bfloat16 or float16, which lie together in a swizzled tile."""
STORED_ROWS = 64
"""Rows of the result that are on their way to memory at once."""
MAX_TILE_ROWS = 256
DTYPES = ("bfloat16", "float16")
BYTES_IN_FLIGHT = 48 * 1024
"""On a multiprocessor; 4.8 TB/s for a microsecond are 36 KiB on each of 132."""
MAX_STAGES = 12
RESERVED_BYTES = 1024
"""Of shared memory, for barriers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Sizes of a thread block's work.

    Attributes:
        num_consumers: warpgroups that multiply, 64 outputs each.
        num_stages: steps whose operands are on their way or in use.
    """

    num_consumers: int
    num_stages: int

    @property
    def tile_outputs(self) -> int:
        """Outputs of a thread block."""
        return OUTPUTS * self.num_consumers


CANDIDATES = tuple(Config(num_consumers=consumers, num_stages=stages) for consumers in (1, 2) for stages in (3, 4, 6, 8))
"""What the tuner tries."""


def shared_bytes(config: Config, tile_rows: int) -> int:
    """Shared memory of a thread block."""
    stage = 2 * TILE_K * (config.tile_outputs + tile_rows)
    return config.num_stages * stage + 4 * config.tile_outputs * min(STORED_ROWS, tile_rows) + RESERVED_BYTES


def pick_config(num_tiles: int, tile_rows: int, num_outputs: int, num_inputs: int, device: mosaic.Device) -> Config:
    """Two warpgroups share the rows where that leaves every multiprocessor a block; as many stages as keep enough bytes in flight.

    Raises:
        UnsupportedByKernel: rows of a tile that `wgmma` does not take.
    """
    if tile_rows % 8 or not 0 < tile_rows <= MAX_TILE_ROWS or (tile_rows > STORED_ROWS and tile_rows % STORED_ROWS):
        raise UnsupportedByKernel(
            f"rows of a tile must be a multiple of 8 up to {STORED_ROWS}, of {STORED_ROWS} up to {MAX_TILE_ROWS}, got {tile_rows}"
        )
    sizes = {"tiles": tuned.bucket(num_tiles), "rows": tile_rows, "outputs": num_outputs, "inputs": num_inputs}
    if (found := tuned.lookup("grouped_matmul", device.kind, tuned.key("grouped_matmul", **sizes))) is not None:
        return Config(**found)
    consumers = 2 if num_tiles * pl.cdiv(num_outputs, 2 * OUTPUTS) >= device.num_cores else 1
    blocks_per_core = 2 if tile_rows <= STORED_ROWS else 1
    least = Config(num_consumers=consumers, num_stages=0)
    stage = shared_bytes(Config(num_consumers=consumers, num_stages=1), tile_rows) - shared_bytes(least, tile_rows)
    room = MAX_SHARED_BYTES // blocks_per_core - shared_bytes(least, tile_rows)
    wanted = max(4, pl.cdiv(2 * BYTES_IN_FLIGHT, blocks_per_core * stage))
    return Config(num_consumers=consumers, num_stages=max(2, min(MAX_STAGES, wanted, room // stage, max(2, pl.cdiv(num_inputs, TILE_K)))))


def grouped_matmul(
    x: Float[Array, "A U K"],
    weight: Float[Array, "X N K"],
    tile_expert: Int32[Array, "A"],
    *,
    interpret: bool = False,
    config: Config | None = None,
) -> Float32[Array, "A U N"]:
    """See `api.grouped_matmul`. A row has the same bits in any company.

    Args:
        interpret: where there is no Hopper GPU, run in Pallas' GPU interpreter instead of refusing.
        config: instead of the one that is picked.

    Raises:
        UnsupportedByKernel: no Hopper GPU; dtypes and sizes that it does not take.
    """
    (num_tiles, tile_rows, num_inputs), num_outputs = x.shape, weight.shape[1]
    refuse(x, weight)
    config = config or pick_config(num_tiles, tile_rows, num_outputs, num_inputs, mosaic.device())
    run = mosaic.kernel(
        functools.partial(_thread_block, config=config),
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((num_tiles, tile_rows, num_outputs), jnp.float32),
        scratch_types=[memory(config, tile_rows, num_inputs, x.dtype)],
        grid=(num_tiles, pl.cdiv(num_outputs, config.tile_outputs)),
        grid_names=("tile", "outputs"),
        num_threads=config.num_consumers + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul",
    )
    return run(x, weight, tile_expert.astype(jnp.int32))


def refuse(x: Array, weight: Array) -> None:
    """Raise UnsupportedByKernel for what the kernel does not take."""
    if x.dtype != weight.dtype or str(x.dtype) not in DTYPES:
        raise UnsupportedByKernel(f"rows and weights must both be {' or '.join(DTYPES)}, got {x.dtype} and {weight.dtype}")
    if weight.shape[2] % 16 or weight.shape[1] % 8:
        raise UnsupportedByKernel(f"inputs must be a multiple of 16 and outputs of 8, got {weight.shape[2]} and {weight.shape[1]}")


def memory(config: Config, tile_rows: int, num_inputs: int, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a thread block."""
    stages = config.num_stages
    # Bulk copies into swizzled tiles take whole ones from memory. What lies beyond an edge is zeros, but by whole tiles only.
    columns = next(columns for columns in (64, 32, 16) if num_inputs % columns == 0)
    return {
        "rows": _tiled((stages, tile_rows, TILE_K), columns, dtype),
        "weight": _tiled((stages, config.tile_outputs, TILE_K), columns, dtype),
        "result": _tiled((config.num_consumers, min(STORED_ROWS, tile_rows), OUTPUTS), 32, jnp.float32),
        "is_filled": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "is_free": plgpu.Barrier(num_arrivals=config.num_consumers, num_barriers=stages),
    }


def _tiled(shape: tuple[int, ...], columns: int, dtype: Any) -> Any:
    """Swizzled tiles of 8 rows."""
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _thread_block(x: Any, weight: Any, tile_expert: Any, output: Any, held: dict[str, Any], *, config: Config) -> None:
    warpgroup = lax.axis_index("warpgroup")
    tile = lax.axis_index("tile")
    expert = expert_of(tile_expert, tile)
    is_used = expert < weight.shape[0]
    num_steps = pl.cdiv(weight.shape[2], TILE_K)

    @pl.when(is_used & (warpgroup == config.num_consumers))
    def _producer() -> None:
        @pl.loop(0, num_steps)
        def _step(step: Any) -> None:
            @pl.when(step >= config.num_stages)
            def _() -> None:
                wait_free(held, slot_of(step, config))

            fetch(x.at[tile], weight.at[expert], held, step, config)

    @pl.when(is_used & (warpgroup < config.num_consumers))
    def _consumer() -> None:
        store(multiply(held, warpgroup, num_steps, config), output, held, warpgroup, config)

    @pl.when(jnp.logical_not(is_used) & (warpgroup < config.num_consumers))
    def _empty() -> None:
        store(None, output, held, warpgroup, config)


def expert_of(tile_expert: Any, tile: Any) -> Any:
    """The expert of a tile."""
    return tile_expert[tile]


def slot_of(step: Any, config: Config) -> Any:
    """The stage of a step."""
    return lax.rem(step, jnp.int32(config.num_stages))


def fetch(x: Any, weight: Any, held: dict[str, Any], step: Any, config: Config) -> None:
    """Start bringing a step's operands into its stage; zeros come from beyond the edges."""
    slot = slot_of(step, config)
    inputs = pl.ds(step * TILE_K, TILE_K)
    outputs = pl.ds(lax.axis_index("outputs") * config.tile_outputs, config.tile_outputs)
    plgpu.copy_gmem_to_smem(x.at[:, inputs], held["rows"].at[slot], held["is_filled"].at[slot])
    plgpu.copy_gmem_to_smem(weight.at[outputs, inputs], held["weight"].at[slot], held["is_filled"].at[slot])


def multiply(held: dict[str, Any], warpgroup: Any, num_steps: int, config: Config) -> Array:
    """This warpgroup's outputs of the tile, [OUTPUTS U]."""

    def run(total: Any) -> Array:
        @pl.loop(0, num_steps)
        def _step(step: Any) -> None:
            slot = slot_of(step, config)
            wait_filled(held, slot)
            weight = held["weight"].at[slot, pl.ds(warpgroup * OUTPUTS, OUTPUTS)]
            plgpu.wgmma(total, weight, held["rows"].at[slot].transpose((1, 0)))
            wait_products(1)

            # The stage of the product before is free; for the last ones nobody waits.
            @pl.when((step > 0) & (step - 1 + config.num_stages < num_steps))
            def _() -> None:
                plgpu.barrier_arrive(held["is_free"].at[slot_of(step - 1, config)])

        return total[...]

    return pl.run_scoped(run, plgpu.ACC((OUTPUTS, held["rows"].shape[1]), jnp.float32))


def wait_filled(held: dict[str, Any], slot: Any) -> None:
    """Until a stage's operands are there."""
    plgpu.barrier_wait(held["is_filled"].at[slot])


def wait_free(held: dict[str, Any], slot: Any) -> None:
    """Until no warpgroup needs a stage's operands any more."""
    plgpu.barrier_wait(held["is_free"].at[slot])


def wait_products(num_left: int) -> None:
    """Until so many products are in flight: those before do not read their stages any more."""
    plgpu.wgmma_wait(num_left)


def store(total: Array | None, output: Any, held: dict[str, Any], warpgroup: Any, config: Config) -> None:
    """A warpgroup's outputs to memory, zeros where there are none, some rows at a time; what lies beyond the edge is not written."""
    result = held["result"].at[warpgroup]
    height, num_rows = result.shape[0], output.shape[1]
    first_output = lax.axis_index("outputs") * config.tile_outputs + warpgroup * OUTPUTS
    for start in range(0, num_rows, height):
        part = jnp.zeros((OUTPUTS, height), jnp.float32) if total is None else total[:, start : start + height]
        if start:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        result.transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, output.at[lax.axis_index("tile"), pl.ds(start, height), pl.ds(first_output, OUTPUTS)])
    plgpu.wait_smem_to_gmem(0)
