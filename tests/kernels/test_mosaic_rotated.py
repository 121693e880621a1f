"""Rotation and write in one kernel, in the interpreter and as XLA's: numbers, races, bytes; and broken forms, which must be noticed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import interpreter
from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.write_kv import mosaic_rotated, rotate_and_write_kv
from pallas_kernels.write_kv.rotated import OPERATION, in_xla
from pallas_kernels.write_kv.specs import Spec, make_arguments
from tests.kernels import oracles


@dataclass(frozen=True)
class Case:
    """Sizes; head_dim, pools and slots are those of a spec of write_kv."""

    spec: Spec
    num_queries: int
    max_error: float


CASES = (
    Case(Spec(name="bfloat16", num_tokens=3, head_dim=32, value_dim=32, dtype="bfloat16", cache_dtype="bfloat16"), 4, 2**-8),
    Case(Spec(name="float32_two_groups", num_tokens=3, head_dim=16, value_dim=16), 68, 1e-6),
    Case(Spec(name="int8", num_tokens=3, num_heads=1, head_dim=64, value_dim=64, dtype="bfloat16", cache_dtype="int8"), 2, 0.02),
    Case(Spec(name="float8", num_tokens=1, head_dim=32, value_dim=32, cache_dtype="float8_e4m3fn"), 2, 0.1),
)
"""A number of one byte may fall to its neighbour when what is rounded differs in the last bit."""


def arguments_of(case: Case) -> dict[str, Any]:
    """The projection holds queries, then write_kv's keys and values; every token has angles of its own."""
    arguments, draws = make_arguments(case.spec), np.random.default_rng(1)
    k, v = arguments.pop("k"), arguments.pop("v")
    q = draws.standard_normal((k.shape[0], case.num_queries, k.shape[2])).astype(k.dtype)
    angles = draws.uniform(0, 7, (k.shape[0], k.shape[2] // 2))
    rotation = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    return arguments | {"qkv": np.concatenate([q, k, v], axis=1), "rotation": rotation}


def oracle(arguments: dict[str, Any]) -> list[np.ndarray]:
    """Queries and dequantized pools, one complex number for each pair of entries."""
    arguments = dict(arguments)
    qkv, rotation = arguments.pop("qkv"), arguments.pop("rotation").astype(np.float64)
    num_kv, half = arguments["k_blocks"].shape[0], qkv.shape[2] // 2
    numbers = qkv[:, :-num_kv].astype(np.float64)
    turned = (numbers[..., :half] + 1j * numbers[..., half:]) * (rotation[:, None, :half] + 1j * rotation[:, None, half:])
    turned = np.concatenate([turned.real, turned.imag], axis=-1).astype(qkv.dtype)
    pools = oracles.write_kv(**arguments, k=turned[:, -num_kv:], v=qkv[:, -num_kv:])
    return [turned[:, :-num_kv].astype(np.float64), *dequantized(pools)]


def dequantized(pools: Any) -> list[np.ndarray]:
    """Keys and values as numbers."""
    keys, values, *scales = (None if pool is None else np.asarray(pool).astype(np.float64) for pool in pools)
    return [pool if scale is None else pool * scale[..., None] for pool, scale in zip((keys, values), scales, strict=True)]


def worst(results: Any, expected: list[np.ndarray]) -> float:
    """Of queries, keys and values."""
    queries, *pools = results
    found = [np.asarray(queries).astype(np.float64), *dequantized(pools)]
    return max(row_error(actual, wanted) for actual, wanted in zip(found, expected, strict=True))


def run(arguments: dict[str, Any]) -> tuple[Any, interpreter.Run]:
    """Interpreted, with memory that starts as NaN."""
    with interpreter.interpreted() as counted:
        call = jax.jit(lambda kwargs: mosaic_rotated.rotate_and_write_kv(**kwargs, interpret=True))
        results = jax.tree.map(np.asarray, call(arguments))
    return results, counted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec.name)
def test_xla_equals_the_oracle(case: Case) -> None:
    arguments = arguments_of(case)
    results = jax.jit(lambda kwargs: in_xla(**kwargs))(arguments)
    expected = oracle(arguments)
    assert worst(results, expected) <= case.max_error
    assert worst((np.zeros_like(results[0]), *results[1:]), expected) > 0.5


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec.name)
def test_kernel_equals_the_oracle(case: Case) -> None:
    arguments = arguments_of(case)
    results, counted = run(arguments)
    assert worst(results, oracle(arguments)) <= case.max_error
    assert not counted.has_races


