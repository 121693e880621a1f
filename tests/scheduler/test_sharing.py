"""Blocks that several sequences have: cached prefixes, the n answers of a request, forks."""

from __future__ import annotations

import pytest

from jaxinfer.messages import CopyBlock
from tests.scheduler.cases import FULL, constant_hash, make_request, own_prompt, window_group
from tests.scheduler.replay import Harness

PROMPT = own_prompt("prompt", 64)


def first_row(harness: Harness, request) -> tuple[int, int]:
    """Tokens found and tokens computed by the first step of a request that runs to its end."""
    record = harness.add(request)[0]
    output = harness.step()
    row = next(row for row in output.scheduled if row.seq_id == record.sequence.seq_id)
    harness.drain()
    return row.num_computed_tokens, len(row.token_ids)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, window_group(8)), (window_group(20),)], ids=["full", "both", "window"])
def test_all_full_blocks_but_the_one_of_the_last_token_are_found_again(num_tokens, groups):
    harness = Harness(block_size=16, groups=groups, num_blocks=(12,) * len(groups), max_num_batched_tokens=64)
    request = {"prompt": PROMPT[:num_tokens], "max_tokens": 1}
    assert first_row(harness, make_request("first", **request)) == (0, num_tokens)
    cached = 16 * ((num_tokens - 1) // 16)
    assert first_row(harness, make_request("second", **request)) == (cached, num_tokens - cached)
    assert harness.scheduler.counters.num_hit_tokens_device == cached
    assert harness.scheduler.counters.num_prefix_query_tokens == 2 * num_tokens


def test_generated_tokens_are_found_again_too():
    harness = Harness(block_size=4)
    record = harness.add(make_request("a", PROMPT[:6], max_tokens=8, ignore_eos=True))[0]
    harness.drain()
    # Of 14 tokens 13 were computed: the last one was sampled and never fed.
    assert first_row(harness, make_request("b", (*record.tokens, 3), max_tokens=1))[0] == 12


def test_without_prefix_caching_nothing_is_found():
    harness = Harness(prefix_caching=False)
    for name in "ab":
        assert first_row(harness, make_request(name, PROMPT[:20], max_tokens=1)) == (0, 20)


@pytest.mark.parametrize("options", [{}, {"key_hash": constant_hash}], ids=["sha256", "constant hash"])
def test_salts_do_not_share(options):
    harness = Harness(**options)
    for name, salt, cached in (("a", "", 0), ("b", "pepper", 0), ("c", "pepper", 16), ("d", "", 16), ("e", "other", 0)):
        assert first_row(harness, make_request(name, PROMPT[:20], cache_salt=salt, max_tokens=1))[0] == cached


def test_blocks_that_this_very_step_fills_are_shared_in_it():
    harness = Harness()
    first, second = (harness.add(make_request(name, PROMPT[:14], max_tokens=4))[0] for name in "ab")
    rows = harness.step().scheduled
    assert [(row.num_computed_tokens, len(row.token_ids)) for row in rows] == [(0, 14), (12, 2)]
    assert first.sequence.blocks.tables[0][:3] == second.sequence.blocks.tables[0][:3]
    harness.drain()


def test_a_sliding_window_needs_only_what_it_still_sees():
    harness = Harness(groups=(FULL, window_group(8)), num_blocks=(24, 4), max_num_batched_tokens=4)
    record = harness.add(make_request("a", PROMPT[:40], max_tokens=1))[0]
    harness.drain()
    assert record.ends
    assert first_row(harness, make_request("b", PROMPT[:40], max_tokens=1))[0] == 36
    # Behind an earlier point the window's blocks are gone, though the full group's are there.
    assert first_row(harness, make_request("c", PROMPT[:20], max_tokens=1))[0] < 16


def test_prompt_logprobs_are_computed_although_their_blocks_are_cached():
    harness = Harness(max_num_logit_rows=40)
    for name in "ab":
        assert first_row(harness, make_request(name, PROMPT[:20], prompt_logprobs=0, max_tokens=1)) == (0, 20)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_n_answers_hold_the_blocks_of_their_prompt_once(prefix_caching):
    harness = Harness(prefix_caching=prefix_caching, num_blocks=(20,))
    records = harness.add(make_request("a", PROMPT[:18], n=4, max_tokens=5, ignore_eos=True))
    rows = [harness.step().scheduled for _ in range(2)]
    assert [[row.num_computed_tokens for row in step] for step in rows] == [[0], [18, 17, 17, 17]]
    # Four full blocks of the prompt together, and the fifth each of its own.
    assert harness.pools.pools[0].num_held == 4 + 4
    assert len({tuple(record.sequence.blocks.tables[0][:4]) for record in records}) == 1
    assert harness.device.num_moves[CopyBlock] == 3
    harness.drain()
    assert len({tuple(record.output) for record in records}) == 4
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_the_other_answers_go_on_when_the_first_ends_before_its_prompt_is_computed(end):
    harness = Harness(max_num_batched_tokens=8)
    records = harness.add(make_request("a", PROMPT[:18], n=3, max_tokens=5, ignore_eos=True))
    harness.step()
    if end == "abort":
        harness.abort("a")
    else:
        harness.finish(records[0])
    harness.drain()
    assert [len(record.output) for record in records] == ([0, 0, 0] if end == "abort" else [0, 5, 5])


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, window_group(8))], ids=["full", "both"])
def test_a_fork_of_a_running_sequence_shares_its_blocks_and_copies_the_tail(prefix_caching, groups):
    harness = Harness(prefix_caching=prefix_caching, groups=groups, num_blocks=(20,) * len(groups))
    parent = harness.add(make_request("parent", PROMPT[:13], max_tokens=20, ignore_eos=True))[0]
    for _ in range(2):
        harness.step()
    assert len(parent.tokens) == 15
    fork = harness.add(make_request("fork", (*parent.tokens, 9), fork_of="parent", max_tokens=20, ignore_eos=True))[0]
    output = harness.step()
    row = next(row for row in output.scheduled if row.seq_id == fork.sequence.seq_id)
    # The parent's last token is computed by this very step, after the copy was made.
    assert (row.num_computed_tokens, row.token_ids) == (14, [parent.tokens[14], 9])
    assert [move for move in output.moves if isinstance(move, CopyBlock)] == [
        CopyBlock(group, parent.sequence.blocks.tables[group][3], fork.sequence.blocks.tables[group][3]) for group in range(len(groups))
    ]
    assert fork.sequence.blocks.held(0)[:3] == parent.sequence.blocks.held(0)[:3]
    harness.drain()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_fork_with_another_salt_shares_nothing(prefix_caching):
    harness = Harness(prefix_caching=prefix_caching)
    parent = harness.add(make_request("parent", PROMPT[:13], max_tokens=20, ignore_eos=True))[0]
    harness.step()
    assert first_row(harness, make_request("fork", tuple(parent.tokens), fork_of="parent", cache_salt="own", max_tokens=1))[0] == 0


def test_a_fork_of_nobody_or_of_other_tokens_is_an_ordinary_request():
    harness = Harness()
    harness.add(make_request("parent", PROMPT[:13], max_tokens=20, ignore_eos=True))
    harness.step()
    others = own_prompt("others", 9)
    for number, fork_of in enumerate(("parent", "nobody")):
        record = harness.add(make_request(str(number), others[number:], fork_of=fork_of, max_tokens=1))[0]
        row = next(row for row in harness.step().scheduled if row.seq_id == record.sequence.seq_id)
        assert row.num_computed_tokens == 0
    harness.drain()


def test_a_fork_copies_no_tail_that_the_same_step_fills():
    harness = Harness(max_num_seqs=4)
    # All three begin in one step: "b" finds the block that "a" is about to fill, and the fork of "b" ends within it.
    for request in (
        make_request("a", PROMPT[:9], max_tokens=4, ignore_eos=True),
        make_request("b", PROMPT[:9], max_tokens=4, ignore_eos=True),
        make_request("c", PROMPT[:7], fork_of="b", max_tokens=4, ignore_eos=True),
    ):
        harness.add(request)
    assert [row.num_computed_tokens for row in harness.step().scheduled] == [0, 8, 4]
    harness.drain()
