"""`jaxinfer bench throughput`: the mix, the arithmetic of waste, what static batching computes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.benchmarking.kv_waste import KVWaste
from jaxinfer.benchmarking.lengths import BenchRequest, cut_to_context, draw_lengths, make_requests
from jaxinfer.benchmarking.throughput import BatchRun, ThroughputOptions, measure_throughput, static_groups
from jaxinfer.cli.main import main
from jaxinfer.errors import ConfigError
from jaxinfer.kv.tables import GroupedPools
from tests.cli.fake_engine import FULL, WINDOW, FakeEngine
from tests.cli.fake_llm import DESCRIPTION, FakeLLM


def draw(num_requests: int, max_len: int = 1024, seed: int = 0) -> list[tuple[int, int]]:
    return draw_lengths(num_requests, max_prompt_len=max_len, max_output_len=max_len, seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_lengths_are_those_of_sharegpt(seed: int) -> None:
    prompt_lens, output_lens = np.array(draw(20_000, seed=seed)).T
    # Counted in the data set, not computed from the table of quantiles.
    assert np.median(prompt_lens) == pytest.approx(30, rel=0.1)
    assert np.median(output_lens) == pytest.approx(266, rel=0.1)
    assert np.mean(prompt_lens) == pytest.approx(110.3, rel=0.05)
    assert np.mean(output_lens) == pytest.approx(299.4, rel=0.05)
    assert (prompt_lens.min(), output_lens.min()) == (4, 4)
    assert max(prompt_lens.max(), output_lens.max()) <= 1024
    assert abs(np.corrcoef(np.log(prompt_lens), np.log(output_lens))[0, 1]) < 0.03


def test_the_mix_depends_on_its_seed_only() -> None:
    assert draw(50) == draw(50)
    assert draw(50) != draw(50, seed=1)
    lengths = draw(50)
    requests = make_requests(lengths, vocab_size=7, seed=0)
    assert requests == make_requests(lengths, vocab_size=7, seed=0)
    assert requests != make_requests(lengths, vocab_size=7, seed=1)
    assert [(len(one.prompt_token_ids), one.num_output_tokens) for one in requests] == lengths
    assert {token for one in requests for token in one.prompt_token_ids} == set(range(7))


def test_a_maximum_scales_all_lengths() -> None:
    scaled = np.array(draw_lengths(500, max_prompt_len=256, max_output_len=512, seed=0))
    whole = np.array(draw(500))
    # A rounding of each, and a length is never 0.
    assert np.all(np.abs(scaled - np.maximum(whole * [1 / 4, 1 / 2], 1)) <= 1)
    assert draw(100, max_len=1) == [(1, 1)] * 100


def test_what_does_not_fit_into_the_context_is_cut() -> None:
    lengths = [(10, 20), (90, 20), (10, 200), (90, 90)]
    assert cut_to_context(lengths, 100) == [(10, 20), (50, 20), (10, 90), (50, 50)]
    assert cut_to_context([(5, 5)], 2) == [(1, 1)]


def test_waste_by_hand() -> None:
    pools = GroupedPools([FULL], [20], 16)
    waste = KVWaste(pools, reserved_tokens_per_seq=100)
    assert (waste.percent, waste.blocks_per_seq, waste.mean_running_seqs, waste.reserved_percent) == (0.0, 0.0, 0.0, 0.0)
    blocks = pools.new_tables()
    pools.extend(blocks, 48)
    waste.observe(2, 40)  # 3 blocks, 48 slots, 8 without a token: half a block for two sequences
    assert waste.percent == pytest.approx(100 * 8 / 48)
    assert waste.blocks_per_seq == pytest.approx(0.25)
    pools.extend(blocks, 160)
    waste.observe(1, 148)  # 10 blocks, 160 slots, 12 without a token
    assert waste.percent == pytest.approx(100 * (8 + 12) / (48 + 160))  # not the mean of 16.7 and 7.5
    assert waste.blocks_per_seq == pytest.approx((8 + 12) / 16 / 3)
    assert waste.max_blocks_per_seq == pytest.approx(0.75)
    assert waste.mean_running_seqs == pytest.approx(1.5)
    assert waste.reserved_percent == pytest.approx(100 * (300 - 188) / 300)


def test_nothing_running_is_no_step() -> None:
    waste = KVWaste(GroupedPools([FULL], [4], 16), reserved_tokens_per_seq=10)
    waste.observe(0, 0)
    assert waste.num_steps == 0


def test_waste_leaves_windows_out() -> None:
    pools = GroupedPools([FULL, WINDOW], [20, 20], 16)
    waste = KVWaste(pools, reserved_tokens_per_seq=100)
    blocks = pools.new_tables()
    pools.extend(blocks, 64)
    pools.drop_dead(blocks, 60)
    assert pools.pools[1].num_held < pools.pools[0].num_held
    waste.observe(1, 60)
    assert (waste.percent, waste.blocks_per_seq) == (pytest.approx(100 * 4 / 64), 0.25)


def requests_of(*output_lens: int) -> list[BenchRequest]:
    return [BenchRequest((1, 2, 3), output_len) for output_len in output_lens]


def test_static_groups_run_to_their_longest() -> None:
    groups = static_groups(requests_of(1, 5, 2, 4, 7), 2)
    assert [[(request.num_output_tokens, max_tokens) for request, max_tokens in group] for group in groups] == [
        [(1, 5), (5, 5)],
        [(2, 4), (4, 4)],
        [(7, 7)],
    ]


def test_both_ways_by_hand() -> None:
    """Two slots. Static: 5 steps and 4 steps. Continuous: a slot's next request starts when its last one ended."""
    description = dataclasses.replace(DESCRIPTION, max_num_seqs=2, num_kv_blocks=64)
    requests = requests_of(1, 5, 2, 4)
    seen: list[tuple[str, int, int]] = []
    engine = FakeEngine(description)
    static = BatchRun(engine, "s", static_groups(requests, 2), lambda *at: seen.append(at)).run(lambda: engine.now)  # type: ignore[arg-type]
    assert (static.num_steps, static.elapsed_seconds) == (9, 9.0)
    assert (static.num_output_tokens, static.num_thrown_away_tokens) == (12, 6)
    assert static.output_tokens_per_second == pytest.approx(12 / 9)
    assert static.total_tokens_per_second == pytest.approx((12 + 12) / 9)
    assert [done for _, done, _ in seen] == [2, 3, 4, 5, 6, 8, 10, 11, 12]
    assert {(what, total) for what, _, total in seen} == {("s", 12)}
    engine = FakeEngine(description)
    group = [(request, request.num_output_tokens) for request in requests]
    continuous = BatchRun(engine, "c", [group], lambda *at: None).run(lambda: engine.now)  # type: ignore[arg-type]
    # Slot 1: request 1, then 3, then 4 (1 + 2 + 4 steps); slot 2: request 2 (5 steps).
    assert (continuous.num_steps, continuous.num_output_tokens, continuous.num_thrown_away_tokens) == (7, 12, 0)
    assert continuous.output_tokens_per_second == pytest.approx(12 / 7)
    assert continuous.requests_per_second == pytest.approx(4 / 7)


