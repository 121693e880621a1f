"""A model of any size with random weights, made on the device: what speed depends on is all there, and nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jax.sharding import Mesh
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.checkpoints.load import WeightSlot
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor
from jaxinfer.models.config import find
from jaxinfer.quant.weight import QuantizedWeight
from jaxinfer.tokenizer import Tokenizer

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}
TINY: dict[str, Any] = LLAMA_3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
END = "<|end|>"


def random_checkpoint(name: str, config: dict[str, Any]) -> Checkpoint:
    """A checkpoint whose tensors have shapes and no content; `load_random` is what fills the parameters."""
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_query, num_kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,), "lm_head.weight": (vocab, width)}
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (num_query, width),
            "self_attn.k_proj": (num_kv, width),
            "self_attn.v_proj": (num_kv, width),
            "self_attn.o_proj": (width, num_query),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        shapes |= {f"model.layers.{layer}.{tensor}.weight": shape for tensor, shape in of_layer.items()}
    find(config, name)  # names what is not implemented
    return Checkpoint(
        name=name,
        path=Path(name),
        config=config,
        tensors={tensor: LazyTensor(shape=shape, dtype="bfloat16", read=partial(_refuse, tensor)) for tensor, shape in shapes.items()},
        generation_config={},
        tokenizer_source=byte_tokenizer,
    )


def _refuse(tensor: str) -> np.ndarray:
    raise AssertionError(f"{tensor} has no content: load the parameters with load_random")


def byte_tokenizer() -> Tokenizer:
    """A token for each byte and one that ends."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(backend, special_tokens={"eos_token": END})


def load_random(slots: list[WeightSlot], checkpoint: Checkpoint, mesh: Mesh, on_tensor: Callable[[int, int], None]) -> None:
    """As `load_parameters`: every parameter gets random numbers, made where it lies, of a size that keeps activations finite."""
    for done, slot in enumerate(slots):
        value = getattr(slot.module, slot.name).get_value()
        scale = float(slot.spec.shape[-1]) ** -0.5
        is_quantized = isinstance(value, QuantizedWeight)
        keys = jax.random.split(jax.random.key(done), len(jax.tree.leaves(value)))
        leaves, tree = jax.tree.flatten(value)
        if len(slot.spec.shape) == 1:  # a norm
            made = [jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding) for leaf in leaves]
        else:
            made = [
                _random(leaf.shape, leaf.dtype, leaf.sharding, scale, is_quantized)(key) for leaf, key in zip(leaves, keys, strict=True)
            ]
        setattr(slot.module, slot.name, nnx.Param(jax.tree.unflatten(tree, made)))
        on_tensor(done + 1, len(slots))


@lru_cache(maxsize=64)
def _random(shape: tuple[int, ...], dtype: Any, sharding: Any, scale: float, is_quantized: bool) -> Callable[[jax.Array], jax.Array]:
    """A program for all parameters of one shape. Codes over their whole range with one scale for all; or normal floats."""

    def make(key: jax.Array) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.bits(key, shape, jnp.dtype(f"uint{8 * dtype.itemsize}")).astype(dtype)
        if is_quantized:
            return jnp.full(shape, scale / 64, dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)

    return jax.jit(make, out_shardings=sharding)
