"""benchmarks/gpu: what its figures are made of, that a part that dies costs no other, and the whole of it at tiny sizes on a CPU."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import end_to_end, machine, numerics, report
from benchmarks.gpu.random_model import LLAMA_3_8B, TINY, load_random, random_checkpoint
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.run import ROOT, Run, Stage, stages
from jaxinfer import sharding, startup
from jaxinfer.batching import Buckets
from jaxinfer.checkpoints.load import declare_parameters
from jaxinfer.config import EngineConfig
from jaxinfer.models import llama
from pallas_kernels.common import discovery
from pallas_kernels.common.dispatch import UnsupportedByKernel

THUNKS = """\
001: kCopy  [source       | next=002 (1)] kCopy
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        004: kCustomKernel [source       | next=005 (1)] loop_add_fusion grid: [1, 1, 1]
        005: kCustomCall   [prev=004 (1) | sink        ] kCustomCall
    006: kGemm [prev=000 (1) | sink] kGemm
"""


def part(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"status": "whole", "rows": list(rows)}


def kernel(case: str, contender: str, microseconds: float, **figures: Any) -> dict[str, Any]:
    return {"operation": "packed_matmul", "case": case, "contender": contender, "microseconds": microseconds, **figures}


# ---- figures ---------------------------------------------------------------------------------------------------------------------


def test_thunks_are_counted_inside_and_outside_of_command_buffers() -> None:
    assert end_to_end.count_thunks(THUNKS) == {
        "command_buffers": 1,
        "captured": 2,
        "not_captured": {"Copy": 1, "While": 1, "CustomKernel": 1, "Gemm": 1},
    }


def test_kernels_of_a_profile_are_counted_per_step() -> None:
    """Two steps of 10 ms: a graph of 4 ms and a kernel of 2 ms each."""
    million = 1e6
    kernels = [(start * million, (start + 4) * million, "CudaGraphExec:7") for start in (0, 10)]
    kernels += [(start * million, (start + 2) * million, "gemm") for start in (4, 14)]
    figures = end_to_end.kernel_figures(kernels, 2)
    assert figures["graphs_per_step"] == 1
    assert figures["kernels_per_step"] == 1
    assert figures["busy_share"] == pytest.approx(12 / 16)
    assert figures["longest_milliseconds"] == {"CudaGraphExec:7": 4.0, "gemm": 2.0}
    assert "not here" in end_to_end.kernel_figures([], 2)["kernels"]


def test_a_step_reads_the_weights_without_the_embedding_and_the_kv() -> None:
    """bfloat16: 7,504,924,672 weights of matrices and norms beside the embedding's; of KV 128 KiB a token."""
    config = llama.Config.from_hf(LLAMA_3_8B, "")
    shapes = {name: tensor.shape for name, tensor in random_checkpoint("llama", LLAMA_3_8B).tensors.items()}
    assert len(shapes) == 3 + 9 * 32
    sizes = {name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in shapes.items()}
    assert sum(sizes.values()) == 8_030_261_248
    leaves = [SimpleNamespace(shape=shape, nbytes=2 * sizes[name]) for name, shape in shapes.items()]
    runner = SimpleNamespace(_weights=leaves, weight_bytes=2 * sum(sizes.values()))
    weights, _ = end_to_end.step_bytes(SimpleNamespace(runner=runner), end_to_end.FULL, 32)
    assert weights == 2 * (8_030_261_248 - config.vocab_size * 4096)


