"""How well a model predicts text, and how far a quantized one is from its floats."""
