"""What `auto` takes from the quality table (docs/quantization.md): committed figures, nothing is measured at start."""

from __future__ import annotations

ZERO_POINT_PAYS = True
EMBEDDINGS_PAY = frozenset({"auto", "int8", "int8_weight_only", "int4"})
