"""A decoder with latent attention and experts: DeepSeek-V2 and V3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.kv.groups import KVGroupSpec
from jaxinfer.layers.decoder import Decoder
from jaxinfer.layers.latent_attention import LatentAttention, LatentSpec, latent_kv_groups
from jaxinfer.layers.moe import MoEConfig, decoder_moe


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig(MoEConfig):
    """The architecture. `head_dim` is that of what is rotated; `num_kv_heads` means nothing, for the cache holds latents."""

    latent: LatentSpec


class LatentDecoder(Decoder):
    """Latent attention in every layer, experts in those that are not dense."""

    def __init__(self, config: LatentConfig, mesh: Mesh, dtype: jnp.dtype, max_model_len: int):
        super().__init__(
            config,
            mesh,
            dtype,
            max_model_len,
            make_mlp=partial(decoder_moe, config, mesh, dtype),
            make_attention=partial(_attention, config, mesh, dtype),
        )


def _attention(config: LatentConfig, mesh: Mesh, dtype: jnp.dtype, index: int) -> LatentAttention:
    return LatentAttention(config.latent, f"model.layers.{index}.self_attn", mesh=mesh, dtype=dtype)


def kv_groups(config: LatentConfig, dtype_name: str) -> tuple[KVGroupSpec, ...]:
    """One group of latents."""
    return latent_kv_groups(config.latent, config.num_layers, dtype_name)
