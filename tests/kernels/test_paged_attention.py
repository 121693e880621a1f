"""What paged attention promises beyond its numbers: faults that the comparison rejects, equal bits, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.paged_attention.api import OPERATION, paged_attention
from pallas_kernels.paged_attention.specs import LATENT, LONG, MIX, SPECS, Spec, make_arguments, static_arguments
from tests.kernels import oracles

BY_NAME = {spec.name: spec for spec in SPECS}


def jitted(spec: Spec, implementation: str) -> Callable[[dict[str, Any]], np.ndarray]:
    """The implementation as a function of the arrays; float32."""
    call = jax.jit(lambda kwargs: paged_attention(**kwargs, **static_arguments(spec), implementation=implementation))
    return lambda arguments: np.asarray(call(jax.tree.map(jnp.asarray, arguments)), np.float32)


def expect(spec: Spec, arguments: dict[str, Any], **changed: Any) -> np.ndarray:
    """The oracle's rows that are no padding."""
    output = oracles.paged_attention(**{**arguments, **static_arguments(spec), **changed})
    return output[: sum(queries for queries, _ in spec.rows)]


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("name", ["decode", "chunks_and_decodes", "nine_heads_three_groups", "window", "int8", "narrow_values"])
def test_faults_are_rejected(name: str, implementation: str) -> None:
    """Slots of each block reversed, values of the next block: each moves some row far beyond the limit."""
    spec = BY_NAME[name]
    arguments = make_arguments(spec)
    expected = expect(spec, arguments)
    finite = {name: np.nan_to_num(array) for name, array in arguments.items()}
    pools = [name for name in ("k_blocks", "v_blocks", "k_scales", "v_scales") if name in arguments]
    faults = [{name: finite[name][:, :, ::-1].copy() for name in pools}, {"v_blocks": np.roll(finite["v_blocks"], 1, axis=1)}]
    call = jitted(spec, implementation)
    for fault in faults:
        output = call(finite | fault)[: len(expected)]
        assert row_error(output, expected) > 0.1


WITHOUT = {
    "soft_cap": {"soft_cap": None},
    "soft_cap_window": {"soft_cap": None},
    "sinks": {"sinks": None},
    "sinks_window": {"sinks": None},
    "int8": {"k_scales": np.float32(0.015)},
    "int8_window": {"v_scales": np.float32(0.015)},
    "int8_sinks_soft_cap": {"sinks": None},
    "narrow_values_int8_window": {"window": None},
    "latent_int8": {"k_scales": np.float32(0.015)},
    "float8": {"k_scales": np.float32(0.015)},
    "float8_window_sinks": {"sinks": None},
    "window": {"window": 33},
}


@pytest.mark.parametrize("name", WITHOUT)
def test_every_feature_matters_to_its_spec(name: str) -> None:
    """Without the feature (for scales: all equal) the oracle itself is off by far more than the limit of the comparison."""
    spec = BY_NAME[name]
    arguments = make_arguments(spec)
    changed = {key: np.full_like(arguments[key], value) if isinstance(value, np.float32) else value for key, value in WITHOUT[name].items()}
    assert row_error(expect(spec, arguments, **changed), expect(spec, arguments)) > 1e-2


def test_a_sink_may_dominate_and_a_cap_holds_large_scores() -> None:
    """A sink of 60 leaves almost nothing of the values, without overflow; scores of 1000 under a cap of 50 neither."""
    spec = Spec(name="sinks", rows=MIX, has_sinks=True)
    arguments = make_arguments(spec)
    arguments["sinks"] = np.array([60, -60, 0, 5], np.float32)
    capped = Spec(name="cap", rows=MIX, soft_cap=50.0)
    large = make_arguments(capped)
    large["q"] = large["q"] * 300
    for case, inputs in ((spec, arguments), (capped, large)):
        for implementation in ("native", "xla", "reference"):
            # Float32 numbers between 32 and 64 are off by up to 2e-6, and so are exponentials of their differences.
            assert row_error(jitted(case, implementation)(inputs), expect(case, inputs)) < 2e-5, implementation


