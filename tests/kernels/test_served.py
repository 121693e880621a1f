"""Cases at served shapes: each fits its operation, and its floor is what its arguments and results weigh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tune
from pallas_kernels.common import discovery
from pallas_kernels.common.served import Case, cases

TINY = [case for operation in discovery.operation_names() for case in cases(operation, is_tiny=True)]
CASES = TINY + [case for operation in discovery.operation_names() for case in cases(operation, is_tiny=False)]


def shapes(case: Case) -> tuple[Any, Any]:
    """Arguments and result, abstractly, through XLA's implementation."""
    arguments = jax.eval_shape(case.make, jax.random.key(0))
    api = discovery.operation(case.operation)
    return arguments, jax.eval_shape(lambda kwargs: api(**kwargs, **case.static, implementation="xla"), arguments)


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_every_operation_has_cases_of_its_own_name() -> None:
    assert {case.operation for case in CASES} == set(discovery.operation_names())
    for operation in discovery.operation_names():
        names = [case.name for case in cases(operation, is_tiny=False)]
        assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.operation.endswith("_matmul")], ids=lambda case: f"{case.operation}-{case.name}"
)
def test_floors_of_products(case: Case) -> None:
    """Everything once; of experts those that have tokens."""
    arguments, result = shapes(case)
    expected = num_bytes(arguments) + num_bytes(result)
    if case.operation == "grouped_matmul":
        experts, *matrix = arguments["weight"].shape
        idle = experts - np.count_nonzero(case.sizes["chosen"])
        expected -= idle * int(np.prod(matrix)) * 2 + num_bytes(arguments["tile_expert"])
    assert case.floor_bytes == expected


@pytest.mark.parametrize("case", cases("write_kv", is_tiny=False), ids=lambda case: case.name)
def test_floors_of_writes(case: Case) -> None:
    """New vectors are read; as many are written, and their scales."""
    arguments, result = shapes(case)
    assert case.feed is not None
    assert case.feed(arguments, result)["k_blocks"] is result[0]
    assert case.feed(arguments, result)["v_blocks"] is result[1]
    new, pool = arguments["k"], arguments["k_blocks"]
    scales = 8 * new.shape[0] * new.shape[1] if pool.dtype == jnp.int8 else 0
    assert case.floor_bytes == 2 * new.size * (2 + pool.dtype.itemsize) + scales + num_bytes(arguments["slot_mapping"])


def test_floors_of_attention() -> None:
    """Keys and values of 32 rows of 2,048 tokens, 8 heads of 128 numbers of two bytes; queries in and out; 4 operations a number."""
    case = next(case for case in cases("paged_attention", is_tiny=False) if case.name == "decode_32x2048")
    keys = 32 * 2048 * 8 * 128
    assert case.floor_bytes == 2 * keys * 2 + 2 * 32 * 32 * 128 * 2
    assert case.floor_flops == 4 * 32 * 2048 * 32 * 128
    prompt = next(case for case in cases("paged_attention", is_tiny=False) if case.name == "prefill_4096")
    assert prompt.floor_flops == 4 * (4096 * 4097 // 2) * 32 * 128
    assert prompt.floor_seconds({"bytes_per_second": 1e30, "bfloat16": 1e12}) == pytest.approx(prompt.floor_flops / 1e12)


@pytest.mark.kernels
@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.operation}-{case.name}")
def test_tiny_cases_run(case: Case) -> None:
    """Through XLA: finite numbers, so that an error made of NaN cannot pass for agreement."""
    arrays = jax.jit(case.make)(jax.random.key(1))
    result = jax.jit(lambda kwargs: discovery.operation(case.operation)(**kwargs, **case.static, implementation="xla"))(arrays)
    for leaf in jax.tree.leaves(result):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
        assert np.asarray(leaf, np.float32).any()


def test_the_tuner_calls_what_is_served() -> None:
    case = cases("int8_matmul", is_tiny=True)[0]
    keys = tune.keys_of(case, tune.caller(case))
    assert len(keys) == 1
    assert keys[0].startswith("int8_matmul ")
