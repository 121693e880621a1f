"""Tables of tile sizes: how they are looked up, what the tuner writes into them, and those that ship."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pallas_kernels import tune
from pallas_kernels.common import discovery, tuned
from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import Operation

KEY = tuned.key("decode", rows=tuned.bucket(33), head_dim=128)


def test_keys_and_buckets() -> None:
    assert KEY == "decode rows=64 head_dim=128"
    assert [tuned.bucket(size) for size in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_lookup_reads_the_table_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this operation, this device kind and exactly this key."""
    monkeypatch.setattr(tuned, "PACKAGE", tmp_path)
    monkeypatch.setattr(tuned.table_path, "__defaults__", (tmp_path,))
    path = tmp_path / "attention" / "tuned" / "nvidia_h200.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({KEY: {"config": {"tile_keys": 64}}}))
    assert tuned.lookup("attention", "NVIDIA H200", KEY) == {"tile_keys": 64}
    assert tuned.lookup("attention", "NVIDIA H200", KEY + " group=4") is None
    assert tuned.lookup("attention", "NVIDIA H100 80GB HBM3", KEY) is None
    assert tuned.lookup("product", "NVIDIA H200", KEY) is None


def test_a_trial_stands_in_for_the_tables_of_one_kernel() -> None:
    with tuned.trying("attention", "decode", {"tile_keys": 32}) as trial:
        assert tuned.lookup("attention", "cpu", KEY) == {"tile_keys": 32}
        assert tuned.lookup("attention", "cpu", "prefill rows=1") is None
        assert tuned.lookup("product", "cpu", KEY) is None
    assert trial.keys == [KEY]
    with tuned.trying("attention", None, None) as every:
        assert tuned.lookup("attention", "cpu", "prefill rows=1") is None
    assert every.keys == ["prefill rows=1"]
    assert tuned.lookup("attention", "cpu", KEY) is None


def test_the_best_is_best_over_all_cases() -> None:
    """Twice as fast in one case and three times as slow in another is no gain; what failed in a case is no candidate."""
    uneven, even, partial = (json.dumps({"tile": tile}) for tile in (1, 2, 3))
    entry = tune.Entry(rule_seconds={"a": 1.0, "b": 1.0})
    entry.relative = {uneven: {"a": 0.5, "b": 3.0}, even: {"a": 0.9, "b": 0.8}, partial: {"a": 0.1}}
    best = entry.best()
    assert best is not None
    assert best[0] == {"tile": 2}
    assert best[1] == pytest.approx((0.9 * 0.8) ** 0.5)
    wavering = tune.Entry(rule_seconds={"a": 1.0}, relative={even: {"a": 0.99}})
    assert wavering.best() is None


def test_a_table_keeps_what_was_not_measured(tmp_path: Path) -> None:
    """And loses what was measured and no longer beats the rule."""
    path = tuned.table_path("attention", "NVIDIA H200", tmp_path)
    old = {"decode rows=1": {"config": {"tile": 7}}, "decode rows=2": {"config": {"tile": 8}}}
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(old))
    faster = tune.Entry(rule_seconds={"a": 1e-5}, relative={'{"tile": 2}': {"a": 0.5}})
    slower = tune.Entry(rule_seconds={"a": 1e-5}, relative={'{"tile": 2}': {"a": 1.5}})
    assert tune.write_table(path, {"decode rows=1": slower, "decode rows=4": faster}) == 2
    table = tuned.read_table(path)
    assert table["decode rows=2"] == old["decode rows=2"]
    assert table["decode rows=4"] == {"config": {"tile": 2}, "relative_time": 0.5, "rule_microseconds": {"a": 10.0}}
    assert "decode rows=1" not in table


@pytest.mark.kernels
@pytest.mark.parametrize("operation", discovery.operation_names())
def test_the_tuner_runs_in_the_interpreter(operation: str) -> None:
    """One small case of every kernel that lists candidates: the rule and a candidate of each key are timed, whichever is faster."""
    listed = tune.candidates(operation)
    if not listed or tune.IMPLEMENTATION not in discovery.operation(operation).implementations:
        pytest.skip("no kernel that lists candidates")
    lines: list[str] = []
    entries = tune.tune(operation, is_tiny=True, deadline=float("inf"), report=lines.append)
    assert entries, lines
    for entry in entries.values():
        assert all(seconds > 0 for seconds in entry.rule_seconds.values())
    assert any(entry.relative for entry in entries.values()), lines


@pytest.mark.kernels
def test_the_tuner_refuses_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that give other numbers are no candidates, however fast they are."""
    monkeypatch.setattr(tune, "row_error", lambda actual, expected: row_error(actual * 1.1, expected))
    lines: list[str] = []
    with pytest.raises(ArithmeticError, match=r"differs from the rule's result by 0\.1"):
        tune.tune("int8_matmul", is_tiny=True, deadline=float("inf"), report=lines.append)


def test_shipped_tables_fit_the_kernels() -> None:
    """Every entry has the fields of a `Config` of its operation: else every call of that shape would fail."""
    for path in sorted(tuned.PACKAGE.glob("*/tuned/*.json")):
        operation = path.parents[1].name
        modules = discovery.kernel_modules(operation)
        configs = [value for module in modules for name, value in discovery.classes(module) if name.endswith("Config")]
        fields = [{field.name for field in dataclasses.fields(config)} for config in configs]
        for key, entry in tuned.read_table(path).items():
            assert set(entry["config"]) in fields, f"{path}: {key}"


@pytest.mark.parametrize("operation", discovery.operation_names())
def test_candidates_have_the_fields_of_a_config(operation: str) -> None:
    """And no two are alike."""
    found = [
        value for module in discovery.kernel_modules(operation) for name, value in discovery.classes(module) if name.endswith("Config")
    ]
    fields = [{field.name for field in dataclasses.fields(config)} for config in found]
    listed = tune.candidates(operation)
    assert all(set(config) in fields for config in listed)
    assert len({json.dumps(config, sort_keys=True) for config in listed}) == len(listed)


def test_discovery_finds_operations_by_their_folders() -> None:
    names = discovery.operation_names()
    assert {"paged_attention", "packed_matmul", "int8_matmul", "write_kv", "grouped_matmul"} <= set(names)
    assert "common" not in names
    assert all(
        isinstance(operation, Operation) and operation.name == name for name, operation in zip(names, discovery.operations(), strict=True)
    )
