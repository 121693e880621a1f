"""Tile sizes of the packed product on Hopper."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pallas_kernels.common import tuned
from pallas_kernels.common.budget import MAX_SHARED_BYTES
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import Device

BLOCK_ROWS = 64
"""Rows of the matrix that one wgmma takes."""
COPY_BYTES = 16
"""The least that TMA copies of a row, and what the distance of rows is a multiple of."""
TILE_STORE = 32
"""Rows of activations whose results go out at once."""
SWIZZLES = (128, 64, 32)
"""Bytes of a row that one copy can bring to shared memory so that no two rows of eight meet in a bank."""
MAX_GROUP = 128
"""Codes whose products are summed before they are scaled; larger groups are scaled in parts."""
BYTES_IN_FLIGHT = 64 * 1024
"""Of codes, on a multiprocessor: 4.8 TB/s for one microsecond are 36 KiB on each of 132."""
RESERVED_BYTES = 4096
"""Of shared memory, for barriers, alignment, and what the hardware keeps of each thread block."""
MAX_STAGES = 8
NARROW_ROWS = 16
"""Rows of activations up to which their sums are few registers; there reading codes is what takes the time."""
WIDE_ROWS = 64
"""Rows of activations beyond which the matrix units are what takes the time."""
WIDE_TILE = 128
WIDE_TILE_OFFSETS = 64
"""With offsets, whose products stand beside those of the codes."""
KEPT_BUSY = {1: 0.5, 2: 0.95, 3: 1.0, 4: 1.0}
"""By multiplying warpgroups of a multiprocessor, the part of the memory's rate that they keep up with, by their instructions and waits."""
SPLIT_COST = 0.06
"""What doubling the spans has to gain, in parts of all multiprocessors: each span's sums are written and read once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How the product [M N] is cut.

    Attributes:
        tile_m: rows of activations of a thread block; a multiple of 8, at most 256.
        num_warpgroups: that multiply; one more copies.
        row_blocks: of 64 rows of the matrix, for each warpgroup.
        tile_bytes: of codes in a row, for each stage.
        num_stages: of copies in flight.
        num_spans: parts of K whose sums are added in order at the end. It decides the bits of the result and so depends on the matrix
            only, never on the rows of activations.
        splits: whether each span has a thread block of its own, or one goes through all.
    """

    tile_m: int
    num_warpgroups: int
    row_blocks: int
    tile_bytes: int
    num_stages: int
    num_spans: int
    splits: bool

    @property
    def tile_n(self) -> int:
        """Rows of the matrix of a thread block."""
        return BLOCK_ROWS * self.row_blocks * self.num_warpgroups

    def tile_k(self, bits: int) -> int:
        """Codes of a row in one stage."""
        return self.tile_bytes * 8 // bits


CANDIDATES = tuple(
    Config(
        tile_m=tile_m,
        num_warpgroups=warpgroups,
        row_blocks=row_blocks,
        tile_bytes=tile_bytes,
        num_stages=stages,
        num_spans=1,
        splits=tile_m < WIDE_TILE,
    )
    for tile_m, warpgroups, row_blocks in ((8, 2, 1), (8, 4, 1), (16, 2, 1), (16, 4, 1), (64, 2, 1), (128, 2, 1), (128, 2, 2), (128, 3, 1))
    for tile_bytes in (64, 128)
    for stages in (3, 6)
)
"""What the tuner tries; `num_spans` is not free and comes from `cut`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The sizes of one product.

    Attributes:
        group_size: codes that share a scale, 0 for the whole row.
        num_levels: arrays of numbers for groups: scales, offsets, zero points, of one level or two.
        has_offsets: whether groups have offsets.
    """

    num_rows: int
    num_outputs: int
    num_inputs: int
    bits: int
    group_size: int
    num_levels: int = 1
    has_offsets: bool = False


