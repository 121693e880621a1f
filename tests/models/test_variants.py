"""The golden models split over devices and with a rounded KV cache, and rotations that no golden can tell apart."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.layers.rope import Rope, rope_table, rotate
from tests.models.case import Case, all_cases, load_case
from tests.models.golden_engine import forward, load_model, read_config, read_golden, read_tensors
from tests.parity.oracle import row_errors


def cases(*quick: str) -> list[Any]:
    """All of them; those that are not named here do not run with every change."""
    marks: dict[bool, Any] = {True: [pytest.mark.goldens], False: [pytest.mark.goldens, pytest.mark.nightly]}
    return [pytest.param(case, id=case.name, marks=marks[case.name in quick]) for case in all_cases()]


def errors_of(case: Case, **options: Any) -> np.ndarray:
    """Of every row of logits, the model built with `options` of `load_model`."""
    golden = read_golden(case.folder)
    sequences = [ids[:-1] for ids in golden.token_ids]
    got = forward(read_config(case.folder), read_tensors(case.folder), sequences, max_model_len=case.max_model_len, **options)
    return np.concatenate([row_errors(logits, expected) for logits, expected in zip(got, golden.logits, strict=True)])


@pytest.mark.parametrize("case", cases("phi3"))
def test_split_over_devices(case: Case) -> None:
    """As many of the four as divide the KV heads."""
    assert errors_of(case, num_devices=min(4, case.config.get("num_key_value_heads", 4))).max() <= 1e-4


@pytest.mark.parametrize("case", cases("gemma3_text", "granite"))
def test_bfloat16_is_near(case: Case) -> None:
    """Rounded everywhere, in the activations' own dtype and no wider one."""
    assert 1e-3 < np.median(errors_of(case, dtype="bfloat16", kv_dtype="bfloat16")) <= 0.1


@pytest.mark.parametrize(("name", "num_kinds"), [("llama", 1), ("gemma2", 2), ("gemma3_text", 2), ("phi3", 1), ("qwen2", 2)])
def test_layers_of_one_kind_are_traced_once(name: str, num_kinds: int) -> None:
    """`run_layers` traces once per graph definition: anything of one layer that a module keeps would make it another one."""
    case = load_case(name)
    model = load_model(read_config(case.folder), read_tensors(case.folder), max_model_len=16)[0]
    assert len({nnx.split(layer)[0] for layer in model.layers}) == num_kinds


@pytest.mark.goldens
def test_int8_kv_cache_is_near() -> None:
    """Two groups of layers, soft caps: rounded, so not exact, but far nearer than a lost scale would be."""
    errors = errors_of(load_case("gemma2"), kv_dtype="int8")
    assert 1e-4 < np.median(errors) <= 0.02


def test_interleaved_rotation_is_a_product_of_complex_numbers() -> None:
    """Neighbouring entries are real and imaginary part, turned by position * theta ** (-2 i / d); the rest passes through."""
    draws = np.random.default_rng(0)
    num_tokens, size, rest = 5, 8, 4
    q, k = (draws.standard_normal((num_tokens, 1, size + rest)) for _ in range(2))
    rotation = jnp.asarray(rope_table(Rope(theta=50.0, size=size), num_tokens))
    turned_q, turned_k = (np.asarray(rotate(jnp.asarray(x, jnp.float32), rotation, is_interleaved=True))[:, 0] for x in (q, k))
    turns = np.exp(1j * np.arange(num_tokens)[:, None] * 50.0 ** (-np.arange(0, size, 2) / size))
    complex_q, complex_k = ((x[:, 0, 0:size:2] + 1j * x[:, 0, 1:size:2]) * turns for x in (q, k))
    expected = (complex_q @ complex_k.conj().T).real + q[:, 0, size:] @ k[:, 0, size:].T
    np.testing.assert_allclose(turned_q @ turned_k.T, expected, atol=1e-5)
    np.testing.assert_array_equal(turned_q[:, size:], q[:, 0, size:].astype(np.float32))


def test_angles_are_exact_far_from_the_start() -> None:
    """In float32 a position of a hundred thousand times a frequency is off by thousandths of a turn."""
    position, rope = 99_991, Rope(theta=10_000.0, size=16)
    angles = position * 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(rope_table(rope, position + 1)[-1], np.concatenate([np.cos(angles), np.sin(angles)]), atol=1e-7)