class EngineLLM(FakeLLM):
    """A FakeLLM with an engine behind it."""

    def __init__(self) -> None:
        super().__init__(lambda asked: "")
        self.description = dataclasses.replace(DESCRIPTION, num_kv_blocks=40, max_model_len=512, max_prompt_tokens=511)
        self.engine = FakeEngine(self.description)


def test_the_ratio_and_the_mix_that_was_run() -> None:
    llm = EngineLLM()
    options = ThroughputOptions(num_prompts=24, max_prompt_len=64, max_output_len=128, compare="static")
    figures = measure_throughput(llm, options, clock=lambda: llm.engine.now)  # type: ignore[arg-type]
    lengths = draw_lengths(24, max_prompt_len=64, max_output_len=128, seed=0)
    outputs = [output_len for _, output_len in lengths]
    static = figures["static"]
    assert figures["num_output_tokens"] == static["num_output_tokens"] == sum(outputs)
    assert static["num_thrown_away_tokens"] == sum(4 * max(outputs[at : at + 4]) for at in range(0, 24, 4)) - sum(outputs)
    assert figures["ratio_to_static"] == pytest.approx(static["num_steps"] / figures["num_steps"])  # a step takes a second
    assert 0 < figures["max_kv_waste_blocks_per_seq"] < 1
    assert figures["mix"]["mean_output_len"] == pytest.approx(np.mean(outputs))
    assert figures["mix"]["max_prompt_len"] == max(prompt_len for prompt_len, _ in lengths)
    assert figures["mix"]["num_cut_to_context"] == 0
    assert all(request.params.is_greedy and request.params.ignore_eos for request in llm.engine.requests)


def test_a_short_context_cuts_the_mix_and_everything_runs() -> None:
    llm = EngineLLM()
    llm.description = dataclasses.replace(llm.description, max_model_len=40, max_prompt_tokens=39)
    llm.engine = FakeEngine(llm.description)
    figures = measure_throughput(llm, ThroughputOptions(num_prompts=8, compare="static"), clock=lambda: llm.engine.now)  # type: ignore[arg-type]
    assert figures["mix"]["num_cut_to_context"] > 0
    assert figures["num_output_tokens"] == figures["static"]["num_output_tokens"] == round(8 * figures["mix"]["mean_output_len"])


@pytest.mark.parametrize("wrong", [{"num_prompts": 0}, {"max_prompt_len": 0}, {"max_output_len": -1}, {"mix_seed": -1}])
def test_wrong_options_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as raised:
        ThroughputOptions(**wrong)
    assert raised.value.option == "--" + next(iter(wrong)).replace("_", "-")


def test_the_command_through_a_real_engine(
    tiny_llama: Path, compile_cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything but the wall clock: the run with one slot a sequence computes each wanted token once."""
    words = f"--model {tiny_llama} --max-num-seqs 2 --max-num-batched-tokens 16 --max-model-len 64 --compile-cache-dir {compile_cache_dir}"
    mix = f"--num-prompts 5 --max-prompt-len 40 --max-output-len 12 --compare static --output {tmp_path / 'figures.json'}"
    assert main(["bench", "throughput", *words.split(), *mix.split()]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert table[0].split() == ["continuous", "static"]
    outputs = [output_len for _, output_len in draw_lengths(5, max_prompt_len=40, max_output_len=12, seed=0)]
    assert figures["num_output_tokens"] == figures["static"]["num_output_tokens"] == sum(outputs)
    assert figures["num_thrown_away_tokens"] == 0
    assert figures["static"]["num_thrown_away_tokens"] == sum(abs(outputs[at] - outputs[at + 1]) for at in (0, 2))
    assert 0 < figures["max_kv_waste_blocks_per_seq"] < 1
    assert figures["engine"]["scheduler"]["max_num_seqs"] == 2
    assert {"date", "machine", "versions"} <= set(figures)
