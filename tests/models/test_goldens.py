"""Every golden model through the real engine against transformers' float32; and each of its features taken out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.models.case import MIN_MOVE, NUM_GREEDY, Case, Feature, all_cases, changed_config, changed_tensors
from tests.models.golden_engine import Golden, forward, greedy, make_engine, read_config, read_golden, read_tensors
from tests.parity.oracle import row_errors

MAX_ERROR = 1e-4
CHUNKS = {"whole": 64, "chunked": 7, "decode": 1}


def parameters(cases: list[Case]) -> list[Any]:
    """All cases are goldens; those that are not quick do not run with every change."""
    marks = [pytest.mark.goldens], [pytest.mark.goldens, pytest.mark.nightly]
    return [pytest.param(case, id=case.name, marks=marks[not case.is_quick]) for case in cases]


def features() -> list[Any]:
    marks = [pytest.mark.goldens, pytest.mark.nightly]
    return [pytest.param(case, feature, id=f"{case.name}-{feature.name}", marks=marks) for case in all_cases() for feature in case.features]


@pytest.mark.parametrize("case", parameters(all_cases()))
def test_engine_gives_what_transformers_gives(case: Case) -> None:
    golden = read_golden(case.folder)
    engine = make_engine(read_config(case.folder), read_tensors(case.folder), max_model_len=case.max_model_len)
    for name, chunk_size in CHUNKS.items():
        errors = [
            row_errors(engine.logits_for(ids[:-1], chunk_size), logits).max()
            for ids, logits in zip(golden.token_ids, golden.logits, strict=True)
        ]
        assert max(errors) <= MAX_ERROR, (name, errors)
    prompts = [ids[:-NUM_GREEDY] for ids in golden.token_ids]
    # Together: a batch of unequal lengths, in which windows drop their blocks as they go.
    assert greedy(engine, prompts, NUM_GREEDY) == [ids[-NUM_GREEDY:] for ids in golden.token_ids]


def changed_logits(case: Case, golden: Golden, feature: Feature | None) -> list[np.ndarray]:
    change = feature or Feature(name="nothing")
    return forward(
        changed_config(case.config, change.config),
        changed_tensors(read_tensors(case.folder), change.tensors),
        [ids[:-1] for ids in golden.token_ids],
        max_model_len=case.max_model_len,
        fields=change.fields,
    )


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.goldens, pytest.mark.nightly]) for case in all_cases()]
)
def test_the_published_form_of_config_json_is_the_same_model(case: Case) -> None:
    golden = read_golden(case.folder)
    for logits, expected in zip(changed_logits(case, golden, None), golden.logits, strict=True):
        assert row_errors(logits, expected).max() <= MAX_ERROR


@pytest.mark.parametrize(("case", "feature"), features())
def test_a_golden_moves_when_a_feature_is_taken_out(case: Case, feature: Feature) -> None:
    golden = read_golden(case.folder)
    moves = [np.abs(logits - expected).max() for logits, expected in zip(changed_logits(case, golden, feature), golden.logits, strict=True)]
    assert max(moves) > MIN_MOVE