@pytest.mark.parametrize("storage", ["bfloat16", "int4"])
def test_random_weights_fill_every_parameter(storage: str) -> None:
    """As they were declared, finite, and none of one number but norms and scales; no tensor of the checkpoint is read."""
    checkpoint = random_checkpoint("tiny", TINY)
    options = EngineConfig.from_options(quantization="none" if storage == "bfloat16" else storage)
    mesh = sharding.make_mesh(1)
    model = llama.Model(llama.Config.from_hf(TINY, ""), mesh, jnp.dtype("bfloat16"), 64)
    slots = declare_parameters(model, mesh, checkpoint, startup.resolve_storage(options))
    declared = [jax.tree.leaves(getattr(slot.module, slot.name).get_value()) for slot in slots]
    told: list[tuple[int, int]] = []
    load_random(slots, checkpoint, mesh, lambda done, total: told.append((done, total)))
    assert told[-1] == (len(slots), len(slots))
    for slot, structs in zip(slots, declared, strict=True):
        leaves = jax.tree.leaves(getattr(slot.module, slot.name).get_value())
        assert [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves] == [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in structs]
        assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in leaves)
        if len(slot.spec.shape) > 1:
            assert np.std(np.asarray(leaves[0], np.float32)) > 0.01


def test_only_measured_shapes_are_compiled() -> None:
    whole = Buckets.build(256, 4096, 1)
    with end_to_end.only_shapes({1, 32, 200, 4096}):
        few = startup.Buckets.build(256, 4096, 1)
    assert startup.Buckets is Buckets
    assert [spec.num_tokens for spec in few.specs] == [1, 32, 256, 4096]
    assert few.max_num_logit_rows == whole.max_num_logit_rows
    assert set(few.specs) <= set(whole.specs)


def test_the_yardstick_is_the_copy_that_was_measured() -> None:
    rows = [{"what": "read", "bytes_per_second": 9.0}, {"what": "copy", "bytes_per_second": 4e12}]
    assert machine.yardsticks(rows)["bytes_per_second"] == 4e12
    assert "bytes_per_second" not in machine.yardsticks([{"what": "copy", "failed": "no memory"}])


# ---- judging ----------------------------------------------------------------------------------------------------------------------


def test_promises_hold_or_not_or_were_not_measured() -> None:
    parts = {
        "kernels_packed_matmul": part(
            kernel("w8a16_gate_up_1", "mosaic", 30.0, kernel_microseconds=20.0),
            kernel("w8a16_gate_up_1", "bfloat16_product", 32.0),
            kernel("w8a16_down_1", "mosaic", 30.0),
            kernel("w8a16_down_1", "bfloat16_product", 30.0),
        ),
        "kernels_paged_attention": part({"case": "decode_32x2048", "contender": "mosaic", "share_of_bandwidth": 0.71}),
        "bfloat16": part(
            {"what": "decode", "rows": 1, "share_of_bandwidth": 0.64},
            {"what": "profile", "rows": 1, "host_gap_share": 0.04, "step_milliseconds": 1},
        ),
        "int8": part({"what": "decode", "rows": 1, "share_of_bandwidth": 0.99}),
    }
    judged = {promise["what"]: promise for promise in report.judge(parts)}
    holds = {what: promise["holds"] for what, promise in judged.items()}
    assert judged["w8a16_gate_up_1: times as fast as bfloat16"]["measured"] == pytest.approx(1.6)
    assert holds["w8a16_gate_up_1: times as fast as bfloat16"] is True
    assert holds["w8a16_down_1: times as fast as bfloat16"] is False
    assert holds["w8a16_gate_up_256: times as fast as bfloat16"] is None
    assert holds["decode attention decode_32x2048: share of the copy's bandwidth"] is True
    assert holds["one row of bfloat16: share of the copy's bandwidth"] is False
    assert holds["1 rows: share of a step without the host's gap"] is True
    assert holds["kernels' results within their limits: share of the specs"] is None


@pytest.mark.parametrize(
    ("rows", "holds"), [(({"ok": True},), True), (({"ok": True}, {"ok": False}), False), (({"ok": True}, {"failed": "x"}), False)]
)
def test_one_wrong_result_or_crash_is_enough(rows: tuple[dict[str, Any], ...], holds: bool) -> None:
    assert report.judge({"numerics_paged_attention": part(*rows)})[0]["holds"] is holds


