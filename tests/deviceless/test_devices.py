"""The facts of devices, and the text that XLA reads them from. Expected numbers are NVIDIA's, written out here once more."""

from __future__ import annotations

import re

import pytest

from pallas_kernels.common.budget import MAX_SHARED_BYTES
from pallas_kernels.deviceless.devices import DEVICES, facts, target_config


def fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"^ {2}(\w+): (.+)$", text, re.MULTILINE))


def test_a_device_is_found_by_both_of_its_names() -> None:
    assert facts("h200") is facts("NVIDIA H200") is DEVICES["h200"]
    with pytest.raises(ValueError, match="one of h100, h200, a100, got 'b200'"):
        facts("b200")


@pytest.mark.parametrize(
    ("name", "cores", "shared_kib", "bandwidth", "bfloat16"),
    [("h100", 132, 227, 3.35e12, 989.4e12), ("h200", 132, 227, 4.8e12, 989.4e12), ("a100", 108, 163, 2.039e12, 312e12)],
)
def test_facts_are_those_of_the_data_sheets(name: str, cores: int, shared_kib: int, bandwidth: float, bfloat16: float) -> None:
    device = facts(name)
    assert (device.num_cores, device.shared_bytes_per_block, device.bandwidth) == (cores, shared_kib * 1024, bandwidth)
    assert device.peak_flops["bfloat16"] == bfloat16
    assert device.peak_flops["int8"] == pytest.approx(2 * bfloat16, rel=1e-3)


def test_the_largest_shared_memory_of_a_budget_is_what_hopper_has() -> None:
    assert {DEVICES[name].shared_bytes_per_block for name in ("h100", "h200")} == {MAX_SHARED_BYTES}


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    device = facts("h200")
    assert device.floor_seconds(num_bytes=4.8e9) == pytest.approx(1e-3)
    assert device.floor_seconds(num_bytes=4.8e9, flops=989.4e12) == pytest.approx(1.0)
    assert device.floor_seconds(num_bytes=1, flops=1978.9e12, peak="int8") == pytest.approx(1.0)


@pytest.mark.parametrize("name", DEVICES)
def test_the_text_says_what_the_facts_say(name: str) -> None:
    device, said = facts(name), fields(target_config(facts(name), toolkit="13.0.0"))
    assert said["name"] == f'"{device.kind}"'
    assert int(said["core_count"]) == device.num_cores
    assert int(said["memory_bandwidth"]) == device.bandwidth
    assert int(said["device_memory_size"]) == device.memory_bytes
    assert int(said["shared_memory_per_block_optin"]) == device.shared_bytes_per_block
    assert said["runtime_version"] == said["driver_version"] == '"13.0.0"'


def test_only_hopper_has_the_accelerated_features() -> None:
    assert "{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in target_config(facts("h100"))
    assert "{ major: 8 minor: 0 }" in target_config(facts("a100"))
