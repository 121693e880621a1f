"""The golden models split over devices and with a rounded KV cache, and rotations that no golden can tell apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import sharding
from jaxinfer.layers.attention import Attention, AttentionSpec, attention_weights
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


def test_factors_of_keys_follow_their_bias() -> None:
    """At least one everywhere, equal for two channels that are rotated together, and by as much as those stand out."""
    spec = AttentionSpec(size=64, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    weights = attention_weights("a", has_qkv_bias=True)
    attention = Attention(spec, weights, mesh=sharding.make_mesh(1), dtype=jnp.dtype("float32"))
    bias = np.ones(128, np.float32)  # 64 of queries, 32 of keys, 32 of values
    bias[[64 + 3, 64 + 11]] = 300.0, -400.0
    attention.qkv.bias = nnx.Param(jnp.asarray(bias))
    factors = np.asarray(attention._key_factors(16))[0]
    usual = np.exp(np.mean(np.log(np.where(np.isin(np.arange(16), [3, 11]), 500.0, np.sqrt(2.0)))))
    expected = np.ones((2, 16))
    expected[0, [3, 11]] = 500.0 / usual
    np.testing.assert_allclose(factors, expected, rtol=1e-3)


def test_a_large_bias_in_a_few_key_channels_costs_int8_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Qwen2.5: without factors the large channels set the step of all others. Float keys are what both are held against."""
    case = load_case("qwen2")
    config, tensors = read_config(case.folder), dict(read_tensors(case.folder))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    for name in tensors:
        if name.endswith("k_proj.bias"):
            bias = tensors[name].copy()
            bias[[1, 1 + head_dim // 2]] = 150.0, -100.0  # a pair that is rotated together
            tensors[name] = bias
    sequences = [read_golden(case.folder).token_ids[0][:-1]]

    def error(kv_dtype: str) -> float:
        got = forward(config, tensors, sequences, max_model_len=case.max_model_len, kv_dtype=kv_dtype)
        return float(np.median(row_errors(got[0], exact[0])))

    exact = forward(config, tensors, sequences, max_model_len=case.max_model_len)
    balanced = error("int8")
    jax.clear_caches()  # layers of one structure are traced once in a process
    monkeypatch.setattr(Attention, "_key_factors", lambda self, rotated_size: jnp.ones((1, self.spec.num_kv_heads, 1), jnp.float32))
    unbalanced = error("int8")
    # What is left is the rounding of the large channels themselves, two of sixteen here.
    assert balanced < 0.8 * unbalanced, (balanced, unbalanced)


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
