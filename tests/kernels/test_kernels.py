"""Every operation, implementation and spec against numpy float64; and proof that the metric would notice a fault."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import Operation, UnsupportedByKernel
from pallas_kernels.int8_matmul import api as int8_api
from pallas_kernels.int8_matmul import specs as int8_specs
from pallas_kernels.packed_matmul import api as packed_api
from pallas_kernels.packed_matmul import specs as packed_specs
from pallas_kernels.paged_attention import api as attention_api
from pallas_kernels.paged_attention import specs as attention_specs
from tests.kernels import oracles

Case = tuple[ModuleType, ModuleType, Any, str]


def cases() -> list[Any]:
    """(api, specs, spec, implementation) of everything but write_kv, which has a test file of its own."""
    found = []
    for api, specs in ((attention_api, attention_specs), (int8_api, int8_specs), (packed_api, packed_specs)):
        for spec in specs.SPECS:
            for implementation in api.OPERATION.implementations:
                if implementation == "mosaic":
                    continue  # interpreted at small sizes: see test_mosaic_*.py
                if implementation == "native" and (
                    getattr(spec, "head_dim", 0) % 16 or getattr(spec, "cache_dtype", "") == "float8_e4m3fn"
                ):
                    continue  # refused: see test_paged_attention.py
                found.append(pytest.param((api, specs, spec, implementation), id=f"{api.OPERATION.name}-{spec.name}-{implementation}"))
    return found


def static_arguments(spec: Any) -> dict[str, Any]:
    """What is not an array."""
    match spec:
        case attention_specs.Spec():
            return attention_specs.static_arguments(spec)
        case int8_specs.Spec():
            return int8_specs.static_arguments(spec)
    return {}


def real_rows(spec: Any, output: np.ndarray) -> np.ndarray:
    """The output without padding."""
    return output[: sum(queries for queries, _ in spec.rows)] if isinstance(spec, attention_specs.Spec) else output


def run(case: Case, arguments: dict[str, np.ndarray]) -> np.ndarray:
    """The implementation, jitted."""
    api, _, spec, implementation = case
    on_device = jax.tree.map(jnp.asarray, arguments)
    call = jax.jit(lambda kwargs: getattr(api, api.OPERATION.name)(**kwargs, **static_arguments(spec), implementation=implementation))
    return np.asarray(call(on_device), np.float32)


@pytest.mark.parametrize("case", cases())
def test_implementation_equals_the_oracle(case: Case) -> None:
    """A row that reads a wrong block, head, position or scale is off by tens of percent; the limits are 1e-2 and below."""
    api, specs, spec, _ = case
    arguments = specs.make_arguments(spec)
    expected = real_rows(spec, getattr(oracles, api.OPERATION.name)(**arguments, **static_arguments(spec)))
    limit = getattr(spec, "limit", 1e-2 if getattr(spec, "dtype", "") == "bfloat16" else specs.MAX_ROW_ERROR)
    output = run(case, arguments)
    assert np.isfinite(output).all(), "padding must stay finite: the next layer computes with it"
    output = real_rows(spec, output)
    assert row_error(output, expected) <= limit
    for broken in (np.zeros_like(output), np.roll(output, 1, axis=-1)):
        assert row_error(broken, expected) > limit, "the comparison would accept a broken kernel"


def test_int8_rows_have_the_same_bits_in_any_batch() -> None:
    """A row of 200 and the same row alone."""
    spec = int8_specs.Spec(name="rows", num_rows=200, num_outputs=96, num_inputs=576, num_terms=2)
    arguments = int8_specs.make_arguments(spec)
    together = run((int8_api, int8_specs, spec, "xla"), arguments)
    for row in (0, 1, 7, 199):
        alone = run((int8_api, int8_specs, spec, "xla"), arguments | {"x": arguments["x"][row : row + 1]})
        np.testing.assert_array_equal(alone[0], together[row])


def test_arguments_that_do_not_fit_are_refused() -> None:
    """Shapes are checked before anything is traced."""
    arguments = attention_specs.make_arguments(attention_specs.SPECS[1])
    with pytest.raises(ValueError, match="rows disagree"):
        attention_api.paged_attention(**arguments | {"context_lens": arguments["context_lens"][1:]}, scale=1.0)
    with pytest.raises(ValueError, match="multiple of KV heads"):
        attention_api.paged_attention(**arguments | {"q": arguments["q"][:, :3]}, scale=1.0)
    with pytest.raises(ValueError, match="num_terms"):
        int8_api.int8_matmul(jnp.ones((1, 4)), jnp.ones((2, 4), jnp.int8), jnp.ones(2), num_terms=3)


def test_dispatch_takes_the_first_that_does_not_refuse() -> None:
    """Order is by speed, a refusal passes on, an implementation asked for by name is never replaced."""

    def refuses(value: int) -> int:
        raise UnsupportedByKernel("no GPU here")

    operation = Operation(name="triple", implementations={"fast": refuses, "slow": lambda value: 3 * value})
    assert operation(5) == 15
    with pytest.raises(UnsupportedByKernel, match="no GPU here"):
        operation(5, implementation="fast")
    with pytest.raises(ValueError, match="must be one of fast, slow"):
        operation(5, implementation="medium")
    with pytest.raises(UnsupportedByKernel, match="fast: no GPU here"):
        Operation(name="none", implementations={"fast": refuses})(5)


def test_an_implementation_asked_for_by_name_gets_keywords_of_its_own() -> None:
    """So that a GPU's kernel can be interpreted on a CPU when somebody wants it, and never by chance."""

    def interpreted(value: int, *, interpret: bool = False) -> int:
        if not interpret:
            raise UnsupportedByKernel("no GPU here")
        return 3 * value

    implementations = {"mosaic": interpreted, "plain": lambda value: 4 * value}
    operation = Operation(name="triple", implementations=implementations, if_named={"mosaic": {"interpret": True}})
    assert operation(5, implementation="mosaic") == 15
    assert operation(5, implementation="plain") == 20
    assert operation(5) == 20
    with pytest.raises(ValueError, match="if_named has mosiac, which is none of mosaic, plain"):
        Operation(name="triple", implementations=implementations, if_named={"mosiac": {"interpret": True}})


def test_row_error_sees_a_single_bad_row() -> None:
    """One wrong row among many large ones; NaN is infinitely wrong."""
    expected = np.ones((100, 8)) * 1000
    expected[3] = 0.001
    actual = expected.copy()
    actual[3] = 0
    assert row_error(actual, expected) == pytest.approx(1.0)
    actual[5, 2] = np.nan
    assert row_error(actual, expected) == np.inf


def test_choice_names_what_a_call_would_take() -> None:
    """Found by tracing, so a refusal that depends on the arguments is seen."""

    def refuses(*, x: Any, factor: int) -> Any:
        raise UnsupportedByKernel(f"no factor {factor}")

    operation = Operation(name="scaled", implementations={"fast": refuses, "slow": lambda *, x, factor: x * factor})
    assert operation.choice({"x": jnp.ones(3)}, {"factor": 2}) == ("slow", ["fast: no factor 2"])
