from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.messages import CopyBlock, DiskEntry, Fetch, HostSource, LoadBlock, ScheduledRequest, SpillBlock, StoreBlock
from jaxinfer.request import SamplingParams
from jaxinfer.simulation.run import work_of
from jaxinfer.simulation.timing import CPU_SMOLLM2, H200_LLAMA_8B, StepWork, load_timing
from jaxinfer.simulation.transfers import Transfers
from tests.simulation.running import ONE_SECOND, changed

ENTRY = DiskEntry(b"", 0, (), b"")


def test_a_large_prompt_is_bound_by_computing_and_decode_by_reading() -> None:
    timing = changed(ONE_SECOND, flops_per_token=6, flops_per_pair=2, flops_per_second=10, weight_bytes=40, kv_bytes_per_token=4)
    timing = changed(timing, memory_bytes_per_second=20, overhead_seconds=0.5)
    assert timing.step_seconds(StepWork(num_tokens=10, num_pairs=55, num_context_tokens=10)) == (10 * 6 + 55 * 2) / 10 + 0.5
    assert timing.step_seconds(StepWork(num_tokens=1, num_pairs=10, num_context_tokens=10)) == (40 + 10 * 4) / 20 + 0.5
    copied = StepWork(num_tokens=1, num_pairs=10, num_context_tokens=10, num_copied_bytes=100)
    assert timing.step_seconds(copied) == 4 + 0.5 + 2 * 100 / 20


@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 7)], [(5, 1), (9, 1)], [(0, 4), (100, 1), (32, 16)]])
def test_a_rows_pairs_are_counted_key_by_key(rows: list[tuple[int, int]]) -> None:
    scheduled = []
    for start, count in rows:
        row: list[Any] = [0, "", 0, 0, 0, [7] * count, start, 1, 0, [[]], True, False, range(0), SamplingParams()]
        scheduled.append(ScheduledRequest(*row))
    work = work_of(scheduled, sum(count for _, count in rows), 0.0)
    pairs = [(query, key) for start, count in rows for query in range(start, start + count) for key in range(query + 1)]
    assert work.num_pairs == len(pairs)
    assert work.num_context_tokens == sum(start + count for start, count in rows)


def test_the_profiles_give_figures_one_expects() -> None:
    """Alone, Llama 8B decodes some 200 tokens/s on an H200; the README has 34 for SmolLM2 in float32 on its CPU, all included."""
    assert 150 < 1 / H200_LLAMA_8B.step_seconds(StepWork(1, 1000, 1000)) < 300
    prompt, decode = CPU_SMOLLM2.step_seconds(StepWork(64, 2080, 64)), CPU_SMOLLM2.step_seconds(StepWork(1, 96, 96))
    assert 64 / (prompt + 64 * decode) == pytest.approx(34, rel=0.1)
    prompts, decode = 4 * CPU_SMOLLM2.step_seconds(StepWork(512, 8 * 2080, 512)), CPU_SMOLLM2.step_seconds(StepWork(32, 32 * 96, 32 * 96))
    assert 32 * 64 / (prompts + 64 * decode) == pytest.approx(203, rel=0.1)


def test_links_do_one_thing_after_the_other() -> None:
    timing = changed(ONE_SECOND, host_link_bytes_per_second=10, disk_bytes_per_second=5)
    transfers = Transfers(timing, [20])
    host, disk = HostSource(0, 1), ENTRY
    assert transfers.fetch(Fetch(0, (host, host)), 100.0) == 104
    assert transfers.fetch(Fetch(1, (host,)), 101.0) == 106
    # From disk first, then over the link, which is free by then.
    assert transfers.fetch(Fetch(2, (host, disk)), 103.0) == 103 + 20 / 5 + 40 / 10
    # Stores have the other direction to themselves, and the next step with stores waits for the last one's.
    assert transfers.run_moves([StoreBlock(0, 1, 1), StoreBlock(0, 2, 2)], 100.0) == (100, 40)
    assert transfers.run_moves([LoadBlock(0, 0, 0, 1), CopyBlock(0, 1, 2)], 101.0) == (101, 40)
    assert transfers.run_moves([StoreBlock(0, 1, 1), SpillBlock(0, 1, ENTRY)], 101.0) == (104, 20)
    assert (transfers.num_stored_bytes, transfers.num_fetched_bytes, transfers.num_spilled_bytes) == (60, 100, 20)


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_holds_all_figures_or_is_like_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "timing.json"
    assert load_timing(write(path, asdict(CPU_SMOLLM2))) == CPU_SMOLLM2
    assert load_timing(write(path, {"like": "cpu-smollm2", "host_seconds": 3})) == changed(CPU_SMOLLM2, host_seconds=3)
    assert load_timing("h200-llama-8b") is H200_LLAMA_8B


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ([1], "must hold one object, got list"),
        ({"flops": 1}, "unknown figures flops; known: flops_per_token"),
        ({"flops_per_token": 1}, "lacks flops_per_pair"),
        ({"like": "a100"}, "like must be one of h200-llama-8b, cpu-smollm2, got 'a100'"),
        ({"like": "cpu-smollm2", "flops_per_second": 0}, "flops_per_second must be a number above 0, got 0"),
        ({"like": "cpu-smollm2", "host_seconds": -1}, "host_seconds must be a number of at least 0, got -1"),
        ({"like": "cpu-smollm2", "host_seconds": True}, "host_seconds must be a number of at least 0, got True"),
        ('{"like": "cpu-smollm2", "host_seconds": NaN}', "host_seconds must be a number of at least 0, got nan"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_timing(write(tmp_path / "timing.json", content))
    assert caught.value.option == "--timing"


def test_a_name_that_is_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of h200-llama-8b, cpu-smollm2 or a JSON file, got 'h100'"):
        load_timing("h100")
