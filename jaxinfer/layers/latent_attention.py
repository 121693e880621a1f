"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1) over a paged cache of latents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32

from jaxinfer import sharding
from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.kv.cache import LayerKV
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.layers.linear import ColumnLinear, RowLinear
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import Rope, YarnScaling, rotate, yarn_magnitude
from jaxinfer.layers.weights import WeightSpec, param
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.write_kv import write_kv

LATENT_NORM_EPS = 1e-6
"""Of the norms inside attention, whatever the model's is (HF DeepseekV2RMSNorm's default)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpec:
    """What a layer's latent attention computes.

    Attributes:
        query_rank: width of the queries' latent; None: queries come straight from x.
        kv_rank: width of the latent of keys and values.
        plain_dim, rope_dim: the part of a query or key head that is not rotated, and the part that is; all heads share
            the rotated part of the key.
        value_dim: of one head.
        scale: what scores are multiplied by.
        is_interleaved: neighbours are rotated together, see `rope.rotate`.
        has_bias: of the projections down to the latents, and of the output.
    """

    size: int
    num_heads: int
    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    is_interleaved: bool
    has_bias: bool = False

    @property
    def latent_dim(self) -> int:
        """What the cache holds per token."""
        return self.kv_rank + self.rope_dim


def latent_scale(head_dim: int, rope: Rope) -> float:
    """head_dim ** -0.5, times YaRN's growth squared where the rotation leaves it to the scores (HF `yarn_apply_mscale`)."""
    growth = 1.0
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        growth = yarn_magnitude(rope.scaling.factor, rope.scaling.mscale_all_dim)
    return head_dim**-0.5 * growth * growth


def latent_kv_groups(spec: LatentSpec, num_layers: int, dtype_name: str) -> tuple[KVGroupSpec, ...]:
    """One group: every layer keeps each token's latent and the rotated part of its key, one beside the other."""
    tensor = KVTensorSpec(name="keys", num_heads=1, head_dim=spec.latent_dim, dtype=dtype_name)
    return (KVGroupSpec(kind="latent", layers=tuple(range(num_layers)), tensors=(tensor,)),)


