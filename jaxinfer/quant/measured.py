"""What `auto` takes from the quality table (docs/quantization.md): committed figures, nothing is measured at start."""

from __future__ import annotations

from collections.abc import Mapping

ZERO_POINT_PAYS = True
"""int4: a zero point per group costs 2 bytes in 18 and gains 0.3 to 0.8 dB on real float weights."""

VOCABULARY_METHODS: Mapping[str, str] = {"int4": "int8_weight_only"}
"""Methods whose own rounding is too coarse for the vocabulary's matrices, and what those get instead: SmolLM2's perplexity
grows by 8 % with an embedding in int4, and by half a percent with one in int8."""
