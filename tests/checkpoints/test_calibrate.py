"""Calibration of a random Llama against a Llama in float64 whose products note what goes into them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.calibrate import calibrate
from jaxinfer.checkpoints.load import Storage
from jaxinfer.cli.main import main
from jaxinfer.errors import ConfigError
from jaxinfer.quant.gptq import from_moments
from jaxinfer.quant.int4 import Int4
from jaxinfer.quant.weight import method
from tests.checkpoints.checkpoint_files import write_gguf
from tests.parity.oracle import LlamaOracle
from tests.tiny_llama import random_weights

INT4 = Int4(32, True)
LENGTH = 48  # three blocks of the cache
WINDOWS = [[(i * i * 37 + i * 11 + k * 101) % 4000 + 60 for i in range(LENGTH)] for k in range(6)]


class NotingOracle(LlamaOracle):
    """Sums x^T x of each product's inputs by its name."""

    def __init__(self, weights: dict[str, np.ndarray], config: dict):
        super().__init__(weights, config)
        self.weights = weights
        self.moments: dict[str, np.ndarray] = {}

    def _product(self, x: np.ndarray, weight: np.ndarray, name: str) -> np.ndarray:
        self.moments[name] = self.moments.get(name, 0) + x.T @ x
        return super()._product(x, weight, name)


@pytest.fixture(scope="module")
def weights(tiny_llama: Path) -> dict[str, np.ndarray]:
    return random_weights(json.loads((tiny_llama / "config.json").read_text()), 0)


def test_each_layer_is_quantized_for_what_the_quantized_ones_before_it_give(tiny_llama: Path, weights: dict[str, np.ndarray]) -> None:
    """The codes are those that the oracle's moments give, but for ties that float32 breaks the other way."""
    found = calibrate(open_checkpoint(str(tiny_llama)), Storage(method=INT4), WINDOWS)
    assert set(found) == {name for name, value in weights.items() if ".layers." in name and value.ndim == 2}
    oracle = NotingOracle(dict(weights), json.loads((tiny_llama / "config.json").read_text()))
    states = [oracle.embed(window) for window in WINDOWS]
    for layer in range(oracle.num_layers):
        for x in states:
            oracle.layer(layer, x)
        for name in [name for name in found if f".layers.{layer}." in name]:
            expected = from_moments(INT4, weights[name], oracle.moments[name.removesuffix(".weight")]).dequantize()
            got = found[name].dequantize()
            assert np.isclose(got, expected, rtol=1e-5, atol=1e-6).mean() > 0.97, name
            oracle.weights[name] = got
        states = [oracle.layer(layer, x) for x in states]


def test_the_models_outputs_are_nearer_than_rounded_to_nearest(tiny_llama: Path, weights: dict[str, np.ndarray]) -> None:
    """On the one window that it was calibrated on: fewer tokens than inputs, so that most errors can be taken up."""
    config = json.loads((tiny_llama / "config.json").read_text())
    found = calibrate(open_checkpoint(str(tiny_llama)), Storage(method=INT4), WINDOWS[:1])
    nearest = {name: INT4.from_float(weights[name]).dequantize() for name in found}
    calibrated = {name: weight.dequantize() for name, weight in found.items()}
    exact, *others = (LlamaOracle({**weights, **changed}, config).logits(WINDOWS[0]) for changed in ({}, nearest, calibrated))
    to_nearest, for_inputs = (np.square(other - exact).mean() for other in others)
    assert for_inputs < 0.5 * to_nearest


def test_convert_writes_what_calibrate_gives(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows come from the text given; the vocabulary's matrices are stored as without calibration."""
    text, target = tmp_path / "text.txt", tmp_path / "new"
    text.write_text(" ".join(f"number {i} and the {i * i % 97}th of them" for i in range(200)))
    words = ["--format", "orbax", "--quantization", "int4", "--calibrate", "--calibration-text", str(text), "--calibration-tokens", "1600"]
    assert main(["convert", str(tiny_llama), str(target), *words, "--verify"]) == 0
    assert "calibrating" in capsys.readouterr().err
    checkpoint = open_checkpoint(str(tiny_llama))
    token_ids = checkpoint.load_tokenizer().encode(text.read_text())
    expected = calibrate(checkpoint, Storage(method=INT4), [token_ids[start : start + 512] for start in (0, 512, 1024)])
    written = open_checkpoint(str(target)).tensors
    for name, weight in expected.items():
        np.testing.assert_array_equal(written[name].read(), weight.dequantize(), err_msg=name)
    vocabulary = method("int8_weight_only")
    assert vocabulary is not None
    output = "lm_head.weight"
    np.testing.assert_array_equal(written[output].read(), vocabulary.from_float(checkpoint.tensors[output].read()).dequantize())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibrate"], "--calibrate needs --quantization int4 and --format orbax, got --quantization none --format hf"),
        (["--format", "orbax", "--quantization", "int8", "--calibrate"], "got --quantization int8 --format orbax"),
        (["--calibration-tokens", "1024"], "--calibration-tokens is for --calibrate"),
        (["--calibration-text", "x.txt"], "--calibration-text is for --calibrate"),
        (
            ["--format", "orbax", "--quantization", "int4", "--calibrate", "--calibration-tokens", "100"],
            "at least a window of 512, got 100",
        ),
        (
            ["--format", "orbax", "--quantization", "int4", "--calibrate", "--calibration-text", "no.txt"],
            "--calibration-text 'no.txt' cannot",
        ),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", vocabulary=True)
    assert main(["convert", str(source), str(tmp_path / "new"), *words]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_windows_past_the_models_context(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="the model's context is 512"):
        calibrate(open_checkpoint(str(tiny_llama)), Storage(method=INT4), [[1] * 513])