class LatentAttention(nnx.Module):
    """Attention of every head over the latents themselves, query heads on the tensor axis, latents on every device.

    The matrix that would make keys of latents goes into the query, the one that would make values goes behind the sum
    (arXiv:2405.04434, 2.1.2): q_h . (U_h c) = (U_h^T q_h) . c. A token costs kv_rank + rope_dim numbers however many
    heads there are, and no key is ever made.
    """

    def __init__(self, spec: LatentSpec, name: str, *, mesh: Mesh, dtype: jnp.dtype):
        query_size = spec.num_heads * (spec.plain_dim + spec.rope_dim)
        down = partial(ColumnLinear, axis="embed", mesh=mesh, dtype=dtype)  # on every device alike
        norm = partial(RMSNorm, eps=LATENT_NORM_EPS, dtype=dtype)

        def bias(matrix: str) -> str | None:
            return f"{name}.{matrix}.bias" if spec.has_bias else None

        def biases(matrix: str) -> tuple[str, ...]:
            return (f"{name}.{matrix}.bias",) if spec.has_bias else ()

        if spec.query_rank is not None:
            self.query_down = down((f"{name}.q_a_proj.weight",), (spec.query_rank,), spec.size, biases=biases("q_a_proj"))
            self.query_norm = norm(f"{name}.q_a_layernorm.weight", spec.query_rank)
        query = f"{name}.q_proj.weight" if spec.query_rank is None else f"{name}.q_b_proj.weight"
        self.query = ColumnLinear((query,), (query_size,), spec.query_rank or spec.size, axis="heads", mesh=mesh, dtype=dtype)
        self.kv_down = down((f"{name}.kv_a_proj_with_mqa.weight",), (spec.latent_dim,), spec.size, biases=biases("kv_a_proj_with_mqa"))
        self.kv_norm = norm(f"{name}.kv_a_layernorm.weight", spec.kv_rank)
        # Multiplied from both sides, so that one quantized along its inputs would not do.
        kv_up = WeightSpec(
            (f"{name}.kv_b_proj.weight",), (spec.num_heads * (spec.plain_dim + spec.value_dim), spec.kv_rank), ("heads", None)
        )
        self.kv_up = param(kv_up, dtype)
        self.out = RowLinear(
            f"{name}.o_proj.weight",
            spec.size,
            spec.num_heads * spec.value_dim,
            axis="heads",
            mesh=mesh,
            dtype=dtype,
            bias=bias("o_proj"),
        )
        self.spec = spec
        self.mesh = mesh

    def __call__(
        self, x: Float[Array, "T E"], rotation: Float32[Array, "R T D"], kv: LayerKV, batch: ForwardBatch
    ) -> tuple[Float[Array, "T E"], LayerKV]:
        """Write the batch's latents, then attend; the cache that goes in is donated."""
        spec = self.spec
        turn = partial(rotate, rotation=rotation[0], is_interleaved=spec.is_interleaved)
        query = self.query(x if spec.query_rank is None else self.query_norm(self.query_down(x)))
        plain, turned = jnp.split(query.reshape(x.shape[0], spec.num_heads, -1), [spec.plain_dim], axis=-1)
        latent, shared_key = jnp.split(self.kv_down(x), [spec.kv_rank], axis=-1)
        new = jnp.concatenate([self.kv_norm(latent), turn(shared_key[:, None, :])[:, 0]], axis=-1)
        heads, everywhere = sharding.spec(None, "heads", None), PartitionSpec()
        attend = jax.shard_map(
            partial(_write_and_attend, spec=spec, implementation=batch.attention_implementation),
            mesh=self.mesh,
            in_specs=(heads, heads, everywhere, sharding.spec("heads", None), everywhere, *[everywhere] * 4),
            out_specs=(heads, everywhere),
            check_vma=False,  # as in Attention
        )
        rows = (batch.slot_mapping[0], batch.block_tables[0], batch.query_start_loc, batch.context_lens)
        attended, kv = attend(plain, turn(turned), new, self.kv_up.get_value(), kv, *rows)
        return self.out(attended.reshape(x.shape[0], -1)), kv


def _write_and_attend(
    plain, turned, new, kv_up, kv, slot_mapping, block_tables, query_start_loc, context_lens, *, spec: LatentSpec, implementation
):
    keys, _, scales, _ = write_kv(kv.keys, None, new[:, None, :], None, slot_mapping, kv.key_scales)
    per_head = kv_up.reshape(-1, spec.plain_dim + spec.value_dim, spec.kv_rank)
    to_key, to_value = per_head[:, : spec.plain_dim], per_head[:, spec.plain_dim :]
    absorbed = _absorb(plain, to_key)
    latents = paged_attention(
        jnp.concatenate([absorbed, turned], axis=-1),
        keys,
        None,
        block_tables,
        query_start_loc,
        context_lens,
        scale=spec.scale,
        k_scales=scales,
        value_dim=spec.kv_rank,
        implementation=implementation,
    )
    return _values(latents, to_value), LayerKV(keys, None, scales, None)


# Which operand stands first decides how XLA's CPU backend adds up: these two give a token the same bits in any batch.


def _absorb(query: Float[Array, "T H K"], to_key: Float[Array, "H K R"]) -> Float[Array, "T H R"]:
    product = lax.dot_general(to_key, query, (((1,), (2,)), ((0,), (1,))))  # [H R T]
    return product.transpose(2, 0, 1)


def _values(latents: Float[Array, "T H R"], to_value: Float[Array, "H N R"]) -> Float[Array, "T H N"]:
    product = lax.dot_general(latents, to_value, (((2,), (2,)), ((1,), (0,))))  # [H T N]
    return product.transpose(1, 0, 2)
