"""A device, a host memory and a disk made of dictionaries: they do what the scheduler says and know nothing of its state.

KV at a position is one number, which stands for all tokens up to there and for the salt (`chain`): equal numbers are KV that
may be shared, everything else is foreign or stale.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.kv.block_pool import TRASH_BLOCK
from jaxinfer.kv.groups import KVGroupSpec
from jaxinfer.messages import (
    BlockMove,
    CopyBlock,
    DeleteFromDisk,
    DiskEntry,
    Fetch,
    FetchResult,
    HostSource,
    LoadBlock,
    ScheduledRequest,
    SchedulerOutput,
    SpillBlock,
    StoreBlock,
)

VOCAB_SIZE = 24
Content = list[int | None]


def begin_chain(salt: str) -> int:
    """What stands for the empty prefix of a salt; ints hash alike in every process, strings do not."""
    return hash((1, *salt.encode()))


def next_link(link: int, token: int) -> int:
    return hash((link, token))


def next_token(link: int, index: int) -> int:
    """The model: a token that depends on every token before it."""
    return hash((link, index, 7)) % VOCAB_SIZE


@dataclass
class Truth:
    """A sequence as it would be alone and without an end: `links[p]` is what the KV of position p must be."""

    index: int
    salt: str
    tokens: list[int]
    links: list[int] = field(default_factory=list)

    def extend(self, num_tokens: int) -> None:
        """Know at least so many tokens, and the links of all but the last."""
        link = self.links[-1] if self.links else begin_chain(self.salt)
        while len(self.links) < num_tokens:
            position = len(self.links)
            if position == len(self.tokens):
                self.tokens.append(next_token(link, self.index))
            link = next_link(link, self.tokens[position])
            self.links.append(link)


@dataclass
class _Staged:
    contents: dict[int, Content]
    sources: Sequence[HostSource | DiskEntry]
    failed: tuple[DiskEntry, ...] = ()
    is_acknowledged: bool = False


class DictionaryDevice:
    """Executes steps in order. Fetches hold what their sources were at that moment; `acknowledge` says when they are done.

    Args:
        faults: draws which reads and writes of the disk fail.
        read_faults, write_faults: the share of them.
    """

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        block_size: int,
        num_blocks: Sequence[int],
        host_slots: Sequence[int] = (),
        faults: random.Random | None = None,
        read_faults: float = 0.0,
        write_faults: float = 0.0,
    ):
        self.groups, self.block_size, self.num_blocks, self.host_slots = groups, block_size, num_blocks, host_slots
        self.memory: list[list[Content]] = [[[None] * block_size for _ in range(count + 1)] for count in num_blocks]
        self.host: list[dict[int, Content]] = [{} for _ in groups]
        self.disk: dict[tuple[bytes, int], tuple[DiskEntry, Content]] = {}
        self.staged: dict[int, _Staged] = {}
        self.lost: list[DiskEntry] = []
        self.last_tokens: dict[int, int] = {}
        self.num_moves: dict[type, int] = dict.fromkeys((CopyBlock, StoreBlock, SpillBlock, LoadBlock, DeleteFromDisk), 0)
        self._faults = faults or random.Random(0)
        self._read_faults, self._write_faults = read_faults, write_faults

    @property
    def outstanding(self) -> list[int]:
        """Tickets that wait to be acknowledged."""
        return [ticket for ticket, staged in self.staged.items() if not staged.is_acknowledged]

    def execute(self, output: SchedulerOutput, truths: dict[int, Truth]) -> list[list[int]]:
        """One step; returns the sampled tokens of each row."""
        for ticket in output.cancelled_fetches:
            self.staged.pop(ticket, None)
        self.move(output.moves)
        for fetch in output.fetches:
            self._begin_fetch(fetch)
        for row in output.scheduled:
            self._write(row, truths[row.seq_id])
        # Reads come after all writes of the step: the order least kind to a block given away too early.
        for row in output.scheduled:
            self._read(row, truths[row.seq_id])
        return [self._sample(row, truths[row.seq_id]) for row in output.scheduled]

    def move(self, moves: Sequence[BlockMove]) -> None:
        for move in moves:
            self.num_moves[type(move)] += 1
            match move:
                case CopyBlock(group, source, target):
                    assert TRASH_BLOCK not in (source, target) and source != target
                    self.memory[group][target] = list(self.memory[group][source])
                case StoreBlock(group, block_id, host_slot):
                    assert block_id != TRASH_BLOCK and 1 <= host_slot <= self.host_slots[group]
                    assert not self._is_being_read(group, host_slot), "a host slot was overwritten while a fetch reads it"
                    self.host[group][host_slot] = list(self.memory[group][block_id])
                case SpillBlock(group, host_slot, entry):
                    self._spill(self.host[group][host_slot], entry)
                case LoadBlock(ticket, index, group, block_id):
                    self._load(ticket, index, group, block_id)
                case DeleteFromDisk(entry):
                    self.disk.pop((entry.key, entry.group), None)

    def acknowledge(self, ticket: int) -> FetchResult:
        """A fetch has ended, well or not."""
        staged = self.staged[ticket]
        staged.is_acknowledged = True
        if staged.failed:
            del self.staged[ticket]
        return FetchResult(ticket, staged.failed)

    def take_lost(self) -> list[DiskEntry]:
        lost, self.lost = self.lost, []
        return lost

    def _begin_fetch(self, fetch: Fetch) -> None:
        assert fetch.ticket not in self.staged and fetch.sources
        contents: dict[int, Content] = {}
        failed = []
        for index, source in enumerate(fetch.sources):
            if isinstance(source, HostSource):
                contents[index] = list(self.host[source.group][source.host_slot])
                continue
            name = (source.key, source.group)
            entry, content = self.disk.get(name, (None, []))
            if entry is None or (entry.token_ids, entry.namespace) != (source.token_ids, source.namespace) or self._draw(self._read_faults):
                self.disk.pop(name, None)
                failed.append(source)
            contents[index] = list(content)
        self.staged[fetch.ticket] = _Staged(contents, fetch.sources, tuple(failed))

    def _is_being_read(self, group: int, host_slot: int) -> bool:
        return any(HostSource(group, host_slot) in self.staged[ticket].sources for ticket in self.outstanding)

    def _spill(self, content: Content, entry: DiskEntry) -> None:
        if self._draw(self._write_faults):
            self.lost.append(entry)
        else:
            self.disk[entry.key, entry.group] = (entry, list(content))

    def _load(self, ticket: int, index: int, group: int, block_id: int) -> None:
        staged = self.staged[ticket]
        assert staged.is_acknowledged and staged.sources[index].group == group and block_id != TRASH_BLOCK
        self.memory[group][block_id] = staged.contents.pop(index)
        if not staged.contents:
            del self.staged[ticket]

    def _draw(self, share: float) -> bool:
        return share > 0 and self._faults.random() < share

    def _write(self, row: ScheduledRequest, truth: Truth) -> None:
        start, size = row.num_computed_tokens, self.block_size
        end = start + len(row.token_ids)
        truth.extend(end + 1)
        token_ids = row.token_ids
        if row.is_fed_back:
            assert token_ids[-1] == 0 and end > row.num_prompt_tokens
            token_ids = [*token_ids[:-1], self.last_tokens[row.slot]]
        assert token_ids == truth.tokens[start:end], "not the sequence's own tokens"
        for memory, table in zip(self.memory, row.block_ids, strict=True):
            assert len(table) == -(-end // size), "the table is not as long as the tokens"
            for position in range(start, end):
                block_id = table[position // size]
                assert block_id != TRASH_BLOCK
                memory[block_id][position % size] = truth.links[position]

    def _read(self, row: ScheduledRequest, truth: Truth) -> None:
        """Attend: every key in the window of every token of the row must be that of the sequence's own prefix, in every group."""
        start, end, size = row.num_computed_tokens, row.num_computed_tokens + len(row.token_ids), self.block_size
        for group, memory, table in zip(self.groups, self.memory, row.block_ids, strict=True):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            keys: Content = []
            for block in range(first // size, len(table)):
                keys += memory[table[block]]
            offset = first - first // size * size
            assert keys[offset : offset + end - first] == truth.links[first:end], "foreign or stale KV"

    def _sample(self, row: ScheduledRequest, truth: Truth) -> list[int]:
        if not row.is_sampling:
            return []
        token = self.last_tokens[row.slot] = truth.tokens[row.num_computed_tokens + len(row.token_ids)]
        return [token]
