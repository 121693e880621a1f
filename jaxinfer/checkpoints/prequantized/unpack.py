"""The raw tensors of a quantized checkpoint -> the tensors that a plain one has, kept packed."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoints.prequantized.scheme import Scheme, Settings, Stored
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.errors import CheckpointError, UnsupportedModelError

CONFIG_KEY = "quantization_config"
NOT_METHODS = ("scheme", "unpack")


def unpack_quantized(
    config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], file: str
) -> tuple[Mapping[str, Any], Mapping[str, LazyTensor]]:
    """The configuration without `quantization_config`, and the tensors under a plain checkpoint's names.

    A quantized matrix becomes one tensor whose `packed` holds it as it is stored, in [out, in]; `read()` dequantizes it and
    gives it in the orientation that a plain checkpoint has. Shapes and dtypes of what belongs together are checked; nothing
    is read. Which matrices are quantized is seen from the tensors: `ignore`, `targets` and the like are not interpreted.

    Args:
        config: config.json; without `quantization_config` everything is given back as it came.
        tensors: as they lie in the files.
        file: names the checkpoint in errors.

    Raises:
        UnsupportedModelError: a method or variant that is not implemented, naming its field.
        CheckpointError: parts of a matrix are missing or do not fit each other, naming the tensor.
    """
    quantization = config.get(CONFIG_KEY)
    if quantization is None:
        return config, tensors
    if not isinstance(quantization, dict):
        raise CheckpointError(f"must be an object, got {str(quantization)[:60]!r}", file=file, field=CONFIG_KEY)
    settings = Settings(quantization, CONFIG_KEY, file)
    method = settings.require("quant_method", _methods())
    scheme: Scheme = importlib.import_module(f"{__package__}.{method.replace('-', '_')}").make_scheme(settings)
    plain_config = {key: value for key, value in config.items() if key != CONFIG_KEY}
    return plain_config, _unpack(tensors, scheme, file)


def _methods() -> list[str]:
    """The files of this package."""
    names = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return [name.replace("_", "-") for name in names if name not in NOT_METHODS]


def _unpack(tensors: Mapping[str, LazyTensor], scheme: Scheme, file: str) -> dict[str, LazyTensor]:
    suffixes = (scheme.marker, *scheme.others)
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if suffix is None:
            result[name] = tensor
            continue
        stem = name.removesuffix(suffix)
        marker = tensors.get(stem + scheme.marker)
        if marker is None or not scheme.is_quantized(marker):
            if suffix != scheme.marker:
                raise CheckpointError(f"belongs to a quantized {stem + scheme.marker}, which is not there", file=file, field=name)
            result[name] = tensor
        elif suffix == scheme.marker:
            parts = {other: tensors[stem + other] for other in suffixes if stem + other in tensors}
            plain = stem + scheme.plain
            if scheme.plain != scheme.marker and plain in tensors:
                raise CheckpointError(f"there is a quantized {name} as well", file=file, field=plain)
            result[plain] = scheme.build(Stored(stem, file, parts))
    for name in result:
        if re.search(r"(_scale|_scale_inv|_zero_point|qzeros|_packed)$", name):
            raise UnsupportedModelError(f"{file}: {name}: this quantization does not know such a tensor")
    return result
