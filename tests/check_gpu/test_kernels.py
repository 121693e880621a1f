"""What is said of kernels that break their budget; the kernels are made up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.common.budget import KernelCheck
from pallas_kernels.deviceless.compiler import Memory
from pallas_kernels.deviceless.devices import facts
from pallas_kernels.deviceless.ptx import Assembled
from tests.check_gpu.kernels import Seen, figures, problems

NOTHING = Memory(arguments=0, outputs=0, temporaries=0, aliased=0, peak=0, host_arguments=0, host_outputs=0, host_temporaries=0, code=0)


def check(**changes: Any) -> KernelCheck:
    options: dict[str, Any] = {
        "name": "decode",
        "run": abs,
        "arguments": (jax.ShapeDtypeStruct((4, 8), jnp.bfloat16),),
        "max_registers": 168,
        "max_shared_bytes": 100_000,
        "required": (r"wgmma.*bf16", r"cp\.async\.bulk\.tensor"),
        "floor_bytes": 4_800_000,
    }
    return KernelCheck(**{**options, **changes})


def seen(*, compiler: str = "mosaic", shared: int = 99_000, **changes: Any) -> Seen:
    options: dict[str, Any] = {
        "registers": 168,
        "spill_bytes": 0,
        "static_shared_bytes": 1000,
        "instructions": {"wgmma.m64n128k16.f32.bf16.bf16": 4, "cp.async.bulk.tensor.2d.load": 2},
        "losses": (),
    }
    return Seen(name=f"of_{compiler}", compiler=compiler, assembled=Assembled(**{**options, **changes}), dynamic_shared_bytes=shared)


def said(kernel: Seen, *, device: str = "h200", memory: Memory = NOTHING, **changes: Any) -> tuple[str, ...]:
    return problems(check(**changes), facts(device), [kernel], memory)


def test_a_kernel_at_its_limits_is_sound() -> None:
    assert said(seen()) == ()


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (seen(registers=169), "of_mosaic: 169 registers, at most 168 allowed"),
        (seen(shared=99_001), "of_mosaic: 100001 bytes of shared memory, at most 100000 allowed"),
        (seen(spill_bytes=4), "of_mosaic: spills 4 bytes, none allowed"),
        (seen(losses=("C7511: wgmma serialized",)), "of_mosaic: C7511: wgmma serialized"),
        (seen(instructions={"cp.async.bulk.tensor.2d.load": 1}), "no instruction wgmma.*bf16, only cp.async.bulk.tensor.2d.load"),
        (seen(compiler="xla"), "no kernel of mosaic was compiled, only of_xla"),
    ],
)
def test_each_flaw_is_named_with_both_numbers(kernel: Seen, text: str) -> None:
    assert text in said(kernel)


def test_the_name_of_an_instruction_is_matched_from_its_beginning() -> None:
    assert said(seen(instructions={"cp.async.bulk.load": 1, "wgmma.f32.bf16": 1}), required=("bulk",)) == (
        "no instruction bulk, only cp.async.bulk.load, wgmma.f32.bf16",
    )


def test_forbidden_instructions_are_refused() -> None:
    assert said(seen(), forbidden=(r"wgmma.*n128",)) == ("has wgmma.m64n128k16.f32.bf16.bf16, which wgmma.*n128 forbids",)


def test_a_device_has_less_shared_memory_than_a_budget_allows() -> None:
    kernel = seen(shared=170_000)
    assert said(kernel, max_shared_bytes=200_000) == ()
    assert said(kernel, max_shared_bytes=200_000, device="a100") == ("of_mosaic: 171000 bytes of shared memory, at most 166912 allowed",)


def test_donated_memory_is_to_be_aliased() -> None:
    half = Memory(**{**{name: 0 for name in Memory.__dataclass_fields__}, "aliased": 32})
    assert said(seen(), donate_argnums=(0,), memory=half) == ("only 32 of 64 donated bytes are aliased",)


def test_xlas_own_kernels_are_held_to_the_budget_when_they_are_what_is_checked() -> None:
    assert said(seen(compiler="xla", registers=200), compiler="xla") == ("of_xla: 200 registers, at most 168 allowed",)
    # Beside a kernel of Mosaic they may not spill, and that is all.
    beside = problems(check(), facts("h200"), [seen(), seen(compiler="xla", registers=200, spill_bytes=8)], NOTHING)
    assert beside == ("of_xla: spills 8 bytes, none allowed",)


def test_figures_have_the_floor_of_the_device() -> None:
    made = figures(check(floor_flops=10), facts("h200"), [seen()], NOTHING)
    assert made["floor_seconds"] == pytest.approx(1e-6)
    assert made["kernels"][0]["shared_bytes"] == 100_000


@pytest.mark.parametrize(
    "changes", [{"max_registers": 256}, {"max_registers": 0}, {"max_shared_bytes": 232_449}, {"floor_bytes": 0}, {"floor_flops": -1}]
)
def test_a_budget_beyond_the_hardware_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="decode: "):
        check(**changes)
