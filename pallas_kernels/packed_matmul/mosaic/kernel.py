"""The packed product with wgmma: codes become bfloat16 numbers in registers, which are the left operand.

The product is computed transposed, out[n, m] = sum over k of w[n, k] x[m, k]: 64 rows of the matrix fill an instruction whatever the
number of rows of activations, of which eight are enough. One warpgroup copies codes, activations and scales into a ring of stages
by TMA; the others wait for a stage, unpack and multiply. Each group of codes has a sum of its own, scaled in float32 as it is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

from pallas_kernels.packed_matmul.mosaic.config import BLOCK_ROWS
from pallas_kernels.packed_matmul.mosaic.plan import Level, Plan
from pallas_kernels.packed_matmul.mosaic.unpack import numbers

LAYOUT = plgpu.Layout.WGMMA
MANY_SUMS = 32
"""Rows of activations beyond whose sums a multiplying warpgroup takes registers from the copying one."""
COPYING_REGISTERS, MULTIPLYING_REGISTERS = 24, 240
"""504 of the 512 that three threads on three warpgroups can have together."""


def body(x: Any, words: Any, levels: dict[str, Any], out: Any, scratch: dict[str, Any], *, plan: Plan) -> None:
    """One thread block: `tile_n` rows of the matrix, `tile_m` rows of activations, one span or all."""
    config = plan.config
    warpgroup = lax.axis_index("warpgroup")
    block = Block(plan=plan, x=x, words=words, levels=levels, out=out, scratch=scratch, first_tile=lax.axis_index("span") * plan.num_tiles)
    moves_registers = config.tile_m > MANY_SUMS and config.num_warpgroups == 2

    @pl.when(warpgroup == config.num_warpgroups)
    def _copy() -> None:
        if moves_registers:
            plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

        @pl.loop(0, plan.num_tiles)
        def _(i: Any) -> None:
            block.wait_until_free(i)
            block.fetch(i)

    @pl.when(warpgroup < config.num_warpgroups)
    def _multiply() -> None:
        if moves_registers:
            plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
        block.store(block.sums())


@dataclass(frozen=True, kw_only=True)
class Block:
    """A thread block at work: what lies in global memory, what in shared memory, and the first of its stages along K."""

    plan: Plan
    x: Any
    words: Any
    levels: dict[str, Any]
    out: Any
    scratch: dict[str, Any]
    first_tile: Any

    # ---- the copying warpgroup -----------------------------------------------------------------------------------------------

    def wait_until_free(self, i: Any) -> None:
        """Until all warpgroups are done with what lay in the place of stage i."""

        @pl.when(i >= self.plan.config.num_stages)
        def _() -> None:
            plgpu.barrier_wait(self.scratch["empty"].at[self.slot(i)])

    def fetch(self, i: Any) -> None:
        """Start the copies of stage i."""
        plan, config, tile = self.plan, self.plan.config, self.first_tile + i
        rows = pl.ds(lax.axis_index("n") * config.tile_n, config.tile_n)
        x_rows = pl.ds(lax.axis_index("m") * config.tile_m, config.tile_m)
        num_words = config.tile_bytes // 2
        full = self.scratch["full"].at[self.slot(i)]
        plgpu.copy_gmem_to_smem(self.words.at[rows, pl.ds(tile * num_words, num_words)], self.scratch["words"].at[self.slot(i)], full)
        plgpu.copy_gmem_to_smem(self.x.at[x_rows, pl.ds(tile * plan.tile_k, plan.tile_k)], self.scratch["x"].at[self.slot(i)], full)
        for name, level in plan.levels.items():

            @pl.when(self.is_level_new(i, level))
            def _(name: str = name, level: Level = level) -> None:
                source = self.levels[name].at[rows, pl.ds(lax.div(tile, level.period) * level.width, level.width)]
                slot = self.level_slot(i, level)
                plgpu.copy_gmem_to_smem(source, self.scratch["levels"][name].at[slot], self.scratch["arrived"][name].at[slot])

    # ---- where things are ----------------------------------------------------------------------------------------------------

    def slot(self, i: Any) -> Any:
        """The place of stage i in the ring."""
        return lax.rem(i, self.plan.config.num_stages)

    def is_level_new(self, i: Any, level: Level) -> Any:
        """Whether stage i is the first for which a copy of the level is needed."""
        return (i == 0) | (lax.rem(self.first_tile + i, level.period) == 0)

    def level_slot(self, i: Any, level: Level) -> Any:
        """The place of the level's numbers for stage i."""
        return lax.rem(lax.div(self.first_tile + i, level.period), level.num_slots)

    def group_column(self, i: Any, start: int, level: Level) -> Any:
        """The column of a copy with the number for code `start` of stage i."""
        before = lax.rem(self.first_tile + i, level.period) * self.plan.tile_k if level.period > 1 else 0
        return lax.div(before + start, level.group) if level.period > 1 else start // level.group

    def rows(self, row_block: int) -> Any:
        """This warpgroup's rows of the tile."""
        return pl.ds((lax.axis_index("warpgroup") * self.plan.config.row_blocks + row_block) * BLOCK_ROWS, BLOCK_ROWS)

    # ---- the multiplying warpgroups ------------------------------------------------------------------------------------------

    def wait_for_stage(self, i: Any) -> None:
        """Until stage i is in shared memory, with the groups' numbers."""
        plgpu.barrier_wait(self.scratch["full"].at[self.slot(i)])
        for name, level in self.plan.levels.items():

            @pl.when(self.is_level_new(i, level))
            def _(name: str = name, level: Level = level) -> None:
                plgpu.barrier_wait(self.scratch["arrived"][name].at[self.level_slot(i, level)])

    def release(self, i: Any) -> None:
        """Tell the copying warpgroup that this one is done with stage i, if its place is needed again."""

        @pl.when(i + self.plan.config.num_stages < self.plan.num_tiles)
        def _() -> None:
            fence_reads()
            plgpu.barrier_arrive(self.scratch["empty"].at[self.slot(i)])

    def sums(self) -> tuple[Float32[Array, "64 tile_m"], ...]:
        """The sums of this warpgroup's row blocks; with several spans each from zero, then added in order."""
        config, length = self.plan.config, self.plan.tiles_per_span
        zeros = tuple(plgpu.layout_cast(jnp.zeros((BLOCK_ROWS, config.tile_m), jnp.float32), LAYOUT) for _ in range(config.row_blocks))
        sum_span = self.sum_groups if self.plan.group else self.sum_rows
        if not self.plan.keeps_sums:
            return sum_span(jnp.int32(0), zeros)
        kept = [self.scratch["kept"].at[lax.axis_index("warpgroup"), row_block] for row_block in range(config.row_blocks)]
        for ref, zero in zip(kept, zeros, strict=True):
            ref[...] = zero

        @pl.loop(0, config.num_spans)
        def _(span: Any) -> None:
            for ref, more in zip(kept, sum_span(span * length, zeros), strict=True):
                ref[...] = plgpu.load(ref, layout=LAYOUT, optimized=False) + more

        return tuple(plgpu.load(ref, layout=LAYOUT, optimized=False) for ref in kept)

    def sum_rows(self, first: Any, zeros: tuple[Array, ...]) -> tuple[Array, ...]:
        """One span from stage `first`, one scale for all of a row, which is not applied here."""
        plan = self.plan

        def multiply(*sums: Any) -> tuple[Array, ...]:
            @pl.loop(first, first + plan.tiles_per_span)
            def _(i: Any) -> None:
                self.wait_for_stage(i)
                for row_block, ref in enumerate(sums):
                    words = self.load_words(i, row_block)
                    for start in range(0, plan.tile_k, plan.step):
                        plgpu.wgmma(ref, self.operand(words, start, plan.step, plan.zero), self.x_operand(i, start, plan.step))
                plgpu.wgmma_wait(0)
                self.release(i)

            return tuple(ref[...] for ref in sums)

        return pl.run_scoped(multiply, *(plgpu.ACC((BLOCK_ROWS, zero.shape[1]), jnp.float32) for zero in zeros))

    def sum_groups(self, first: Any, zeros: tuple[Array, ...]) -> tuple[Array, ...]:
        """One span from stage `first`: each group's product, scaled."""
        plan = self.plan

        def stage(i: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            self.wait_for_stage(i)
            words = [self.load_words(i, row_block) for row_block in range(len(totals))]
            for start in range(0, plan.tile_k, plan.group):
                totals = tuple(self.with_group(total, words[n], i, start, n) for n, total in enumerate(totals))
            self.release(i)
            return totals

        return lax.fori_loop(first, first + plan.tiles_per_span, stage, zeros)

    def with_group(self, total: Array, words: Array, i: Any, start: int, row_block: int) -> Array:
        """`total` and the product of the group with code `start` of stage i. An offset multiplies the sum of the activations."""
        group, x = self.plan.group, self.x_operand(i, start, self.plan.group)
        sums = product(self.operand(words, start, group, self.zero(i, start, row_block)), x)
        total = total + sums * _columns(self.number("scales", i, start, row_block) * self.plan.factor, sums.shape)
        if "offsets" not in self.plan.levels:
            return total
        # By the matrix unit, which is seldom busy: this way they come where the sums are, and in an order that is the same for any rows.
        x_sums = product(plgpu.layout_cast(jnp.ones((BLOCK_ROWS, group), jnp.bfloat16), LAYOUT), x)
        return total + x_sums * _columns(self.number("offsets", i, start, row_block), x_sums.shape)

    def load_words(self, i: Any, row_block: int) -> Array:
        """The codes of stage i and a row block, as words."""
        return plgpu.load(self.scratch["words"].at[self.slot(i), self.rows(row_block)], layout=LAYOUT)

    def operand(self, words: Array, start: int, num_codes: int, zero: Any) -> Array:
        """The codes from `start` of a stage as numbers [64 num_codes]."""
        first, num_words = start * self.plan.bits // 16, num_codes * self.plan.bits // 16
        part = lax.slice(words, (0, first), (BLOCK_ROWS, first + num_words))
        zero = zero if isinstance(zero, int) else _columns(zero, part.shape)
        return numbers(part, self.plan.bits, self.plan.unpack, zero)

    def x_operand(self, i: Any, start: int, num_codes: int) -> Any:
        """The activations that belong to the codes from `start` of stage i, [num_codes tile_m]."""
        return self.scratch["x"].at[self.slot(i), :, pl.ds(start, num_codes)].transpose((1, 0))

    def zero(self, i: Any, start: int, row_block: int) -> Any:
        """The zero point of a group: one for all rows or bfloat16 [64]."""
        if "zeros" not in self.plan.levels:
            return self.plan.zero
        return (self.load_level("zeros", i, start, row_block) + self.plan.zero).astype(jnp.bfloat16)

    def number(self, name: str, i: Any, start: int, row_block: int) -> Float32[Array, "64"]:
        """The scale or offset of a group, of two levels or one."""
        number = self.load_level(name, i, start, row_block)
        above = f"super_{name}"
        return number * self.load_level(above, i, start, row_block) if above in self.plan.levels else number

    def load_level(self, name: str, i: Any, start: int, row_block: int) -> Float32[Array, "64"]:
        """A level's numbers for the group with code `start` of stage i."""
        level = self.plan.levels[name]
        at = self.scratch["levels"][name].at[self.level_slot(i, level), self.rows(row_block), self.group_column(i, start, level)]
        # One number for each row, far from the next: no vector to load, and with 16 bytes between rows no two in a bank.
        return plgpu.load(at, layout=LAYOUT.reduce(1), optimized=False).astype(jnp.float32)

    def store(self, totals: tuple[Array, ...]) -> None:
        """The sums out, as rows of activations."""
        config = self.plan.config
        smem = self.scratch["out"].at[lax.axis_index("warpgroup")]
        height = min(self.scratch["out"].shape[1], config.tile_m)
        for row_block, total in enumerate(totals):
            column = lax.axis_index("n") * config.tile_n + (lax.axis_index("warpgroup") * config.row_blocks + row_block) * BLOCK_ROWS
            for start in range(0, config.tile_m, height):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                part = lax.slice(total, (0, start), (BLOCK_ROWS, start + height))
                smem.transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                row = lax.axis_index("m") * config.tile_m + start
                span = lax.axis_index("span")
                plgpu.copy_smem_to_gmem(smem, self.out.at[span, pl.ds(row, height), pl.ds(column, BLOCK_ROWS)])
        plgpu.wait_smem_to_gmem(0)


def fence_reads() -> None:
    """What registers have read from shared memory, TMA may write after this."""
    plgpu.commit_smem()


def product(a: Array, b: Any) -> Float32[Array, "64 tile_m"]:
    """a @ b, from zero."""

    def multiply(sums: Any) -> Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _columns(column: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(column, shape, [0])
