from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.benchmarking.lengths import OUTPUT_QUANTILES, PROMPT_QUANTILES
from jaxinfer.errors import ConfigError
from jaxinfer.simulation.options import TraceOptions
from jaxinfer.simulation.traces import ANSWER_TOKEN, END_TOKEN, Texts, arrival_times, make_trace


def made(max_model_len: int = 4096, **options: Any) -> list[Any]:
    return list(make_trace(TraceOptions(**options), max_model_len).requests())


def test_a_seed_gives_the_same_trace_and_its_beginning_does_not_depend_on_the_length() -> None:
    for trace in ("sharegpt", "agents"):
        whole = made(trace=trace, num_requests=400)
        assert made(trace=trace, num_requests=400) == whole
        assert made(trace=trace, num_requests=80)[:8] == whole[:8]
        assert made(trace=trace, num_requests=400, trace_seed=1) != whole
    assert made(trace="documents", num_requests=50) == made(trace="documents", num_requests=50)


def test_sharegpts_lengths_have_its_medians() -> None:
    requests = made(num_requests=4000)
    prompts, outputs = [len(one.prompt_token_ids) for one in requests], [one.num_output_tokens for one in requests]
    assert np.median(prompts) == pytest.approx(PROMPT_QUANTILES[6], rel=0.1)
    assert np.median(outputs) == pytest.approx(OUTPUT_QUANTILES[6], rel=0.1)
    assert max(prompts) <= 1024
    assert max(outputs) <= 1024


@pytest.mark.parametrize("trace", ["sharegpt", "documents"])
def test_no_request_is_longer_than_the_context(trace: Any) -> None:
    assert max(len(one.prompt_token_ids) + one.num_output_tokens for one in made(300, trace=trace, num_requests=500)) <= 300


def test_arrivals_have_the_rate_asked_for_and_pauses_are_empty() -> None:
    poisson = list(islice(arrival_times(TraceOptions(request_rate=5.0)), 5000))
    assert poisson == sorted(poisson)
    assert 5000 / poisson[-1] == pytest.approx(5, rel=0.05)
    assert np.std(np.diff(poisson)) == pytest.approx(1 / 5, rel=0.1)  # of an exponential distribution: as its mean
    bursts = list(islice(arrival_times(TraceOptions(arrivals="bursts", request_rate=5.0, burst_seconds=2.0, pause_seconds=6.0)), 5000))
    assert bursts == sorted(bursts)
    assert 5000 / bursts[-1] == pytest.approx(5, rel=0.1)
    assert max(time % 8 for time in bursts) < 2
    assert list(islice(arrival_times(TraceOptions(arrivals="at-once")), 3)) == [0, 0, 0]


def test_users_send_in_proportion_to_their_skew() -> None:
    users = [one.user for one in made(num_requests=6000, num_users=3, user_skew=1.0)]
    shares = [users.count(f"user-{number}") / 6000 for number in (1, 2, 3)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)


def test_no_two_texts_share_a_prefix() -> None:
    texts = Texts(0, 100)
    assert len({texts.text(name, 50)[0] for name in range(1000)}) == 1000
    assert [len(texts.text(7, length)) for length in (0, 1, 2, 100, 65_536)] == [0, 1, 2, 100, 65_536]
    assert texts.text(7, 100)[:50] == texts.text(7, 50)


def test_questions_about_one_document_share_it() -> None:
    requests = made(trace="documents", num_requests=40, questions_per_document=4)
    first, again, other = requests[0], requests[10], requests[1]  # ten documents, asked about in turn
    same = next(i for i, (one, two) in enumerate(zip(first.prompt_token_ids, again.prompt_token_ids, strict=False)) if one != two)
    assert same == len(first.prompt_token_ids) - 32
    assert first.prompt_token_ids[0] != other.prompt_token_ids[0]


