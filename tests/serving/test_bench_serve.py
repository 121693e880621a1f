from __future__ import annotations

import argparse
import asyncio
import json

import numpy as np
import pytest

from jaxinfer.errors import ConfigError
from serving.commands import BENCH_SERVE, SERVE
from serving.load_client import RequestRecord, figures, run_load
from serving.load_options import LoadOptions
from tests.serving.conftest import Serve
from tests.serving.fake_engine import MODEL_NAME, FakeEngine


async def test_a_load_is_sent_and_measured(serve: Serve):
    server = await serve(FakeEngine(step_seconds=0.002, max_num_seqs=64))
    done: list[RequestRecord] = []
    options = LoadOptions(base_url=server.url, num_prompts=20, max_concurrency=5, random_input_len=30, random_output_len=10, seed=3)
    result = await run_load(options, on_done=done.append)
    assert (result["completed"], result["failed"], result["total_input"], result["total_output"]) == (20, 0, 600, 200)
    assert len(done) == 20
    assert (result["model"], result["jaxinfer_recompiles_total"], result["recompiles_during_run"]) == (MODEL_NAME, 0, 0)
    assert result["output_throughput"] == pytest.approx(200 / result["duration"])
    assert 0 < result["mean_ttft_ms"] <= result["p99_ttft_ms"] <= result["p99_e2el_ms"]
    prompts = {request.prompt_token_ids for request in server.engine.requests_seen}
    assert len(prompts) == 20, "prompts differ"
    assert all(request.params.ignore_eos and request.params.max_tokens == 10 for request in server.engine.requests_seen)
    assert json.loads(json.dumps(result)) == result


async def test_concurrency_is_bounded(serve: Serve):
    server = await serve(FakeEngine(step_seconds=0.002, max_num_seqs=64))
    most = 0
    step = server.engine.step

    def counting_step():
        nonlocal most
        most = max(most, server.engine.snapshot().num_running)
        return step()

    server.engine.step = counting_step
    await run_load(LoadOptions(base_url=server.url, num_prompts=12, max_concurrency=3, random_output_len=5), on_done=lambda _: None)
    assert most == 3


async def test_failures_are_counted(serve: Serve, caplog: pytest.LogCaptureFixture):
    server = await serve(FakeEngine(step_seconds=0.002))
    server.engine.faults = {5: RuntimeError("broken")}
    result = await run_load(
        LoadOptions(base_url=server.url, num_prompts=6, max_concurrency=6, random_output_len=50), on_done=lambda _: None
    )
    assert (result["completed"], result["failed"]) == (0, 6)
    assert result["mean_ttft_ms"] is None


async def test_no_server_and_no_model(serve: Serve):
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:1"):
        await run_load(LoadOptions(base_url="http://127.0.0.1:1"), on_done=lambda _: None)
    server = await serve(api_key=("k",))
    with pytest.raises(ConfigError, match="API key"):
        await run_load(LoadOptions(base_url=server.url), on_done=lambda _: None)


def test_figures_are_numpys():
    rng = np.random.default_rng(0)
    records = [RequestRecord(10, 5, float(a), float(a + b), list(rng.random(4))) for a, b in rng.random((37, 2))]
    records.append(RequestRecord(10, error="gone"))
    got = figures(records, 2.0)
    ttft = np.array([record.first_token_seconds for record in records[:-1]]) * 1e3
    tpot = np.array([(record.end_to_end_seconds - record.first_token_seconds) / 4 for record in records[:-1]]) * 1e3
    itl = np.concatenate([record.gaps_seconds for record in records[:-1]]) * 1e3
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        assert got[f"mean_{name}_ms"] == pytest.approx(values.mean())
        assert got[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert got[f"p99_{name}_ms"] == pytest.approx(np.percentile(values, 99))
    assert (got["completed"], got["failed"], got["request_throughput"], got["total_token_throughput"]) == (37, 1, 18.5, 277.5)


async def test_the_command_prints_a_table_then_json(serve: Serve, capsys: pytest.CaptureFixture[str]):
    server = await serve()
    parser = argparse.ArgumentParser()
    BENCH_SERVE.add_arguments(parser)
    args = parser.parse_args(["--base-url", server.url, "--num-prompts", "3", "--random-output-len", "2"])
    assert await asyncio.to_thread(BENCH_SERVE.run, args) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["completed"] == 3
    server.engine.faults = {server.engine.snapshot().num_steps + 1: RuntimeError("broken")}
    assert await asyncio.to_thread(BENCH_SERVE.run, args) == 1
    assert "engine has stopped" in capsys.readouterr().err


def test_options_of_serve():
    parser = argparse.ArgumentParser()
    SERVE.add_arguments(parser)
    args = parser.parse_args(["--port", "0", "--api-key", "a", "--api-key", "b", "--shutdown-timeout", "5", "--block-size", "32"])
    assert (args.api_key, args.shutdown_timeout, args.block_size) == (["a", "b"], 5.0, 32)


@pytest.mark.parametrize("options", [{"num_prompts": 0}, {"max_concurrency": 0}, {"request_rate": 0.0}, {"request_rate": float("nan")}])
def test_loads_out_of_range(options: dict):
    with pytest.raises(ConfigError):
        LoadOptions(**options)