BITS = {
    "plain": Spec(name="plain", rows=((1, 50), (20, 180), (1, 300), (16, 16)), num_heads=9, num_kv_heads=3, head_dim=64),
    "everything": Spec(name="everything", rows=MIX, cache_dtype="int8", has_sinks=True, soft_cap=2.0, window=70),
    "bfloat16": Spec(name="bfloat16", rows=MIX, cache_dtype="bfloat16", num_heads=2, head_dim=64),
    "int8": Spec(name="int8", rows=MIX, cache_dtype="int8", num_heads=2, head_dim=80),
    "latent": Spec(name="latent", rows=((1, 50), (20, 80)), num_heads=40, head_dim=48, value_dim=32, **LATENT),
    "long": Spec(name="long", rows=LONG, num_heads=2, num_kv_heads=1),
    "long_window": Spec(name="long_window", rows=LONG, num_heads=2, num_kv_heads=1, window=500),
    "wide": Spec(name="wide", rows=((1, 50), (5, 80)), num_heads=8, head_dim=288, num_kv_heads=1),
}


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "native") for name in BITS), ("plain", "xla"), ("everything", "xla"), ("latent", "xla")]
)
def test_results_have_the_same_bits_in_any_batch(name: str, implementation: str) -> None:
    """The last token of each row alone equals the same token of a chunk in a batch, to the bit (float32, CPU)."""
    spec = BITS[name]
    arguments = make_arguments(spec)
    call = jitted(spec, implementation)
    together = call(arguments)
    starts, tables = arguments["query_start_loc"], arguments["block_tables"]
    for row, (_, keys) in enumerate(spec.rows):
        last = starts[row + 1] - 1
        alone = arguments | {
            "q": np.concatenate([arguments["q"][last : last + 1], np.zeros((7, *arguments["q"].shape[1:]), np.float32)]),
            "block_tables": np.concatenate([tables[row : row + 1], np.zeros((7, tables.shape[1]), np.int32)]),
            "query_start_loc": np.array([0] + [1] * 8, np.int32),
            "context_lens": np.array([keys] + [0] * 7, np.int32),
        }
        np.testing.assert_array_equal(call(alone)[0], together[last])


def test_head_dims_that_are_no_whole_vectors_go_to_xla() -> None:
    """The refusal says which dims would do."""
    spec = BY_NAME["head_dim_24"]
    arguments = make_arguments(spec)
    with pytest.raises(UnsupportedByKernel, match="multiples of 16, got 24 and 24"):
        jitted(spec, "native")(arguments)
    assert OPERATION.choice(arguments, static_arguments(spec))[0] == "xla"
    assert OPERATION.choice(make_arguments(BY_NAME["latent_576"]), static_arguments(BY_NAME["latent_576"]))[0] == "native"


def test_a_float8_cache_goes_to_xla() -> None:
    """Off a GPU."""
    spec = BY_NAME["float8"]
    arguments = make_arguments(spec)
    with pytest.raises(UnsupportedByKernel, match="the cache must be float32 or bfloat16 or int8, got float8_e4m3fn"):
        jitted(spec, "native")(arguments)
    assert OPERATION.choice(arguments, static_arguments(spec))[0] == "xla"


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("decode", {"context_lens": np.ones(3, np.int32)}, "rows disagree"),
        ("decode", {"q": np.ones((4, 3, 16), np.float32)}, "multiple of KV heads"),
        ("decode", {"q": np.ones((4, 4, 32), np.float32)}, "head dim 32"),
        ("decode", {"v_blocks": None}, "without v_blocks value_dim must be 1..16, got None"),
        ("decode", {"value_dim": 8}, "contradicts"),
        ("decode", {"soft_cap": 0.0}, "soft_cap must be positive"),
        (
            "decode",
            {"k_scales": np.ones((2, 3, 16), np.float32)},
            "k_scales go with a pool of int8 or float8_e4m3fn and no other, got some for float32",
        ),
        ("bfloat16_cache", {"v_blocks": np.ones((2, 26, 16, 16), np.float32)}, "must agree but in the last axis"),
        ("sinks", {"sinks": np.ones(3, np.float32)}, "one logit for each of 4"),
        ("int8", {"v_scales": None}, "v_scales go with a pool of int8 or float8_e4m3fn and no other, got none for int8"),
        ("int8", {"k_scales": np.ones((2, 3, 16), np.float32)}, "k_scales .2, 3, 16. must be"),
        ("latent", {"value_dim": 49}, "1..48, got 49"),
        ("latent_int8", {"v_scales": np.ones((2, 3, 16), np.float32)}, "v_scales must be None without v_blocks"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, changed: dict[str, Any], message: str) -> None:
    """Checked before anything is traced."""
    spec = BY_NAME[name]
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**make_arguments(spec), **static_arguments(spec), **changed})
