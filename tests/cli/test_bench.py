"""`jaxinfer bench latency`, and what every measurement prints, with a fake model and a fake clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxinfer.benchmarking.latency import LatencyOptions, measure_latency, random_prompts, summarise
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


def test_prompts_are_the_same_for_a_seed_and_inside_the_vocabulary() -> None:
    prompts = random_prompts(7, 20, 30, seed=3)
    assert prompts == random_prompts(7, 20, 30, seed=3)
    assert not set(map(tuple, prompts)) & set(map(tuple, random_prompts(7, 20, 30, seed=4)))
    assert {len(prompt) for prompt in prompts} == {30}
    assert {token for prompt in prompts for token in prompt} == set(range(7))
    assert prompts[0] != prompts[1]


@pytest.mark.parametrize("wrong", [{"input_len": 0}, {"output_len": -1}, {"batch_size": 0}, {"num_iters": 0}, {"num_warmup": -1}])
def test_wrong_options_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as raised:
        LatencyOptions(**wrong)
    assert raised.value.option == "--" + next(iter(wrong)).replace("_", "-")


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"bench": "latency", "avg_latency": 0.12345678, "batch_size": 8, "engine": {"seed": 1}}
    print_figures(figures)
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == figures
    assert [line.split() for line in table] == [["bench", "latency"], ["avg_latency", "0.1235"], ["batch_size", "8"]]


def test_a_second_run_stands_beside_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    print_figures(
        {"model": "m", "elapsed_seconds": 2.0, "kv_waste_percent": 3.5, "static": {"elapsed_seconds": 5.0, "kv_waste_percent": 4.5}}
    )
    *table, _ = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table] == [
        ["continuous", "static"],
        ["model", "m"],
        ["elapsed_seconds", "2.0000", "s", "5.0000", "s"],
        ["kv_waste_percent", "3.5000", "%", "4.5000", "%"],
    ]


def test_the_command_ends_with_its_figures(fake_llm: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    assert main(["bench", "latency", "--input-len", "3", "--output-len", "2", "--max-num-seqs", "4", "--output", str(output)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["bench"], figures["model"], figures["input_len"], figures["output_len"]) == ("latency", "fake", 3, 2)
    assert figures["output_tokens_per_second"] > 0
    assert figures["engine"]["scheduler"]["max_num_seqs"] == 4
    assert {"date", "machine", "versions"} <= set(figures)
    assert json.loads(output.read_text()) == figures
    assert fake_llm.config is not None
    assert fake_llm.config.scheduler.max_num_seqs == 4
    assert fake_llm.is_closed


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_an_output_that_cannot_be_is_told_before_loading(
    fake_llm: FakeLLM, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for output in (tmp_path, tmp_path / "nowhere" / "figures.json"):
        assert main(["bench", kind, "--output", str(output)]) == 1
        assert f"--output must be a file in a folder that exists, got '{output}'" in capsys.readouterr().err
    assert fake_llm.config is None