def test_a_turn_goes_on_from_the_whole_conversation_after_some_thinking() -> None:
    options = TraceOptions(trace="agents", num_requests=7, turns=3, system_prompt_len=20, max_prompt_len=30, max_output_len=30)
    trace = make_trace(options, 4096)
    starts = list(trace.requests())
    assert len(starts) == 3
    assert len({one.prompt_token_ids[:20] for one in starts}) == 1
    for start, num_turns in zip(starts, (3, 3, 1), strict=True):
        turn, count = start, 1
        while (following := trace.next_turn(turn, 100.0)) is not None:
            said = turn.prompt_token_ids + (ANSWER_TOKEN,) * (turn.num_output_tokens - 1) + (END_TOKEN,)
            assert following.prompt_token_ids[: len(said)] == said
            assert len(following.prompt_token_ids) > len(said)
            assert following.arrival_seconds > 100
            assert following.user == start.user
            turn, count = following, count + 1
        assert count == num_turns


def test_a_conversation_that_outgrows_the_context_goes_on_from_the_system_prompt() -> None:
    options = TraceOptions(trace="agents", num_requests=30, turns=30, system_prompt_len=20, max_prompt_len=60, max_output_len=60)
    trace = make_trace(options, 256)
    (turn,) = trace.requests()
    lengths = []
    while turn is not None:
        assert len(turn.prompt_token_ids) + turn.num_output_tokens <= 256
        lengths.append(len(turn.prompt_token_ids))
        turn = trace.next_turn(turn, 0.0)
    assert len(lengths) == 30
    assert any(later < earlier for earlier, later in pairwise(lengths))


def write(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries) + "\n")
    return path


def test_a_trace_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"arrival": 0, "prompt_token_ids": [3, 4, 5], "output_tokens": 2, "user": "ann", "priority": -1},
        "",
        {"arrival": 1.5, "prompt_tokens": 25, "output_tokens": 7, "hash_ids": [4, 9]},
        {"arrival": 1.5, "prompt_tokens": 30, "output_tokens": 8, "hash_ids": [4, 9, 9]},
        {"arrival": 2, "prompt_tokens": 70_000, "output_tokens": 9},
    )
    first, second, third, fourth = made(trace_file=path, hash_block_tokens=10)
    assert (first.arrival_seconds, first.prompt_token_ids, first.num_output_tokens, first.user, first.priority) == (
        0,
        (3, 4, 5),
        2,
        "ann",
        -1,
    )
    assert len(second.prompt_token_ids) == 25
    assert second.prompt_token_ids[:20] == third.prompt_token_ids[:20]
    assert third.prompt_token_ids[10:20] == third.prompt_token_ids[20:]
    assert second.prompt_token_ids[20] not in third.prompt_token_ids
    assert len(fourth.prompt_token_ids) == 70_000
    assert len(made(trace_file=path, num_requests=2, hash_block_tokens=10)) == 2


GOOD = {"arrival": 1, "prompt_tokens": 5, "output_tokens": 2}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ([], "line 2: must be an object, got list"),
        (GOOD | {"arrival": 0.5}, "line 2: arrival must not fall, got 0.5 after 1"),
        (GOOD | {"arrival": "1"}, "line 2: arrival must be seconds"),
        (GOOD | {"length": 3}, "line 2: unknown fields length; known: arrival"),
        (GOOD | {"output_tokens": 0}, "line 2: output_tokens must be an integer from 1"),
        (GOOD | {"user": 3}, "line 2: user must be a string, got 3"),
        (GOOD | {"prompt_token_ids": [1]}, "line 2: must have one of prompt_tokens and prompt_token_ids"),
        ({"arrival": 1, "prompt_token_ids": [-1], "output_tokens": 2}, "line 2: prompt_token_ids must be a list of integers from 0"),
        (GOOD | {"hash_ids": [1, 2]}, "line 2: 2 hash_ids of 512 tokens are more than prompt_tokens 5"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        made(trace_file=write(tmp_path / "trace.jsonl", GOOD, line))
    assert caught.value.option == "--trace-file"
