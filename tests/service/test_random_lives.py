"""Random lives of a cluster: jobs come and go, daemons vanish and return, and the service is killed at any moment.

Whatever happened, in the end what the scheduler believes is what runs, its log replays to what it knows, and every job
can still be brought to its end.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.service.living import Living, live

from pollux.core import Phase
from pollux.errors import PolluxError
from pollux.wire.nodes import RunPhase

# Python 3.11 forgets a connection that is accepted in the very moment in which the server is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STEPS = 40


@pytest.mark.parametrize("policy", ["fifo-backfill", "pollux"])
@pytest.mark.parametrize("seed", range(6))
def test_every_job_comes_to_its_end_and_nothing_runs_that_should_not(seed: int, policy: str) -> None:
    chance = random.Random(f"{seed}/{policy}")

    async def main(living: Living) -> None:
        for _ in range(STEPS):
            await act(living, chance)
            await asyncio.sleep(chance.choice((0.0, 0.0, 0.002, 0.02)))
        await heal(living)
        await finish_all(living)
        state = living.service.scheduler.state
        assert not state.jobs
        assert not [run for daemon in living.daemons for run in daemon.runs.values() if run.phase is not RunPhase.ENDED]
        assert living.replayed().state == state

    live(main, 2, 2, 1, policy=policy, node_grace_s=0.05, interval_s=0.05, recovery_s=1.0, save_every=20)


async def act(living: Living, chance: random.Random) -> None:
    state = living.service.scheduler.state
    jobs = sorted(state.jobs)
    daemon = chance.choice(living.daemons)
    training = [job for job, run in daemon.runs.items() if run.phase is RunPhase.TRAINING]
    what = chance.choices(
        ("submit", "finish", "fail", "pause", "resume", "cancel", "scale", "kill", "away", "back", "slow", "drain"),
        (10, 5, 3, 2, 3, 1, 2, 2, 2, 4, 2, 1),
    )[0]
    try:
        match what:
            case "submit" if len(jobs) < 8:
                elastic = {"min_gpus": chance.choice((1, 1, 2)), "requested_gpus": chance.choice((2, 3))}
                plain = {"command": "echo hello", "gpus": chance.choice((1, 2))}
                await living.submit(until=None, retries=1, **chance.choice((elastic, plain)))
            case "finish" | "fail" if training:
                getattr(daemon, what)(chance.choice(training))
            case "pause" | "resume" | "cancel" if jobs:
                getattr(living.service, what)(chance.choice(jobs))
            case "scale" if jobs:
                living.service.scale(chance.choice(jobs), 1, chance.choice((1, 2, None)))
            case "kill":
                await living.kill()
                await living.start(wait=chance.random() < 0.5)
            case "away":
                await daemon.stop()
            case "back":
                await daemon.stop()
                await daemon.start()
            case "slow":
                daemon.is_slow = not daemon.is_slow
                daemon.settle()
            case "drain":
                chance.choice((living.service.drain, living.service.undrain))(daemon.node.id)
    except PolluxError:
        pass  # a request that this moment does not allow


async def heal(living: Living) -> None:
    """From now on everything works."""
    for daemon in living.daemons:
        daemon.is_slow = False
        await daemon.stop()
        await daemon.start()
        daemon.settle()
    await living.until(lambda: not living.service.is_recovering)
    await living.until(lambda: len(living.service.scheduler.state.cluster.nodes) == len(living.daemons))
    await living.until(lambda: all(living.service.node_state(d.node.id) != "away" for d in living.daemons))
    for daemon in living.daemons:
        living.service.undrain(daemon.node.id)


async def finish_all(living: Living) -> None:
    def go_on() -> bool:
        state = living.service.scheduler.state
        for job in list(state.jobs.values()):
            if job.phase in (Phase.PAUSED, Phase.PAUSING):
                living.service.resume(job.id)
            if job.phase is not Phase.RUNNING:
                continue
            for daemon in living.daemons:
                run = daemon.runs.get(job.id)
                if run is not None and run.phase is RunPhase.TRAINING and run.generation == job.generation:
                    assert dict(run.allocation.gpus).keys() == dict(job.allocation.gpus).keys()
                    daemon.finish(job.id)
        return not state.jobs

    await living.until(go_on, 30.0)
