"""The examples of docs/python_api.md run, one after the other, with a small model."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.request import GenerationRequest, RequestOutput
from tests.docs.pages import first_column, python_blocks, section

PAGE = "python_api.md"


def test_table_names_the_parameters() -> None:
    assert sorted(first_column(section(PAGE, "SamplingParams"))) == sorted(field.name for field in fields(SamplingParams))


@pytest.mark.timeout(300)
def test_examples_run(tiny_llama: Path, compile_cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = python_blocks(PAGE)
    small = f"LLM(model={str(tiny_llama)!r}, compile_cache_dir={str(compile_cache_dir)!r}, max_model_len=128, max_num_batched_tokens=64)"
    code, count = re.subn(r"(?<=llm = )LLM\(.*\)", lambda _: small, "\n".join(blocks))
    assert count == 1
    names: dict[str, Any] = {}
    exec(compile(code, PAGE, "exec"), names)
    llm, outputs = names["llm"], names["outputs"]
    assert isinstance(llm, LLM)
    assert not llm.engine.has_work
    assert len(outputs) == 2
    for output in outputs.values():
        assert isinstance(output, RequestOutput)
        assert output.is_finished
        # Driving the steps by hand gives what `generate` gives.
        assert output.outputs[0].token_ids == llm.generate(output.prompt, names["request"].params)[0].outputs[0].token_ids
    assert isinstance(names["request"], GenerationRequest)
    assert "KV blocks held" in capsys.readouterr().out
