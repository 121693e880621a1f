"""What is decided about one call of the packed product before it is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.packed_matmul.mosaic.config import BLOCK_ROWS, COPY_BYTES, TILE_STORE, Config
from pallas_kernels.packed_matmul.mosaic.unpack import Unpack


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Numbers [N C] for groups of codes: scales, offsets or zero points.

    Attributes:
        group: codes that share one.
        width: numbers of a row that are copied at once.
        period: stages that one copy lasts for.
        num_slots: copies kept. When the producer is about to overwrite one, the stages that it has waited for were the last to need it.
    """

    dtype: Any
    group: int
    width: int
    period: int
    num_slots: int

    @staticmethod
    def of(dtype: Any, group: int, tile_k: int, num_stages: int) -> Level:
        """As few numbers at once as TMA can copy, and enough for a stage."""
        width = max(COPY_BYTES // jnp.dtype(dtype).itemsize, tile_k // group)
        period = width * group // tile_k
        return Level(dtype=jnp.dtype(dtype), group=group, width=width, period=period, num_slots=-(-(num_stages - 1) // period) + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes and the formula of the codes.

    Attributes:
        unpack: one plane of words -> bfloat16.
        bits: of a code, 4 or 8.
        group: codes whose products are summed before they are scaled, all in one stage; 0: those of a row, scaled elsewhere.
        zero: subtracted from every code.
        factor: what the numbers that `unpack` gives are to be multiplied by.
        levels: "scales", "super_scales", "offsets", "super_offsets", "zeros", those that there are.
    """

    config: Config
    unpack: Unpack
    bits: int
    num_inputs: int
    group: int
    zero: int
    factor: float
    levels: dict[str, Level]

    @property
    def tile_k(self) -> int:
        """Codes of a row in one stage."""
        return self.config.tile_k(self.bits)

    @property
    def step(self) -> int:
        """Codes of a row that go into one call of wgmma at least: the width of its swizzled operand, two bytes a number."""
        return min(BLOCK_ROWS, self.tile_k, self.group or self.tile_k)

    @property
    def tiles_per_span(self) -> int:
        """Stages of one span."""
        return self.num_inputs // self.tile_k // self.config.num_spans

    @property
    def num_tiles(self) -> int:
        """Stages of one thread block."""
        return self.tiles_per_span * (1 if self.config.splits else self.config.num_spans)

    @property
    def keeps_sums(self) -> bool:
        """Whether the spans before the current one have sums in shared memory."""
        return not self.config.splits and self.config.num_spans > 1

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of one thread block."""
        config, num_words = self.config, self.config.tile_bytes // 2
        kept = (config.num_warpgroups, config.row_blocks, BLOCK_ROWS, config.tile_m)
        return {
            "x": plgpu.SMEM((config.num_stages, config.tile_m, self.tile_k), jnp.bfloat16, transforms=_swizzled(self.step)),
            "words": plgpu.SMEM((config.num_stages, config.tile_n, num_words), jnp.uint16, transforms=_swizzled(num_words)),
            "out": plgpu.SMEM((config.num_warpgroups, min(TILE_STORE, config.tile_m), BLOCK_ROWS), jnp.float32),
            **({"kept": plgpu.SMEM(kept, jnp.float32)} if self.keeps_sums else {}),
            "levels": {n: plgpu.SMEM((level.num_slots, config.tile_n, level.width), level.dtype) for n, level in self.levels.items()},
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.num_stages),
            "empty": plgpu.Barrier(num_arrivals=config.num_warpgroups, num_barriers=config.num_stages),
            "arrived": {n: plgpu.Barrier(num_barriers=level.num_slots) for n, level in self.levels.items()},
        }


def _swizzled(width: int) -> tuple[Any, ...]:
    """Eight rows of so many numbers of two bytes, in no two of which the same part lies in the same bank."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)
