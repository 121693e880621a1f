"""The bytes that kernels move, counted while the interpreter executes their small cases, against what has to be moved."""

from __future__ import annotations

import pytest

from pallas_kernels.common.budget import CopiedBytes
from tests.check_gpu.discover import discover

MOST = 1.05
"""Bytes moved over the floor."""

CASES = {name: check.copied for name, check in discover().kernels.items() if check.copied is not None}


@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_little_more_is_moved_than_has_to_be(name: str) -> None:
    case: CopiedBytes = CASES[name]
    counted = case.count()
    # Less than the floor is no feat: something was not counted, or the floor is wrong.
    assert case.floor_bytes <= counted <= MOST * case.floor_bytes
