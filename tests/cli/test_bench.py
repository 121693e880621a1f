"""`jaxinfer bench` with a fake model and a fake clock."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from jaxinfer.benchmarking import LatencyOptions, ThroughputOptions, measure_latency, measure_throughput, random_prompts, summarise
from jaxinfer.cli.bench import print_figures
from jaxinfer.cli.main import main
from jaxinfer.errors import ConfigError
from jaxinfer.request import CompletionOutput, RequestId, RequestOutput, SamplingParams
from tests.cli.fake_llm import DESCRIPTION, FakeLLM


class TimedLLM:
    """Each generate takes the next of `durations`; answers are as long as asked."""

    description = DESCRIPTION

    def __init__(self, durations: Sequence[float]):
        self.now = 100.0
        self.durations = list(durations)
        self.num_prompts: list[int] = []
        self.params: list[SamplingParams] = []

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams, show_progress: bool) -> list[RequestOutput]:
        assert params.max_tokens is not None
        self.now += self.durations.pop(0)
        self.num_prompts.append(len(prompts))
        self.params.append(params)
        answer = [CompletionOutput(0, [1] * params.max_tokens)]
        return [RequestOutput(RequestId("r"), None, prompt, answer) for prompt in prompts]


def test_percentiles_of_known_numbers() -> None:
    figures = summarise([float(number) for number in range(101)])  # the p-th percentile of 0..100 is p
    assert figures == {
        "avg_latency": 50.0,
        "p10_latency": 10.0,
        "p25_latency": 25.0,
        "p50_latency": 50.0,
        "p75_latency": 75.0,
        "p90_latency": 90.0,
        "p99_latency": 99.0,
    }


def test_latency_leaves_the_warmup_out() -> None:
    llm = TimedLLM([50.0, 1.0, 3.0])
    options = LatencyOptions(input_len=5, output_len=10, batch_size=4, num_warmup=1, num_iters=2)
    figures = measure_latency(llm, options, clock=lambda: llm.now)  # type: ignore[arg-type]
    assert (figures["avg_latency"], figures["p50_latency"], figures["output_tokens_per_second"]) == (2.0, 2.0, 20.0)
    assert llm.num_prompts == [4, 4, 4]
    assert all(params.ignore_eos and params.is_greedy for params in llm.params)


def test_throughput_counts_prompts_and_answers() -> None:
    llm = TimedLLM([9.0, 4.0])
    figures = measure_throughput(llm, ThroughputOptions(input_len=6, output_len=10, num_prompts=8), clock=lambda: llm.now)  # type: ignore[arg-type]
    assert (figures["requests_per_second"], figures["output_tokens_per_second"], figures["total_tokens_per_second"]) == (2.0, 20.0, 32.0)


def test_prompts_are_the_same_each_time_and_inside_the_vocabulary() -> None:
    prompts = random_prompts(7, 20, 30)
    assert prompts == random_prompts(7, 20, 30)
    assert {len(prompt) for prompt in prompts} == {30}
    assert {token for prompt in prompts for token in prompt} == set(range(7))
    assert prompts[0] != prompts[1]


@pytest.mark.parametrize("wrong", [{"input_len": 0}, {"output_len": -1}, {"batch_size": 0}, {"num_iters": 0}, {"num_warmup": -1}])
def test_wrong_options_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as raised:
        LatencyOptions(**wrong)
    assert raised.value.option == "--" + next(iter(wrong)).replace("_", "-")


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_figures({"bench": "latency", "avg_latency": 0.12345678, "batch_size": 8})
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"bench": "latency", "avg_latency": 0.12345678, "batch_size": 8}
    assert [line.split() for line in table] == [["bench", "latency"], ["avg_latency", "0.1235"], ["batch_size", "8"]]


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_the_command_ends_with_its_figures(fake_llm: FakeLLM, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind, "--input-len", "3", "--output-len", "2", "--max-num-seqs", "4"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["bench"], figures["model"], figures["input_len"], figures["output_len"]) == (kind, "fake", 3, 2)
    assert figures["output_tokens_per_second"] > 0
    assert fake_llm.config is not None
    assert fake_llm.config.scheduler.max_num_seqs == 4
    assert fake_llm.is_closed
