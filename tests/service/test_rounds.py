"""Waiting for rounds on a real clock; the rule itself is tested in tests/scheduler/test_rounds.py."""

from __future__ import annotations

import asyncio

import pytest

from pollux.core import JobId, JobSpec, JobSubmitted, Node, NodeId, NodeJoined
from pollux.scheduler import Scheduler
from pollux.service.rounds import Rounds

LONG_S, SOON_S = 3600.0, 10.0


async def waiting(rounds: Rounds) -> asyncio.Task[None]:
    """Somebody who waits for the next round, and has not got it."""
    task = asyncio.create_task(rounds.due())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def test_the_first_is_due_at_once_and_the_next_is_not() -> None:
    async def main() -> None:
        rounds = Rounds(LONG_S, 0.0, 0.0)
        await asyncio.wait_for(rounds.due(), SOON_S)
        (await waiting(rounds)).cancel()

    asyncio.run(main())


def test_the_interval_ends() -> None:
    async def main() -> None:
        rounds = Rounds(0.02, 0.0, 0.0)
        for _ in range(3):
            await asyncio.wait_for(rounds.due(), SOON_S)

    asyncio.run(main())


def test_who_waits_is_woken_by_a_job_that_comes_while_gpus_are_free() -> None:
    async def main() -> None:
        scheduler, rounds = Scheduler(), Rounds(LONG_S, 0.001, 0.0)
        scheduler.handle(NodeJoined(Node(NodeId("n"), 1)), 0.0)
        await asyncio.wait_for(rounds.due(), SOON_S)
        task = await waiting(rounds)
        event = JobSubmitted(JobSpec(JobId("a")))
        scheduler.handle(event, 1.0)
        rounds.note(event, scheduler.state)
        await asyncio.wait_for(task, SOON_S)

    asyncio.run(main())


@pytest.mark.parametrize("delays_s", [(0.0,), (0.02,), (LONG_S, 0.01), (0.01, LONG_S)])
def test_who_waits_is_woken_for_the_soonest_that_is_wanted(delays_s: tuple[float, ...]) -> None:
    async def main() -> None:
        rounds = Rounds(2 * LONG_S, 0.0, 0.0)
        await asyncio.wait_for(rounds.due(), SOON_S)
        task = await waiting(rounds)
        for delay_s in delays_s:
            rounds.hurry(delay_s)
        await asyncio.wait_for(task, SOON_S)

    asyncio.run(main())
