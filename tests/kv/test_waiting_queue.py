from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from jaxinfer.waiting_queue import FairQueue, OrderedQueue, make_queue


def waiting(number: int, priority: int = 0, user: str = "") -> SimpleNamespace:
    return SimpleNamespace(order=(priority, number), user=user, is_finished=False)


def take(queue) -> SimpleNamespace | None:
    seq = queue.head()
    if seq is not None:
        queue.pop()
    return seq


def test_each_policy_has_its_queue():
    assert [type(make_queue(policy)) for policy in ("fcfs", "priority", "fair")] == [OrderedQueue, OrderedQueue, FairQueue]


def test_a_sequence_that_comes_back_is_before_all_that_came_after_it():
    queue = OrderedQueue()
    seqs = [waiting(number, priority) for number, priority in enumerate((0, 0, -1, 0))]
    for seq in seqs:
        queue.push(seq)
    assert take(queue) is seqs[2]
    assert take(queue) is seqs[0]
    queue.push(seqs[0])
    assert [take(queue) for _ in range(4)] == [seqs[0], seqs[1], seqs[3], None]


@pytest.mark.parametrize("make", [OrderedQueue, FairQueue])
def test_those_that_end_while_they_wait_are_skipped_and_not_kept(make):
    queue, draw = make(), random.Random(0)
    expected = []
    for number in range(1_000):
        seq = waiting(number)
        queue.arrive("")
        queue.push(seq)
        expected.append(seq)
        if draw.random() < 0.9:
            ended = expected.pop(draw.randrange(len(expected)))
            ended.is_finished = True
            queue.note_end(ended)
            queue.leave("")
        assert len(queue) == len(expected)
    heap = queue._heap if make is OrderedQueue else queue._queues[""]._heap
    assert len(heap) <= 2 * len(expected) + 64
    assert [take(queue) for _ in expected] == expected
    assert take(queue) is None and len(queue) == 0


class Users:
    """A FairQueue with users whose sequences take so many tokens each, computed at once when they are taken."""

    def __init__(self):
        self.queue, self.number, self.served = FairQueue(), 0, []

    def ask(self, user: str, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            self.queue.arrive(user)
            self.queue.push(waiting(self.number, user=user))

    def serve(self, num_tokens: int, count: int = 1) -> str:
        users = ""
        for _ in range(count):
            seq = take(self.queue)
            self.queue.charge(seq.user, num_tokens)
            self.queue.leave(seq.user)
            users += seq.user
        return users


def test_users_take_turns_however_much_one_of_them_asks():
    users = Users()
    users.ask("h", 20)
    users.ask("l", 4)
    assert users.serve(10, 8) in ("hl" * 4, "lh" * 4)
    assert users.serve(10, 4) == "hhhh"


def test_one_who_was_away_comes_back_without_credit():
    users = Users()
    users.ask("a", 12)
    users.ask("b")
    served = users.serve(10, 8)
    assert served.count("b") == 1
    users.ask("b", 6)
    # "a" has had 70 tokens and "b" 10, but it was not there: they take turns from now on.
    assert users.serve(10, 8).count("b") == 4


def test_one_who_has_had_much_is_not_forgiven_for_going_away_for_a_moment():
    users = Users()
    users.ask("a", 3)
    users.ask("b", 9)
    assert users.serve(10, 2) in ("ab", "ba")
    users.queue.charge("a", 40)
    assert users.serve(10, 4) == "bbbb"
    assert users.serve(10, 2) in ("ab", "ba")
    assert sorted(users.serve(10, 2)) == ["a", "b"]  # the last of "a"
    users.ask("a")
    users.queue.charge("a", 30)
    users.queue.charge("b", 0)
    assert users.serve(10) == "b"


def test_within_a_user_the_order_is_that_of_arrival():
    queue = FairQueue()
    seqs = [waiting(number, user="ab"[number % 2]) for number in range(6)]
    for seq in reversed(seqs):
        queue.arrive(seq.user)
        queue.push(seq)
    taken = []
    while (seq := take(queue)) is not None:
        queue.charge(seq.user, 1)
        taken.append(seq)
    for user in "ab":
        assert [seq for seq in taken if seq.user == user] == [seq for seq in seqs if seq.user == user]


def test_users_who_come_once_do_not_pile_up():
    users = Users()
    users.ask("always")
    for number in range(10_000):
        users.ask(f"user {number}")
        users.queue.charge("always", 2)
        while users.serve(1) == "always":
            users.ask("always")
    assert len(users.queue._served) <= 1_100
    assert users.queue.head().user == "always"


def test_users_who_are_gone_leave_nothing_behind_once_nobody_is_there():
    users = Users()
    for number in range(50):
        users.ask(f"user {number}")
    users.serve(3, 50)
    assert not (users.queue._served or users.queue._queues or users.queue._heap or users.queue._num_living)