def test_the_table_names_who_is_missing_and_what_failed() -> None:
    parts = {
        "kernels_packed_matmul": part(
            {"operation": "packed_matmul", "case": "w8a16_down_1", "contender": "tokamax", "reason": "not here: not installed"},
            {"operation": "packed_matmul", "case": "w8a16_down_1", "contender": "mosaic", "failed": "RuntimeError: misaligned"},
        ),
        "int8": part({"what": "decode", "rows": 1, "step_milliseconds": 3.25, "tokens_per_second": 307.7}),
        "int8_weight_only": part({"what": "decode", "rows": 1, "failed": "OOM"}, {"what": "decode", "rows": 32, "step_milliseconds": 4.5}),
    }
    lines = report.table(parts, report.judge(parts)).splitlines()
    assert any("tokamax" in line and "not installed" in line for line in lines)
    assert any("mosaic" in line and "misaligned" in line for line in lines)
    assert sum("3.250" in line for line in lines) == 1
    assert sum("4.500" in line for line in lines) == 1, "int8 is not int8_weight_only"
    assert any(line.startswith("int8_weight_only") and "OOM" in line for line in lines)


# ---- numbers of kernels -----------------------------------------------------------------------------------------------------------


def test_a_refusal_is_told_and_a_wrong_number_is_seen(tmp_path: Path) -> None:
    def refuse() -> tuple[float, float]:
        raise UnsupportedByKernel("head dim 24")

    rows, spec = Rows(tmp_path / "rows.json", 60), SimpleNamespace(name="small")
    assert not numerics.add(rows, "attention", "mosaic", spec, refuse)
    assert numerics.add(rows, "attention", "mosaic", spec, lambda: (0.5, 0.01))
    assert not numerics.add(rows, "attention", "mosaic", spec, lambda: 1 / 0)
    refused, wrong, crashed = json.loads((tmp_path / "rows.json").read_text())
    assert refused["refused"] == "head dim 24"
    assert wrong["ok"] is False
    assert "ZeroDivisionError" in crashed["failed"]


@pytest.mark.parametrize(("is_tiny", "num_rows"), [(False, 5), (True, 3)])
def test_every_spec_is_compared_or_the_first_that_are_taken(tmp_path: Path, is_tiny: bool, num_rows: int) -> None:
    def run(spec: Any) -> tuple[float, float]:
        if spec.name == "0":
            raise UnsupportedByKernel("odd sizes")
        return float(spec.name), 2.0

    rows = Rows(tmp_path / "rows.json", 60)
    numerics.compare_all(rows, "product", "mosaic", [SimpleNamespace(name=str(index)) for index in range(5)], run, is_tiny=is_tiny)
    assert len(rows.rows) == num_rows
    assert {row["spec"]: row.get("ok") for row in rows.rows}.items() <= {"0": None, "1": True, "2": True, "3": False, "4": False}.items()


def test_limits_are_the_specs_or_those_of_the_dtype() -> None:
    whole, half = np.zeros(1, np.float32), np.zeros(1, jnp.bfloat16)
    limit = lambda result, error=1e-6, **spec: numerics.limit_of(SimpleNamespace(MAX_ROW_ERROR=error), SimpleNamespace(**spec), [result])  # noqa: E731
    assert limit(half, limit=6e-3) == 6e-3
    assert limit(whole) == 1e-4
    assert limit(half) == 1e-2
    assert limit(whole, 0.0) == 0.0, "a copy is exact"


def test_what_a_pool_held_before_may_be_nan_but_a_result_may_not() -> None:
    nan = np.array([[1.0, np.nan]])
    assert numerics.error_of(nan, nan) == 0
    assert numerics.error_of(nan, np.array([[1.0, 2.0]])) == np.inf
    assert numerics.error_of(np.array([[1.0, 2.0]]), nan) == np.inf


@pytest.mark.parametrize("operation", discovery.operation_names())
def test_specs_are_found_with_their_arguments(operation: str) -> None:
    found = numerics.all_specs(importlib.import_module(f"pallas_kernels.{operation}.specs"))
    assert len(found) >= 5
    assert numerics.size_of(operation, found[0]) > 0


