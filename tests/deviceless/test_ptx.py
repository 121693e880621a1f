"""What ptxas and PTX say, read from texts that were kept from real runs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pallas_kernels.deviceless.ptx import AssemblerError, assemble, count_instructions, entry_name, instruction_name, parse_log

SOUND = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for decode_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 136 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 98.171 ms
"""
FLAWED = """ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources \
for the wgmma pipeline in the function 'control_mosaic_gpu_kernel'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'control_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for control_mosaic_gpu_kernel
    1080 bytes stack frame, 1076 bytes spill stores, 1092 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1080 bytes cumulative stack size, 512 bytes smem
"""
PTX = """//
.version 9.0
.target sm_90a
.address_size 64
.visible .entry decode_mosaic_gpu_kernel(
\t.param .u64 .ptr .align 256 decode_mosaic_gpu_kernel_param_0
)
.maxntid 128, 1, 1
{
\tld.global.b32 \t%r1, [%rd1];
\t@%p1 cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd8, {%r1, %r2, %r3, %r4, %r5}], [%r10];
\t@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r9], [%rd8, {%r1, %r2}], [%r10];
\tcp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%rd8, {%r1, %r2, %r3, %r4, %r5}], [%r9];
\tcp.async.bulk.commit_group;
\tcp.async.bulk.wait_group 0;
\t{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 1; }
\t{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {%r1}, %rd1, %rd2, p; }
\t{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {%r1}, %rd1, %rd2, p; }
\twgmma.wait_group.sync.aligned 0;
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
\tcp.async.cg.shared.global [%r1], [%rd1], 16;
\tred.global.add.f32 [%rd1], %f1;
\tand.pred \t%p3, %p1, %p2;
\tret;
}
"""


def test_a_sound_report() -> None:
    assert parse_log(SOUND) == (136, 0, 1, ())


def test_spills_and_serialized_products_are_seen() -> None:
    registers, spill_bytes, shared_bytes, losses = parse_log(FLAWED)
    assert (registers, spill_bytes, shared_bytes) == (255, 1076 + 1092, 512)
    assert [loss.split(":")[0] for loss in losses] == ["C7511"]
    assert "serialized" in losses[0]


def test_a_report_without_registers_is_an_error() -> None:
    with pytest.raises(AssemblerError, match="named no registers"):
        parse_log("ptxas info    : 0 bytes gmem\n")


def test_instructions_are_counted_also_within_inline_assembly() -> None:
    assert count_instructions(PTX) == {
        "cp.async.bulk.tensor.5d.load": 1,
        "cp.async.bulk.tensor.2d.load": 1,
        "cp.async.bulk.tensor.5d.store": 1,
        "cp.async.bulk.commit_group": 1,
        "cp.async.bulk.wait_group": 1,
        "wgmma.m64n128k16.f32.bf16.bf16": 1,
        "wgmma.m64n128k32.s32.s8.s8": 2,
        "mma.m16n8k16.f32.bf16.bf16.f32": 1,
        "cp.async.cg": 1,
        "red.global.add.f32": 1,
    }
    assert entry_name(PTX) == "decode_mosaic_gpu_kernel"


@pytest.mark.parametrize(
    ("instruction", "name"),
    [
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", "cp.async.bulk.load"),
        ("cp.async.bulk.global.shared::cta.bulk_group", "cp.async.bulk.store"),
        ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group", "cp.reduce.async.bulk.tensor.2d.store"),
        ("cp.async.commit_group", "cp.async.commit_group"),
        ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "mma.m16n8k32.s32.s8.s8.s32"),
        ("setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.inc.u32"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "ldmatrix.m8n8.x4.shared.b16"),
    ],
)
def test_names_of_instructions(instruction: str, name: str) -> None:
    assert instruction_name(instruction) == name


def stand_in(folder: Path, *, status: int) -> Path:
    """A ptxas that says FLAWED and, on standard output, which arguments it was given."""
    script = folder / "ptxas"
    script.write_text(
        f"#!/bin/sh\ncat >/dev/null\ncat <<'END' >&2\n{FLAWED}END\necho \"ptxas info    : (C1) Potential Performance Loss: $*\"\nexit {status}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def test_ptxas_is_asked_for_the_target_of_the_ptx(tmp_path: Path) -> None:
    assembled = assemble(PTX, stand_in(tmp_path, status=0))
    assert assembled.spill_bytes == 1076 + 1092
    assert any("-v -arch=sm_90a" in loss for loss in assembled.losses)
    assert assembled.instructions["wgmma.m64n128k32.s32.s8.s8"] == 2


def test_a_refusal_of_ptxas_is_told_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(AssemblerError, match=r"status 255: ptxas info    : \(C7511\)"):
        assemble(PTX, stand_in(tmp_path, status=255))


def test_ptx_without_a_kernel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssemblerError, match="has no kernel"):
        assemble(".version 9.0\n.target sm_90a\n.func f() { ret; }\n", stand_in(tmp_path, status=0))
