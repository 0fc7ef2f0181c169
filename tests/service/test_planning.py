"""Plans from a process of their own: real workers, policies that break."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.core import Cluster, FrozenMap, Job, JobId, JobSpec, KindProfile, MakePlan, Snapshot
from pollux.errors import PolicyFailed
from pollux.service.planning import KindNews, Planner

PATIENT_S = 100.0

OWN = """
import os, sys, time
from pollux.core import Plan
from pollux.policies import Policy

class Odd(Policy):
    def plan(self, snapshot, seed):
        print("what a policy prints does not get in the way")
        match snapshot.round:
            case 1: raise ValueError("no idea")
            case 2: os._exit(3)
            case 3: time.sleep(600)
        self.jobs = {kind: known.num_jobs for kind, known in snapshot.kinds.items()}
        return Plan()

    def stats(self):
        return self.jobs
"""


def request(number: int = 0, **kinds: KindProfile) -> MakePlan:
    jobs = [Job(JobSpec(JobId(name), requested_gpus=1), 0.0, sequence) for sequence, name in enumerate("ab")]
    snapshot = Snapshot(0.0, number, Cluster.uniform(1, 2), FrozenMap({job.id: job for job in jobs}))
    snapshot = replace(snapshot, kinds=FrozenMap(kinds))
    return MakePlan(number, snapshot, 1)


def test_a_plan_comes_from_another_process() -> None:
    async def main() -> None:
        planner = Planner("fifo", {}, 60.0)
        try:
            await planner.warm_up()
            made = await planner.plan(request(7))
            assert made.round == 7
            assert {job: held.num_gpus for job, held in made.plan.allocations.items()} == {"a": 1, "b": 1}
            assert made.cpu_ms is not None
            worker = planner._worker
            assert worker is not None
            assert worker.pid != os.getpid()
            os.kill(worker.pid, signal.SIGKILL)
            await worker.wait()
            assert (await planner.plan(request(8))).round == 8  # by the next one
        finally:
            await planner.close()

    asyncio.run(main())


def test_a_policy_that_breaks_breaks_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_policy.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        planner = Planner("odd_policy:Odd", {}, PATIENT_S)
        try:
            assert (await planner.plan(request(9))).round == 9
            a, b, c = (KindProfile(num_jobs=count) for count in (1, 2, 3))
            for kinds in ({"a": a, "b": b}, {"a": a, "b": b}, {"a": a, "b": c}, {"b": c}, {}, {"a": a}):
                made = await planner.plan(request(9, **kinds))
                assert made.stats == {kind: known.num_jobs for kind, known in kinds.items()}
            for number, problem in ((1, "no idea"), (2, "process died")):
                with pytest.raises(PolicyFailed, match=problem):
                    await planner.plan(request(number))
            await planner.plan(request(9))  # by the next worker, which takes a while to start on a busy machine
            planner._timeout_s = 0.5
            with pytest.raises(PolicyFailed, match=r"more than 0\.5 s"):
                await planner.plan(request(3))
            planner._timeout_s = PATIENT_S
            made = await planner.plan(request(10, a=a, b=b))  # by a worker that knew nothing
            assert made.stats == {"a": 1, "b": 2}
        finally:
            await planner.close()

    asyncio.run(main())


def test_of_the_registry_only_what_changed_is_told() -> None:
    a, b, c = (KindProfile(num_jobs=count) for count in (1, 2, 3))
    told, now = FrozenMap({"a": a, "b": b, "c": c}), FrozenMap({"a": a, "b": c})
    assert KindNews.between(told, told) == KindNews()
    assert KindNews.between(told, now) == KindNews(FrozenMap({"b": c}), ("c",))


def test_a_worker_ends_with_its_service(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys\n"
        "from pollux.service.planning import Planner\n"
        "async def main():\n"
        "    planner = Planner('fifo', {}, 60.0)\n"
        "    await planner.warm_up()\n"
        "    print(planner._worker.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        service = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        out, _ = await service.communicate()
        worker = int(out)
        async with asyncio.timeout(PATIENT_S):
            while Path(f"/proc/{worker}").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
                await asyncio.sleep(0.02)

    asyncio.run(main())
