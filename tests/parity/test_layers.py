"""Each block against the numpy oracle on the same input, float and int8.

Why block by block: of the whole int8 model nothing exact can be asked. An activation next to a rounding edge falls to one side or the
other after a float rounding of 1e-7, every later one then moves a little and some of them cross an edge too; the oracle against itself
in float32 differs by 2 % in a typical row of logits and by 12 % in the worst. Within one block there is no time for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity import oracle as oracle_module
from tests.parity.engine_layers import EngineLayers
from tests.parity.gguf_weights import read_gguf
from tests.parity.golden_files import read_goldens
from tests.parity.oracle import LlamaOracle, row_errors

pytestmark = [pytest.mark.parity, pytest.mark.goldens, pytest.mark.timeout(600)]

PROMPT = 29
NUM_TOKENS = 41
MAX_TYPICAL_ERROR = {"none": 2e-6, "int8": 2e-4}
MAX_ERROR = {"none": 1e-4, "int8": 2e-3}
"""int8: one activation of o_proj's input, or of the head's, on the other side of its rounding edge."""


@pytest.fixture(scope="module")
def weights_and_config(smollm2_path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return read_gguf(smollm2_path)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    golden = read_goldens()[PROMPT]
    return (golden.prompt_token_ids + golden.token_ids)[:NUM_TOKENS]


def update_errors(oracle: LlamaOracle, engine: EngineLayers, token_ids: list[int]) -> np.ndarray:
    """Errors `[L + 1, T]` of what each block adds and, last, of the head; all start from the oracle's hidden states."""
    engine.start(token_ids)
    x = oracle.embed(token_ids).astype(np.float32)
    np.testing.assert_array_equal(engine.embedded(), x)
    errors = []
    for index in range(oracle.num_layers):
        expected = oracle.layer(index, x.astype(np.float64))
        # The residual stream is hundreds of times larger than one block's share of it, and would hide any error.
        errors.append(row_errors(engine.layer(index, x) - x, expected - x))
        x = expected.astype(np.float32)
    errors.append(row_errors(engine.head(x), oracle.head(x.astype(np.float64))))
    return np.array(errors)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_every_block_is_the_oracle(
    quantization: Any, smollm2_path: Path, weights_and_config: tuple[dict, dict], token_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineLayers(smollm2_path, quantization)
    errors = update_errors(LlamaOracle(*weights_and_config, quantization=quantization), engine, token_ids)
    assert np.median(errors) <= MAX_TYPICAL_ERROR[quantization], np.median(errors, axis=1)
    assert errors.max() <= MAX_ERROR[quantization], errors.max(axis=1)
    if quantization == "int8":
        monkeypatch.setattr(oracle_module, "ONE_TERM_INPUTS", ("down_proj",))
        wrong = update_errors(LlamaOracle(*weights_and_config, quantization="int8"), engine, token_ids)
        assert np.median(wrong) > 10 * MAX_TYPICAL_ERROR["int8"], "another rounding of one product must not pass"
