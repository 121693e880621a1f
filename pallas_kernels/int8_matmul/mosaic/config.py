"""How the work of the int8 product is cut up: what was measured to be fastest, else what is estimated to be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from jax.experimental import pallas as pl

from pallas_kernels.common import tuned
from pallas_kernels.common.budget import MAX_SHARED_BYTES
from pallas_kernels.common.mosaic import Device

OUTPUTS = 64
"""Outputs of one warpgroup: the rows of a `wgmma` instruction."""
CHUNK = 64
"""Columns of the transposed product that are on their way to memory at once."""
RESERVED_BYTES = 3328
"""Of shared memory: scales of rows, scales and biases of outputs, 1 KiB at most each, and barriers."""
MAX_COLUMNS = 256
"""Of a `wgmma` instruction."""
MAX_BLOCKS_PER_CORE = 6
"""Thread blocks that share a multiprocessor: 256 threads of 40 registers each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Sizes of a thread block's work.

    Attributes:
        tile_columns: rows of x, every term of each, that are multiplied at once.
        num_consumers: warpgroups that multiply, 64 outputs each.
        tile_k: inputs of a step.
        num_stages: steps whose operands are on their way or in use.
        num_splits: thread blocks that share an output tile, each with a part of the inputs.
    """

    tile_columns: int
    num_consumers: int
    tile_k: int
    num_stages: int
    num_splits: int = 1

    @property
    def tile_outputs(self) -> int:
        """Outputs of a thread block."""
        return OUTPUTS * self.num_consumers

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return (self.tile_columns + self.tile_outputs) * self.tile_k


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is multiplied: M rows in C terms each, N outputs, K inputs; and the bytes of a result."""

    num_rows: int
    num_outputs: int
    num_inputs: int
    num_terms: int = 1
    result_bytes: int = 4

    @property
    def num_columns(self) -> int:
        """Of the transposed product."""
        return self.num_rows * self.num_terms

    def num_blocks(self, config: Config) -> int:
        """Thread blocks of a call."""
        tiles = pl.cdiv(self.num_columns, config.tile_columns) * pl.cdiv(self.num_outputs, config.tile_outputs)
        return tiles * config.num_splits

    def shared_bytes(self, config: Config) -> int:
        """Shared memory of a thread block, at most."""
        chunk = config.tile_outputs * min(CHUNK, config.tile_columns)
        sums = chunk * 4 if config.num_splits > 1 else 0
        return config.num_stages * config.stage_bytes + chunk * self.result_bytes + sums + RESERVED_BYTES


CANDIDATES = tuple(
    Config(tile_columns=columns, num_consumers=consumers, tile_k=tile_k, num_stages=stages, num_splits=splits)
    for columns, consumers, tile_k, stages, splits in (
        *((columns, 1, *stages, splits) for columns in (8, 16, 32) for stages in ((128, 4), (256, 6)) for splits in (1, 2)),
        *((64, consumers, 128, 5, splits) for consumers in (1, 2) for splits in (1, 2)),
        *((128, consumers, 128, 4, splits) for consumers in (1, 2) for splits in (1, 2, 4)),
        *((256, 2, 128, 3, splits) for splits in (1, 2, 4)),
        (256, 2, 128, 4, 1),
    )
)
"""What the tuner tries."""


def pick_config(shape: Shape, device: Device) -> Config:
    """Small tiles of rows read the weight once, at the speed of memory; large ones keep the tensor cores busy.

    Between them the estimate weighs how often tiles are copied against how many multiprocessors have work.
    """
    sizes = {"rows": tuned.bucket(shape.num_rows), "outputs": shape.num_outputs, "inputs": shape.num_inputs}
    kinds = {"terms": shape.num_terms, "result_bytes": shape.result_bytes}
    found = tuned.lookup("int8_matmul", device.kind, tuned.key("int8_matmul", **sizes, **kinds))
    if found is not None:
        return Config(**found)
    smallest = 8 * shape.num_terms
    columns = [size for size in (8, 16, 32, 64, 128, 256) if size == smallest or smallest < size < 2 * shape.num_columns]
    configs = [_with_stages(*sizes, shape, device) for sizes in itertools.product(columns, (1, 2), (1, 2, 4))]
    return min((config for config in configs if not refusal(config, shape)), key=lambda config: estimated_clocks(config, shape, device))


