from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import EOS, MODEL_NAME, FakeEngine
from tests.serving.test_bad_requests import assert_error


async def test_models(server: Served):
    client = await server.openai()
    listed = [model async for model in client.models.list()]
    assert [(model.id, model.object, model.owned_by) for model in listed] == [(MODEL_NAME, "model", "jaxinfer")]
    assert (await client.models.retrieve(MODEL_NAME)).max_model_len == 512


async def test_a_served_name_replaces_the_models_own(serve: Serve):
    server = await serve(served_model_name="me/mine")
    assert (await server.complete())[0] == 404
    status, body = await server.complete(model="me/mine")
    assert (status, body["model"]) == (200, "me/mine")
    status, text = await server.get("/v1/models/me/mine")
    assert (status, json.loads(text)["root"]) == (200, MODEL_NAME)


async def test_probes_and_version(server: Served):
    assert (await server.get("/health"))[0] == 200
    assert (await server.get("/ready"))[0] == 200
    status, text = await server.get("/version")
    assert status == 200
    assert isinstance(json.loads(text)["version"], str)


async def test_tokenize_and_detokenize(server: Served):
    assert await server.post("/tokenize", {"prompt": "aé", "return_token_strs": True}) == (
        200,
        {"count": 3, "max_model_len": 512, "tokens": [97, 195, 169], "token_strs": ["a", "bytes:\\xc3", "bytes:\\xa9"]},
    )
    _, body = await server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False})
    assert bytes(body["tokens"]) == b"user:x\n"
    assert await server.post("/detokenize", {"tokens": [97, 195, 169, 256]}) == (200, {"prompt": "aé" + EOS})
    assert await server.post("/detokenize", {"tokens": [97, 256], "skip_special_tokens": True}) == (200, {"prompt": "a"})


async def test_bad_tokenize_requests(server: Served):
    for body in ({}, {"prompt": 5}, {"prompt": "x", "messages": []}, {"messages": "x"}, {"prompt": "x", "mood": 1}, []):
        assert_error(*await server.post("/tokenize", body), 400)
    for body in ({}, {"tokens": "x"}, {"tokens": []}, {"tokens": [257]}, {"tokens": [-1]}, {"tokens": [1.5]}):
        assert_error(*await server.post("/detokenize", body), 400)
    assert_error(*await server.post("/tokenize", {"model": "other", "prompt": "x"}), 404)


async def test_api_keys_cover_all_but_probes_and_page(serve: Serve):
    server = await serve(api_key=("first", "zweiter-schlüssel"))
    for path in ("/health", "/ready", "/"):
        assert (await server.get(path))[0] == 200
    for path in ("/v1/models", "/metrics", "/version", "/nothing", "/v1/completions"):
        status, text = await server.get(path)
        assert_error(status, json.loads(text), 401)
    for wrong in ("Bearer", "Bearer ", "Bearer firs", "Bearer first2", "Basic first", "first", "Bearer schlüssel", "Bearer first, zweiter"):
        assert_error(*await server.complete(headers={"Authorization": wrong}), 400, 401)
        assert_error(*await server.post("/tokenize", {"prompt": "x"}, headers={"Authorization": wrong}), 401)
    for right in ("first", "zweiter-schlüssel"):
        status, _ = await server.post("/tokenize", {"prompt": "x"}, headers={"Authorization": f"Bearer {right}"})
        assert status == 200
    assert [model.id async for model in (await server.openai(api_key="first")).models.list()] == [MODEL_NAME]


