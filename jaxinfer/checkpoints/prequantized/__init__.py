"""Checkpoints that other tools quantized: one file per `quant_method`, found by name."""

from jaxinfer.checkpoints.prequantized.unpack import unpack_quantized

__all__ = ["unpack_quantized"]