def _with_stages(columns: int, consumers: int, splits: int, shape: Shape, device: Device) -> Config:
    """As much in flight as there is room for, shared with the other thread blocks of a multiprocessor."""
    config = Config(tile_columns=columns, num_consumers=consumers, tile_k=128, num_stages=0, num_splits=splits)
    blocks_per_core = min(MAX_BLOCKS_PER_CORE, pl.cdiv(shape.num_blocks(config), device.num_cores)) if columns <= CHUNK else 1
    room = MAX_SHARED_BYTES // blocks_per_core - shape.shared_bytes(config)
    if room >= 8 * config.stage_bytes:
        config = replace(config, tile_k=256)
    return replace(config, num_stages=max(2, min(8, room // config.stage_bytes)))


def refusal(config: Config, shape: Shape) -> str | None:
    """Why a configuration does not fit a shape, or None."""
    if (shared_bytes := shape.shared_bytes(config)) > MAX_SHARED_BYTES:
        return f"{config} takes {shared_bytes} bytes of shared memory, at most {MAX_SHARED_BYTES} there are"
    rows = config.tile_columns // shape.num_terms
    if config.tile_columns > MAX_COLUMNS or rows < 8 or rows % min(8 if rows < CHUNK else CHUNK, rows):
        return f"rows of a tile must be a multiple of 8, beyond {CHUNK} of {CHUNK}, and {MAX_COLUMNS} columns at most, got {rows}"
    steps = pl.cdiv(shape.num_inputs, config.tile_k)
    if (config.num_splits - 1) * pl.cdiv(steps, config.num_splits) >= steps:
        return f"{shape.num_inputs} inputs are {steps} steps, too few for {config.num_splits} splits"
    return None


# Rates of a Hopper multiprocessor per clock, for the estimate that chooses where nothing was measured.
PRODUCTS_PER_CLOCK = 4096
"""Multiply-adds of int8, from NVIDIA's data sheet."""
COPIED_PER_CLOCK, COPIED_PER_CLOCK_OF_ALL = 40, 28
"""Bytes into shared memory: of one multiprocessor alone, and of each when all copy at once."""
READ_PER_CLOCK = 2700
"""Bytes of GPU memory, for all multiprocessors: 4.8 TB/s at 1.75 GHz."""
START_CLOCKS, SPLIT_CLOCKS, CLOCKS_PER_RESULT = 2500, 2500, 0.1
"""Before the first product; waiting for the other blocks of a cluster; for a result to be scaled and stored."""


def estimated_clocks(config: Config, shape: Shape, device: Device) -> float:
    """Clocks of a call: the products or copies of the busiest multiprocessor, all copies together, or the weight's bytes."""
    blocks, outputs, is_split = shape.num_blocks(config), config.tile_outputs, config.num_splits > 1
    inputs = shape.num_inputs / config.num_splits
    columns = min(config.tile_columns, shape.num_columns)
    copied = (columns + outputs) * inputs + 8 * columns * outputs * is_split
    of_core = pl.cdiv(blocks, device.num_cores)
    busiest = of_core * max(config.tile_columns * outputs * inputs / PRODUCTS_PER_CLOCK, copied / COPIED_PER_CLOCK)
    together = blocks * copied / (device.num_cores * COPIED_PER_CLOCK_OF_ALL)
    read = shape.num_outputs * shape.num_inputs / READ_PER_CLOCK
    ends = of_core * CLOCKS_PER_RESULT * config.tile_columns * outputs
    return max(busiest, together, read) + START_CLOCKS + SPLIT_CLOCKS * is_split + ends
