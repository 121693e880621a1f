"""Weights as the model multiplies them: plain arrays, or one quantized type per method, found by the method's name."""