# ---- running ----------------------------------------------------------------------------------------------------------------------


def test_every_operation_has_its_parts_and_the_device_comes_first() -> None:
    planned = stages()
    parts = [part for stage in planned for part in stage.parts]
    assert parts[:2] == ["machine", "copy"]
    assert len(parts) == len(set(parts))
    for operation in discovery.operation_names():
        assert {f"numerics_{operation}", f"kernels_{operation}"} <= set(parts)


def test_a_part_that_hangs_or_crashes_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had written counts; the others are run; results.json is whole after each."""
    code = (
        "import json, pathlib, sys, time; name, folder = sys.argv[1], pathlib.Path(sys.argv[2]);"
        "(folder / f'{name}.json').write_text(json.dumps([{'what': name}]));"
        "time.sleep(60) if name == 'hangs' else sys.exit(7) if name == 'crashes' else None"
    )

    def start(self: Run, name: str, seconds: float, num_beside: int) -> subprocess.Popen[bytes]:
        folder = tmp_path / "work" / "parts"
        (folder / f"{name}.log").write_text("the log of " + name)
        return subprocess.Popen([sys.executable, "-c", code, name, str(folder)], start_new_session=True)

    monkeypatch.setattr(Run, "_start", start)
    run = Run(argparse.Namespace(minutes=1.0, out=tmp_path, work=tmp_path / "work", device="cpu", tiny=True))
    run.stage(Stage(parts=("hangs", "crashes"), seconds=1.5))
    run.stage(Stage(parts=("works",), seconds=30))
    run._deadline = 0
    run.stage(Stage(parts=("late",), seconds=30))
    results = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {name: result["status"].split(":")[0] for name, result in results.items()} == {
        "hangs": "stopped",
        "crashes": "ended with exit code 7",
        "works": "whole",
        "late": "left out",
    }
    assert results["hangs"]["rows"] == [{"what": "hangs"}]
    assert results["crashes"]["log"] == "the log of crashes"
    assert run.finish() == 0


def run_script(out: Path, *options: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [
        str(ROOT / "benchmarks" / "gpu" / "run.sh"),
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(out),
        "--work",
        str(out / "work"),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHON": sys.executable} | environment)
    return done, json.loads((out / "results.json").read_text())


def test_the_script_runs_a_part(tmp_path: Path) -> None:
    done, results = run_script(tmp_path, "--only", "copy")
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["parts"] == {"copy": "whole"}
    assert last["is_tiny"]
    copied, *_ = results["parts"]["copy"]["rows"]
    assert copied["bytes_per_second"] > 1e8
    assert results["judged"] == [], "tiny sizes prove nothing"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_script_runs(tmp_path: Path) -> None:
    """Every part, without packages that a bare machine may lack; no row may have failed."""
    (tmp_path / "sitecustomize.py").write_text('import sys\nsys.modules["gguf"] = sys.modules["httpx2"] = None\n')
    done, results = run_script(tmp_path / "out", "--minutes", "12", PYTHONPATH=str(tmp_path))
    assert list(results["parts"]) == [part for stage in stages() for part in stage.parts]
    assert {name: part["status"] for name, part in results["parts"].items() if part["status"] != "whole"} == {}
    rows = [row for part in results["parts"].values() for row in part["rows"]]
    assert [row for row in rows if "failed" in row] == []
    assert [row for row in rows if "left_out" in row] == []
    assert all(row["ok"] for row in rows if "ok" in row)
    for storage in report.STORAGES:
        decoded = [row for row in results["parts"][storage]["rows"] if row["what"] == "decode"]
        assert [row["rows"] for row in decoded] == list(end_to_end.SMALL.rows)
        assert all(row["recompiles"] == 0 for row in decoded)
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == set(results["pictures"]) == {"kernels.png", "decode.png"}
    assert results["parts"]["bfloat16"]["rows"][0]["weight_bytes"] > 100_000
    assert TINY["hidden_size"] == 64
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == "gpu"
