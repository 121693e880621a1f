"""Others who do the same work: XLA's dense product, cuDNN's attention through JAX, tokamax. PyTorch has a part of its own."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.served import Case

Peer = tuple[Callable[[jax.Array], Any], Callable[[Any], Any]]
"""Makes arguments, and takes them."""


def peers(case: Case) -> dict[str, Peer | str]:
    """Who there is for a case; a string is why one cannot run."""
    if case.operation in ("packed_matmul", "int8_matmul"):
        return {"bfloat16_product": _product(case)}
    if case.operation == "grouped_matmul":
        return {"lax_ragged_dot": _ragged(case, lax.ragged_dot), "tokamax": _tokamax("ragged_dot", lambda run: _ragged(case, run))}
    if case.operation == "paged_attention":
        refusal = not_dense(case.sizes)
        if refusal is not None:
            return dict.fromkeys(("cudnn_dense", "tokamax_dense"), refusal)
        is_gpu = jax.devices()[0].platform == "gpu"
        cudnn = _attention(case.sizes, jax.nn.dot_product_attention, implementation="cudnn") if is_gpu else "cuDNN needs a GPU"
        return {"cudnn_dense": cudnn, "tokamax_dense": _tokamax("dot_product_attention", lambda run: _attention(case.sizes, run))}
    return {}


def _tokamax(name: str, make: Callable[[Callable[..., Any]], Peer]) -> Peer | str:
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
    return make(getattr(importlib.import_module("tokamax"), name))


def _product(case: Case) -> Peer:
    """The same product of bfloat16 weights."""
    num_rows, num_outputs, num_inputs = (case.sizes[name] for name in ("num_rows", "num_outputs", "num_inputs"))

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key)
        shapes = ((num_rows, num_inputs), (num_outputs, num_inputs))
        return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))

    return make, lambda pair: lax.dot_general(*pair, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def _ragged(case: Case, run: Callable[..., Any]) -> Peer:
    """Pairs sorted by expert, weights as [X K N]: no tiles, hence less padding than ours."""
    shape = jax.eval_shape(case.make, jax.random.key(0))["weight"].shape

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key)
        rows = jax.random.normal(keys[0], (case.sizes["num_pairs"], shape[2]), jnp.bfloat16)
        weight = jax.random.normal(keys[1], (shape[0], shape[2], shape[1]), jnp.bfloat16)
        return rows, weight, jnp.asarray(case.sizes["chosen"], jnp.int32)

    return make, lambda arguments: run(*arguments)


def not_dense(sizes: dict[str, Any]) -> str | None:
    """Why dense attention of equal rows is not the same work."""
    (queries, keys), *others = set(sizes["rows"])
    if others or queries not in (1, keys):
        return "rows differ, or a chunk of a prompt"
    if sizes["cache"] != "bfloat16" or sizes["kv_heads"] == 1:
        return "an int8 or a latent cache"
    return None


def _attention(sizes: dict[str, Any], run: Callable[..., Any], **options: Any) -> Peer:
    """Without blocks: keys and values of each row lie together, which is less work than ours."""
    shapes = dense_shapes(sizes)

    def make(key: jax.Array) -> Any:
        return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(jax.random.split(key, 3), shapes, strict=True))

    return make, lambda qkv: run(*qkv, is_causal=shapes[0][1] > 1, **options)


def dense_shapes(sizes: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Of q, k and v: [rows, tokens, heads, head dim]."""
    rows = sizes["rows"]
    queries, keys = rows[0]
    keys_shape = (len(rows), keys, sizes["kv_heads"], sizes["head_dim"])
    return (len(rows), queries, sizes["heads"], sizes["head_dim"]), keys_shape, keys_shape
