"""Where a waiting sequence begins: at its swapped blocks, behind a relative's tokens, behind a cached prefix, or at 0. No jax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.kv.prefix_cache import PrefixCache, PrefixHit
from jaxinfer.kv.swap import still_on_device, swap_in
from jaxinfer.kv.tiers import FetchTarget, KVTiers
from jaxinfer.sequence import Sequence


@dataclass(slots=True)
class Start:
    """Where a waiting sequence would begin, and what that takes."""

    num_tokens: int
    reused: list[int]
    """Device blocks per group that need not be allocated."""
    claimed: list[int]
    """Those among them that count as available now."""
    hit: PrefixHit | None = None
    leader: Sequence | None = None


class StartingPoints:
    """Finds the best point to begin at, and fills a sequence's tables for it."""

    def __init__(self, tiers: KVTiers, prefixes: PrefixCache | None):
        self._tiers = tiers
        self._prefixes = prefixes

    def best(self, seq: Sequence, relatives: Iterable[Sequence]) -> Start:
        """The best point to begin at: swapped blocks, a running relative's, or a cached prefix."""
        if seq.swapped is not None:
            reused, claimed = still_on_device(self._tiers, seq.swapped, seq.nodes)
            return Start(seq.swapped.num_tokens, reused, claimed)
        size = self._tiers.pools.block_size
        # The last token is always computed: its logits are wanted. So are those of a prompt whose log-probabilities are.
        most = len(seq.token_ids) - 1
        if seq.num_prompt_logprobs_done < seq.num_prompt_tokens - 1:
            most = min(most, seq.num_prompt_logprobs_done)
        hit = None
        if self._prefixes is not None and self._tiers.index is not None and seq.root is not None:
            count = most // size
            self._tiers.index.extend_keys(seq.block_keys, seq.root, seq.token_ids, count)
            hit = self._prefixes.find(seq.root, seq.block_keys[:count])
        num_hit = len(hit.nodes) * size if hit is not None else 0
        leader, num_shared = self._leader(seq, relatives, most)
        if leader is not None and num_shared > num_hit:
            reused = [num_shared // size - first for first in leader.blocks.num_dropped]
            return Start(num_shared, reused, [0] * len(reused), leader=leader)
        none = [0] * len(self._tiers.pools.pools)
        return Start(num_hit, hit.num_on_device, hit.claimed, hit=hit) if hit is not None else Start(0, none, none)

    def _leader(self, seq: Sequence, relatives: Iterable[Sequence], most: int) -> tuple[Sequence | None, int]:
        """A running sequence whose blocks this one may share, and how many of its tokens; at most `most`."""
        for leader in relatives:
            if leader is seq or leader.slot is None or leader.fetch is not None or leader.cache_salt != seq.cache_salt:
                continue
            num_shared = _num_common(leader.token_ids, seq.token_ids, min(most, leader.num_computed_tokens))
            tail = num_shared % self._tiers.pools.block_size
            if tail and num_shared > leader.num_launched_tokens:
                # The last block is copied before this step writes to it: only what is there by then counts.
                num_shared = max(num_shared - tail, min(num_shared, leader.num_launched_tokens))
            needs = [self._tiers.pools.first_needed(group, num_shared) for group in range(len(self._tiers.pools.pools))]
            if all(first <= need for first, need in zip(leader.blocks.num_dropped, needs, strict=True)):
                return leader, num_shared
        return None, 0

    def take(self, seq: Sequence, start: Start) -> list[FetchTarget]:
        """Fill a sequence's tables as `best` found; returns what has to be fetched for that."""
        if seq.swapped is not None:
            return swap_in(self._tiers, seq.swapped, seq.nodes, seq.blocks)
        if start.leader is not None:
            self._tiers.share_tables(start.leader.blocks, seq.blocks, start.num_tokens)
            seq.nodes = start.leader.nodes[: start.num_tokens // self._tiers.pools.block_size]
            self._tiers.counters.num_hit_tokens_device += start.num_tokens
        elif start.hit is not None and self._prefixes is not None:
            seq.nodes = list(start.hit.nodes)
            return self._prefixes.claim(start.hit, seq.blocks)
        return []


def _num_common(first: list[int], second: list[int], most: int) -> int:
    """Tokens that two lists have in common at their beginnings, at most `most`."""
    most = min(most, len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(index for index in range(most) if first[index] != second[index])
