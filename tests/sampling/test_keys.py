from __future__ import annotations

import subprocess
import sys

import pytest

from jaxinfer.sampling_keys import derive_key


def test_every_bit_of_seed_and_index_counts() -> None:
    seeds = [0, -1, -(2**63), 2**64 - 1, 2**63, 2**63 - 1] + [1 << bit for bit in range(64)] + [-(1 << bit) for bit in range(1, 63)]
    keys = {derive_key(seed, index) for seed in set(seeds) for index in (0, 1, 2, 127, 2**32 - 1)}
    assert len(keys) == len(set(seeds)) * 5
    assert all(0 <= word < 2**32 for key in keys for word in key)


def test_keys_are_the_same_on_every_machine_and_run() -> None:
    assert derive_key(42, 0) == (1861458438, 3452749049)
    assert derive_key(-7, 3) == (3656014963, 1458993305)


@pytest.mark.parametrize(("seed", "index"), [(2**64, 0), (-(2**63) - 1, 0), (2**80, 0), (0, -1), (0, 2**32)])
def test_values_out_of_range_are_refused(seed: int, index: int) -> None:
    with pytest.raises(OverflowError):
        derive_key(seed, index)


def test_keys_need_no_jax() -> None:
    code = "import sys, jaxinfer.sampling_keys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
