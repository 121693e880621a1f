"""Self-attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32

from jaxinfer import sharding
from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.kv.cache import LayerKV
from jaxinfer.layers.linear import ColumnLinear, RowLinear
from jaxinfer.layers.norm import NormStyle, RMSNorm
from jaxinfer.layers.rope import rotate
from jaxinfer.layers.weights import Source, WeightSpec, param
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.write_kv import rotate_and_write_kv, write_kv

MIN_KEY_BIAS = 1e-3
"""Added to the size of a bias: next to keys, which are of the order of one, less is nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """What a layer's attention computes.

    Attributes:
        scale: what scores are multiplied by, usually head_dim ** -0.5.
        group: the layer's KV group.
        rope: which of the model's rotations; None: positions come in elsewhere.
        window: a token sees this many last ones, itself included.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap).
        qk_norm: RMSNorm of queries and keys before they are rotated, of each head or of all heads at once.
        norm_style, norm_eps: of that norm.
    """

    size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    group: int = 0
    rope: int | None = 0
    window: int | None = None
    soft_cap: float | None = None
    qk_norm: Literal["head", "all"] | None = None
    norm_style: NormStyle = "llama"
    norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """Where the weights come from; `qkv` are queries, keys and values. What a model does not have is left out."""

    qkv: tuple[Source | str, ...]
    out: Source | str
    qkv_bias: tuple[Source | str, ...] = ()
    out_bias: Source | str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    sinks: str | None = None


def attention_weights(
    name: str, *, has_qkv_bias: bool = False, has_out_bias: bool = False, has_qk_norm: bool = False, has_sinks: bool = False
) -> AttentionWeights:
    """Hugging Face's usual names, under `name`."""
    return AttentionWeights(
        qkv=tuple(f"{name}.{part}_proj.weight" for part in "qkv"),
        out=f"{name}.o_proj.weight",
        qkv_bias=tuple(f"{name}.{part}_proj.bias" for part in "qkv") if has_qkv_bias else (),
        out_bias=f"{name}.o_proj.bias" if has_out_bias else None,
        q_norm=f"{name}.q_norm.weight" if has_qk_norm else None,
        k_norm=f"{name}.k_norm.weight" if has_qk_norm else None,
        sinks=f"{name}.sinks" if has_sinks else None,
    )