async def test_metrics(serve: Serve):
    server = await serve(FakeEngine(step_seconds=0.001))
    await server.complete("abc", max_tokens=5)
    await server.complete(["abc", "de"], max_tokens=2, n=3)
    await server.events("/v1/completions", {"model": MODEL_NAME, "prompt": f"a{EOS}", "max_tokens": 5})
    assert await server.metric("jaxinfer_kv_blocks_total") == 64
    assert await server.metric("jaxinfer_kv_blocks_free") == 64
    for name in ("jaxinfer_requests_running", "jaxinfer_requests_waiting", "jaxinfer_preemptions_total", "jaxinfer_recompiles_total"):
        assert await server.metric(name) == 0
    assert await server.metric("jaxinfer_generation_tokens_total") == 5 + 12 + 2
    assert await server.metric('jaxinfer_requests_finished_total{finish_reason="length"}') == 3
    assert await server.metric('jaxinfer_requests_finished_total{finish_reason="stop"}') == 1
    assert await server.metric('jaxinfer_requests_finished_total{finish_reason="error"}') == 0
    assert await server.metric("jaxinfer_request_prompt_tokens_sum") == 3 + 3 + 2 + 2
    assert await server.metric("jaxinfer_request_generation_tokens_sum") == 5 + 12 + 2
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "time_per_output_token_seconds",
    ):
        assert await server.metric(f"jaxinfer_{name}_count") == 4
    assert (
        await server.metric("jaxinfer_e2e_request_latency_seconds_sum")
        > await server.metric("jaxinfer_time_to_first_token_seconds_sum")
        > 0
    )


async def test_metrics_of_kv_memory(server: Served):
    """Every number of the snapshot shows up under its own name."""
    names = {
        "num_kv_blocks_total": "kv_blocks_total",
        "num_kv_blocks_free": "kv_blocks_free",
        "num_kv_blocks_cached": "kv_blocks_cached",
        "num_kv_blocks_held": "kv_blocks_held",
        "host_kv_bytes_total": "host_kv_bytes_total",
        "host_kv_bytes_used": "host_kv_bytes_used",
        "disk_kv_bytes_total": "disk_kv_bytes_total",
        "disk_kv_bytes_used": "disk_kv_bytes_used",
        "num_preemptions": "preemptions_total",
        "num_preemptions_swap": 'preemptions_by_kind_total{kind="swap"}',
        "num_preemptions_recompute": 'preemptions_by_kind_total{kind="recompute"}',
        "num_prefix_query_tokens": "prefix_cache_query_tokens_total",
        "num_hit_tokens_device": 'prefix_cache_hit_tokens_total{tier="device"}',
        "num_hit_tokens_host": 'prefix_cache_hit_tokens_total{tier="host"}',
        "num_hit_tokens_disk": 'prefix_cache_hit_tokens_total{tier="disk"}',
        "num_swapped_out_bytes": 'swapped_bytes_total{direction="out"}',
        "num_swapped_in_bytes": 'swapped_bytes_total{direction="in"}',
        "num_disk_faults": "disk_kv_faults_total",
        "fetch_wait_seconds": "kv_fetch_wait_seconds_total",
        "scheduler_seconds": "scheduler_seconds_total",
    }
    server.engine.counters = {field: 1000 + k for k, field in enumerate(names)}
    await server.complete("abc", max_tokens=1)
    for field, name in names.items():
        assert await server.metric(f"jaxinfer_{name}") == server.engine.counters[field], name
    assert await server.metric("jaxinfer_requests_refused_total") == 0


class _Links(HTMLParser):
    """What a page would load, and the handlers written in its markup."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline_handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "action", "data", "srcset"):
                self.loaded.append(value or "")
            if name.startswith("on") or name == "style":
                self.inline_handlers.append(name)


@pytest.mark.parametrize("path", ["/", "/debug/kv"])
async def test_a_page_holds_all_it_needs_and_its_policy_allows_just_that(serve: Serve, path: str):
    server = await serve(debug_routes="on")
    async with server.session.get(server.url + path) as response:
        html, policy = await response.text(), response.headers["Content-Security-Policy"]
        assert response.content_type == "text/html"
    links = _Links()
    links.feed(html)
    assert all(link.startswith("data:") for link in links.loaded)
    assert links.inline_handlers == []
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert len(parts) == 1
        assert base64.b64encode(hashlib.sha256(parts[0].encode()).digest()).decode() in policy


@pytest.mark.parametrize("risky", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("])
async def test_no_page_reads_text_as_markup(serve: Serve, risky: str):
    server = await serve(debug_routes="on")
    for path in ("/", "/debug/kv"):
        assert risky not in (await server.get(path))[1]
