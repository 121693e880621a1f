"""A check may end in any way, and the others are not touched by it."""

from __future__ import annotations

import os

import pytest

from tests.check_gpu.outcome import Outcome, Task
from tests.check_gpu.runner import BATCH, batches, how_it_died, run_all, run_batch

TIMEOUT = 0.5


def task(key: str, *, attribute: str = "CHECKS", module: str = "tests.check_gpu.misbehaving") -> Task:
    return Task(module=module, attribute=attribute, key=key, timeout_seconds=TIMEOUT)


def test_every_way_to_end() -> None:
    keys = ("well", "refuses", "crashes", "fails", "hangs", "leaves")
    outcomes = {done.key: outcome for done, outcome in run_batch(tuple(map(task, keys)), os.environ).items()}
    assert tuple(outcomes) == keys
    assert (outcomes["well"].figures, outcomes["well"].problems) == ({"answer": 42}, ())
    assert outcomes["refuses"].problems == ("temporaries: at most 64 bytes allowed, got 65",)
    (failed,) = outcomes["fails"].problems
    assert failed.startswith("ValueError: of the compiler, at tests/check_gpu/misbehaving.py:")
    (crashed,) = outcomes["crashes"].problems
    assert crashed.startswith("the subprocess died of SIGSEGV")
    assert outcomes["hangs"].problems == (f"took more than {TIMEOUT} s",)
    (left,) = outcomes["leaves"].problems
    assert left.startswith("the subprocess ended with status 3")


def test_a_subprocess_that_never_begins_fails_all_its_checks() -> None:
    tasks = (task("a", module="tests.check_gpu.nowhere"), task("b", module="tests.check_gpu.nowhere"))
    outcomes = run_batch(tasks, os.environ)
    assert all("No module named 'tests.check_gpu.nowhere'" in outcome.problems[0] for outcome in outcomes.values())
    # Without Python's path not even the child is there.
    outcomes = run_batch(tasks, {**os.environ, "PYTHONHOME": "/nowhere"})
    assert [outcome.problems[0].startswith("the subprocess ended with status 1") for outcome in outcomes.values()] == [True, True]


def test_everything_is_told_and_given_back_in_order() -> None:
    told: dict[Task, Outcome] = {}
    tasks = [task("well"), task("refuses")]
    outcomes = run_all(tasks, os.environ, told.__setitem__)
    assert list(outcomes) == tasks
    assert told == outcomes


def test_kernels_of_an_operation_share_subprocesses_and_programs_do_not() -> None:
    kernels = [task(str(number), attribute="KERNELS", module="pallas_kernels.a.budgets") for number in range(BATCH + 1)]
    others = [task("x", attribute="KERNELS", module="pallas_kernels.b.budgets")]
    programs = [task("y"), task("z")]
    made = batches([*kernels, *others, *programs])
    assert [len(batch) for batch in made] == [1, 1, BATCH, 1, 1]
    assert [item for batch in made for item in batch] == [*programs, *kernels, *others]


@pytest.mark.parametrize(
    ("status", "errors", "said"),
    [
        (-6, "terminate called\n\n", "the subprocess died of SIGABRT: terminate called"),
        (1, "Timeout (0:00:05)!\nThread 0x1:\n", "took more than 5 s"),
        (1, "", "the subprocess ended with status 1: it said nothing"),
    ],
)
def test_one_sentence_about_a_death(status: int, errors: str, said: str) -> None:
    assert how_it_died(status, errors, 5.0) == said
