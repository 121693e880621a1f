"""docs/quantization.md and jaxinfer/quant/measured.py say what was measured."""

from __future__ import annotations

from jaxinfer.quant import measured
from tests.docs.quality_tables import PAGE, START, newest, render


def test_page_is_what_was_measured() -> None:
    _, start, made = PAGE.read_text(encoding="utf-8").partition(START)
    assert start
    assert made.strip() == render().strip(), "run `python -m tests.docs.quality_tables`"


def test_auto_takes_what_was_measured() -> None:
    """A zero point pays where it lowers the error of real float weights; int4 vocabularies lose more than int8 ones everywhere."""
    (errors,) = newest("weight-error").values()
    gains = [
        errors["rows"][f"int4, {size}, zero point"]["snr_db"] - errors["rows"][f"int4, {size}, symmetric"]["snr_db"]
        for size in (32, 64, 128)
    ]
    assert (min(gains) > 0) == measured.ZERO_POINT_PAYS
    for result in newest("quality").values():
        rows = result["rows"]
        assert ("int4" in measured.VOCABULARY_METHODS) == (
            rows["int4, 32, zero point, int4 vocabulary"]["kl_mean"] > 1.1 * rows["int4, 32, zero point"]["kl_mean"]
        )