def _copied(source: Source | str, spec: AttentionSpec, copies: int) -> Source | str:
    """Keys' or values' rows with every head so many times, see `sharding.kv_head_copies`."""
    if copies == 1:
        return source
    return replace(Source(source) if isinstance(source, str) else source, copies=(spec.head_dim, copies))


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with fused projections, heads on the tensor axis.

    Nothing that differs between layers of one kind is kept: they must compare equal, for they are traced once.
    """

    def __init__(self, spec: AttentionSpec, weights: AttentionWeights, *, mesh: Mesh, dtype: jnp.dtype):
        copies = sharding.kv_head_copies(spec.num_kv_heads, mesh.shape[sharding.TENSOR])
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * copies * spec.head_dim
        sizes = (q_size, kv_size, kv_size)
        qkv, biases = ((*sources[:1], *(_copied(kv, spec, copies) for kv in sources[1:])) for sources in (weights.qkv, weights.qkv_bias))
        self.qkv = ColumnLinear(qkv, sizes, spec.size, axis="heads", mesh=mesh, dtype=dtype, biases=biases)
        self.out = RowLinear(weights.out, spec.size, q_size, axis="heads", mesh=mesh, dtype=dtype, bias=weights.out_bias)
        if spec.qk_norm is not None:
            assert weights.q_norm is not None and weights.k_norm is not None
            is_per_head = spec.qk_norm == "head"
            norm = partial(RMSNorm, eps=spec.norm_eps, dtype=dtype, style=spec.norm_style, axis=None if is_per_head else "heads")
            self.q_norm = norm(weights.q_norm, spec.head_dim if is_per_head else q_size)
            # Over all heads it is the same mean with every head counted as often.
            self.k_norm = norm(*((weights.k_norm, spec.head_dim) if is_per_head else (_copied(weights.k_norm, spec, copies), kv_size)))
        self.has_sinks = weights.sinks is not None
        if weights.sinks is not None:
            self.sinks = param(WeightSpec((weights.sinks,), (spec.num_heads,), ("heads",)), dtype)
        self.spec = spec
        self.mesh = mesh

    def __call__(
        self, x: Float[Array, "T E"], rotation: Float32[Array, "R T D"] | None, kv: LayerKV, batch: ForwardBatch
    ) -> tuple[Float[Array, "T E"], LayerKV]:
        """Write the batch's keys and values, then attend; the cache that goes in is donated."""
        write, new, new_specs = self._what_to_write(x, rotation, kv)
        sinks = self.sinks.get_value().astype(jnp.float32) if self.has_sinks else None
        rows = (batch.slot_mapping[self.spec.group], batch.block_tables[self.spec.group], batch.query_start_loc, batch.context_lens)
        heads, pools = sharding.spec(None, "heads", None), _specs(kv)
        attend = jax.shard_map(
            partial(
                _write_and_attend,
                write=write,
                scale=self.spec.scale,
                window=self.spec.window,
                soft_cap=self.spec.soft_cap,
                implementation=batch.attention_implementation,
            ),
            mesh=self.mesh,
            in_specs=(new_specs, pools, sharding.spec("heads"), *[PartitionSpec()] * 4),
            out_specs=(heads, pools),
            check_vma=False,  # the attention loop's carry starts equal on all devices and varies later
        )
        attended, kv = attend(new, kv, sinks, *rows)
        return self.out(attended.reshape(x.shape[0], -1)), kv

    def _what_to_write(self, x: Float[Array, "T E"], rotation: Float32[Array, "R T D"] | None, kv: LayerKV) -> tuple[Any, Any, Any]:
        """How queries, keys and values are written, what from, and how that lies on the mesh.

        Where nothing but a rotation of whole heads lies between the projection and the cache, one kernel does both.
        """
        fused = self.qkv(x)
        divides_keys = kv.key_scales is not None and self.qkv.has_bias and self.spec.qk_norm is None
        turned = None if self.spec.rope is None or rotation is None else rotation[self.spec.rope]
        if turned is not None and turned.shape[-1] == self.spec.head_dim and self.spec.qk_norm is None and not divides_keys:
            return _rotate_and_write, (fused, turned), (sharding.spec(None, "heads"), PartitionSpec())
        q, k, v = self.qkv.split(fused)
        if self.spec.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.reshape(x.shape[0], -1, self.spec.head_dim) for part in (q, k, v))
        if self.spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if divides_keys:
            factors = self._key_factors(0 if turned is None else turned.shape[-1])
            k = (k.astype(jnp.float32) / factors).astype(k.dtype)
            q = (q.astype(jnp.float32) * jnp.repeat(factors, q.shape[1] // k.shape[1], axis=1)).astype(q.dtype)
        if self.spec.rope is not None:
            assert turned is not None
            q, k = rotate(q, turned), rotate(k, turned)
        return _write, (q, k, v), (sharding.spec(None, "heads", None),) * 3

    def _key_factors(self, rotated_size: int) -> Float32[Array, "1 K D"]:
        """What keys are divided by, and queries multiplied by, before keys are rounded to int8; scores stay what they were.

        A bias that is large in a few channels (Qwen2.5: a hundred times the others) would set the step of all of them. The idea
        is SmoothQuant's (arXiv:2211.10438), with the bias itself in place of calibration; two channels that are rotated together
        get one factor, for then the rotation does not see it. It takes what int8 keys cost Qwen2.5-Coder-0.5B from a KL of 0.045 to 0.004 nat.
        """
        bias = self.qkv.split(self.qkv.bias.get_value()[None, :])[1].astype(jnp.float32)
        turned, rest = jnp.split(bias.reshape(1, -1, self.spec.head_dim), [rotated_size], axis=-1)
        pairs = jnp.square(turned) + jnp.square(jnp.roll(turned, rotated_size // 2, axis=-1))
        sizes = jnp.sqrt(jnp.concatenate([pairs, jnp.square(rest)], axis=-1)) + MIN_KEY_BIAS
        usual = jnp.exp(jnp.mean(jnp.log(sizes), axis=-1, keepdims=True))  # the geometric mean: a few outliers hardly move it
        return jnp.maximum(sizes / usual, 1.0)


def _specs(kv: LayerKV) -> LayerKV:
    """How a layer's cache lies on the mesh: KV heads on the tensor axis."""
    pool, scales = sharding.spec("kv_heads", None, None, None), sharding.spec("kv_heads", None, None)
    return LayerKV(pool, pool, None if kv.key_scales is None else scales, None if kv.value_scales is None else scales)


def _write(q, k, v, kv, slot_mapping):
    return q, LayerKV(*write_kv(kv.keys, kv.values, k, v, slot_mapping, kv.key_scales, kv.value_scales))


def _rotate_and_write(fused, rotation, kv, slot_mapping):
    qkv = fused.reshape(fused.shape[0], -1, kv.keys.shape[3])
    q, *pools = rotate_and_write_kv(qkv, rotation, kv.keys, kv.values, slot_mapping, kv.key_scales, kv.value_scales)
    return q, LayerKV(*pools)


def _write_and_attend(
    new, kv, sinks, slot_mapping, block_tables, query_start_loc, context_lens, *, write, scale, window, soft_cap, implementation
):
    q, kv = write(*new, kv, slot_mapping)
    attended = paged_attention(
        q,
        kv.keys,
        kv.values,
        block_tables,
        query_start_loc,
        context_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scales=kv.key_scales,
        v_scales=kv.value_scales,
        implementation=implementation,
    )
    return attended, kv