def pick_config(problem: Problem, device: Device) -> Config:
    """Few rows of activations: many copies in flight on every multiprocessor. Many: a code is turned into a number once for 128 rows.

    Raises:
        UnsupportedByKernel: a row that cannot be cut into stages.
    """
    warpgroups, spans = cut(problem, device)
    sizes = {"n": problem.num_outputs, "k": problem.num_inputs, "group": problem.group_size, "levels": problem.num_levels}
    key = tuned.key(f"w{problem.bits}", m=tuned.bucket(problem.num_rows), **sizes)
    if (found := tuned.lookup("packed_matmul", device.kind, key)) is not None:
        return replace(Config(**found), num_spans=spans)
    if problem.num_rows > NARROW_ROWS:
        return _many_rows(problem, spans, device)
    config = Config(
        tile_m=max(8, tuned.bucket(problem.num_rows)),
        num_warpgroups=warpgroups,
        row_blocks=1,
        tile_bytes=_tile_bytes(problem, spans, SWIZZLES[0]),
        num_stages=1,
        num_spans=spans,
        splits=True,
    )
    wanted = math.ceil(BYTES_IN_FLIGHT / (config.tile_n * config.tile_bytes))
    return replace(config, num_stages=min(max(3, wanted), room_for_stages(config, problem)))


def cut(problem: Problem, device: Device) -> tuple[int, int]:
    """How a matrix is cut for few rows of activations, as (multiplying warpgroups, spans).

    The spans are 1, 2, 4 or 8 equal parts of K, of at least two of the largest stages. What is chosen keeps most multiprocessors busy.
    """
    num_tiles = problem.num_inputs * problem.bits // 8 // _tile_bytes(problem, 1, SWIZZLES[0])
    choices = []
    for spans in (1, 2, 4, 8):
        for warpgroups in sorted(KEPT_BUSY, reverse=True):
            if spans > 1 and (num_tiles % spans or num_tiles < 2 * spans):
                continue
            blocks = math.ceil(problem.num_outputs / (BLOCK_ROWS * warpgroups)) * spans
            filled = blocks / (math.ceil(blocks / device.num_cores) * device.num_cores)
            choices.append((filled * KEPT_BUSY[warpgroups] - SPLIT_COST * math.log2(spans), warpgroups, spans))
    # The first of equals: fewer spans, more warpgroups.
    _, warpgroups, spans = max(choices, key=lambda choice: choice[0])
    return warpgroups, spans


def room_for_stages(config: Config, problem: Problem) -> int:
    """How many stages shared memory has room for beside the rest, `MAX_STAGES` at most."""
    tile_k = config.tile_k(problem.bits)
    levels = problem.num_levels * config.tile_n * max(COPY_BYTES, 4 * tile_k // problem.group_size) if problem.group_size else 0
    stage = config.tile_n * config.tile_bytes + config.tile_m * tile_k * 2 + levels
    kept = 0 if config.splits or config.num_spans == 1 else config.tile_n * config.tile_m * 4
    out = config.num_warpgroups * BLOCK_ROWS * min(config.tile_m, TILE_STORE) * 4
    room = MAX_SHARED_BYTES - RESERVED_BYTES - kept - out - levels
    if room < 2 * stage:
        raise UnsupportedByKernel(f"no room for two stages of {stage} bytes in shared memory")
    return min(MAX_STAGES, room // stage)


def _many_rows(problem: Problem, spans: int, device: Device) -> Config:
    largest = WIDE_TILE_OFFSETS if problem.has_offsets else WIDE_TILE
    tile_m = min(largest, tuned.bucket(problem.num_rows))
    is_wide = problem.num_rows > WIDE_ROWS
    num_blocks = math.ceil(problem.num_outputs / (2 * BLOCK_ROWS)) * math.ceil(problem.num_rows / tile_m)
    # As little as holds a group: few registers, many stages. Without groups, a swizzle's width of activations.
    codes = min(problem.group_size, MAX_GROUP) or BLOCK_ROWS
    config = Config(
        tile_m=tile_m,
        num_warpgroups=2,
        # Twice the rows for each activation that is copied, where registers hold their sums: none beside them, of groups or spans.
        row_blocks=2 if is_wide and not problem.group_size and spans == 1 else 1,
        tile_bytes=_tile_bytes(problem, spans, max(SWIZZLES[-1], codes * problem.bits // 8)),
        num_stages=1,
        num_spans=spans,
        splits=spans > 1 and (not is_wide or 2 * num_blocks <= device.num_cores),
    )
    return replace(config, num_stages=room_for_stages(config, problem))


def _tile_bytes(problem: Problem, spans: int, largest: int) -> int:
    """The largest number of bytes that a stage can have of a row."""
    row_bytes = problem.num_inputs // spans * problem.bits // 8
    for size in SWIZZLES:
        if size <= largest and row_bytes % size == 0:
            return size
    raise UnsupportedByKernel(f"rows must be a multiple of {SWIZZLES[-1]} bytes of codes, got {row_bytes}")
