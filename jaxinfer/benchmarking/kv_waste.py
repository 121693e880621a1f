"""How much of the KV memory that sequences hold has no token in it."""

from __future__ import annotations

from jaxinfer.kv.tables import GroupedPools


class KVWaste:
    """Sums over steps: slots held, tokens computed, sequences running. Looks at the pools after each step.

    Percentages are of the sums, so a step counts as much as it holds. Window groups are left out, as they give back
    what they no longer need.

    Args:
        pools: whose held blocks are counted.
        reserved_tokens_per_seq: slots that an engine without paging sets aside for a sequence, for comparison.
    """

    def __init__(self, pools: GroupedPools, *, reserved_tokens_per_seq: int):
        self._pools = [pool for pool, group in zip(pools.pools, pools.groups, strict=True) if group.kind != "window"]
        self._block_size = pools.block_size
        self._reserved_tokens_per_seq = reserved_tokens_per_seq
        self.num_steps = 0
        self.num_seq_steps = 0
        self.num_held_slots = 0
        self.num_tokens = 0
        self.max_blocks_per_seq = 0.0
        """The largest of any step; within a step it is the mean over its sequences."""

    def observe(self, num_running: int, num_kv_tokens: int) -> None:
        """Count a step after which `num_running` sequences with `num_kv_tokens` computed tokens are left; none are no step."""
        if num_running == 0 or not self._pools:
            return
        held = sum(pool.num_held for pool in self._pools) * self._block_size
        tokens = num_kv_tokens * len(self._pools)
        self.num_steps += 1
        self.num_seq_steps += num_running
        self.num_held_slots += held
        self.num_tokens += tokens
        self.max_blocks_per_seq = max(self.max_blocks_per_seq, (held - tokens) / (self._block_size * len(self._pools) * num_running))

    @property
    def mean_running_seqs(self) -> float:
        """Sequences running, mean over steps."""
        return self.num_seq_steps / max(1, self.num_steps)

    @property
    def percent(self) -> float:
        """Held slots without a token."""
        return 100 * (self.num_held_slots - self.num_tokens) / max(1, self.num_held_slots)

    @property
    def blocks_per_seq(self) -> float:
        """Held slots without a token, in blocks for each sequence and group, mean over sequences and steps."""
        return (self.num_held_slots - self.num_tokens) / max(1, self._block_size * len(self._pools) * self.num_seq_steps)

    @property
    def reserved_percent(self) -> float:
        """Slots without a token if each running sequence had `reserved_tokens_per_seq` of them set aside."""
        reserved = self.num_seq_steps * self._reserved_tokens_per_seq * len(self._pools)
        return 100 * (reserved - self.num_tokens) / max(1, reserved)