@pytest.mark.kernels
def test_the_projection_is_read_once() -> None:
    """With each token's angles and slot; queries, and the keys and values that have a slot, are written once."""
    case = CASES[2]
    _, counted = run(arguments_of(case))
    assert counted.bytes_read == 3 * (4 * 64 * 2 + 64 * 4 + 4)
    assert counted.bytes_written == 3 * 2 * 64 * 2 + 2 * 2 * (64 + 4)


@pytest.mark.kernels
def test_the_operation_runs_it_by_name() -> None:
    arguments = arguments_of(CASES[0])
    assert worst(rotate_and_write_kv(**arguments, implementation="mosaic"), oracle(arguments)) <= CASES[0].max_error
    assert OPERATION.choice(arguments, {})[0] == "xla"


BROKEN = {
    "the vectors are not waited for": ("wait_for", lambda _: lambda arrived: None),
    "what registers wrote is not published": ("publish", lambda _: lambda: None),
    "the slot is off by one": ("place_of", lambda place_of: lambda slot, block_size: place_of(jnp.maximum(slot - 1, 0), block_size)),
    "the angle has the other sign": ("rotate", lambda rotate: lambda first, second, cos, sin: rotate(first, second, cos, -sin)),
}


@pytest.mark.kernels
@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the numbers or by the detector of races."""
    name, broken = BROKEN[what]
    monkeypatch.setattr(mosaic_rotated, name, broken(getattr(mosaic_rotated, name)))
    arguments = arguments_of(CASES[0])
    results, counted = run(arguments)
    assert counted.has_races or worst(results, oracle(arguments)) > 0.1


def test_what_does_not_fit_is_refused() -> None:
    """Shapes, and what the kernel does not take."""
    arguments = arguments_of(CASES[0])
    with pytest.raises(ValueError, match=r"must be \[T D\] and \[T\]"):
        rotate_and_write_kv(**arguments | {"rotation": arguments["rotation"][:, :16]})
    with pytest.raises(ValueError, match="heads of queries, keys and values"):
        rotate_and_write_kv(**arguments | {"qkv": arguments["qkv"][:, :4]})
    with pytest.raises(UnsupportedByKernel, match="needs a Hopper GPU"):
        mosaic_rotated.rotate_and_write_kv(**arguments)
    with pytest.raises(UnsupportedByKernel, match="dtype or of one byte a number, got bfloat16 for float32"):
        mosaic_rotated.rotate_and_write_kv(**arguments | {"qkv": arguments["qkv"].astype(np.float32)}, interpret=True)
    with pytest.raises(UnsupportedByKernel, match="half a head must be a multiple of 8 numbers and 16 bytes, 128 at most, got 4"):
        mosaic_rotated.refuse(jnp.zeros((1, 3, 8), jnp.bfloat16), jnp.zeros((1, 1, 1, 8), jnp.bfloat16))
    with pytest.raises(UnsupportedByKernel, match="more than 64 heads must be a multiple of 8, got 70"):
        mosaic_rotated.refuse(jnp.zeros((1, 70, 16), jnp.bfloat16), jnp.zeros((1, 1, 1, 16), jnp.bfloat16))


def test_heads_of_a_token_are_cut_into_thread_blocks() -> None:
    """Seventy rows: keys begin at row 66, in the second block."""
    heads = mosaic_rotated.Heads(num_q=66, num_kv=2, half=8)
    assert heads.parts(0) == {"q": (0, 0, 64)}
    assert heads.parts(1) == {"q": (0, 64, 2), "k": (2, 0, 2), "v": (4, 0, 2)}
