"""The demo's jobs under one policy after the other, each on a fresh cluster."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.cli import top, words
from pollux.cli.demo.cluster import DemoCluster
from pollux.cli.demo.story import REFERENCE, DemoResult, Outage, PolicyRun, journal, story
from pollux.cli.demo.workload import FULL, QUICK, Arrival, Workload, examples_folder, read_workload
from pollux.core import JobId

if TYPE_CHECKING:
    from pollux.wire.api import EventView
    from pollux.wire.service_client import ServiceClient

POLICIES = ("pollux", REFERENCE)
NODES, SLOTS = 2, 2
INTERVAL_S, QUICK_INTERVAL_S = 5.0, 2.0
"""From round to round: jobs of half a minute cannot wait for one a minute."""
LOOK_S = 0.5
RUN_LIMIT_S = 600.0
OUTAGE_S = 3.0
"""How long a service that was killed stays away."""
PAGE = 1000
LAST_BYTES = 8192
"""Of a log: enough for its last lines."""

Tell = Callable[[str], None]
Show = Callable[[top.Look], None]


def run_demo(
    policies: Sequence[str] = POLICIES,
    *,
    is_quick: bool = False,
    kills_service: bool = False,
    use_gpus: bool = False,
    keep: Path | None = None,
    tell: Tell = lambda text: None,
    show: Show = lambda look: None,
) -> DemoResult:
    """The same jobs under one policy after the other, each on a fresh cluster. Ends all it has started, always.

    `kills_service`: in the first run. `keep` gets what the clusters leave behind. `tell` is handed sentences and
    `show` the cluster, twice a second.
    """
    workload = read_workload(examples_folder() / (QUICK if is_quick else FULL))
    # Short, since sockets are in it; and nobody else's, whatever POLLUX_HOME says.
    base = Path(tempfile.mkdtemp(prefix="pollux-demo-", dir="/tmp"))
    runs: list[PolicyRun] = []
    try:
        for policy in policies:
            cluster = DemoCluster(
                base / policy,
                policy,
                nodes=NODES,
                slots=SLOTS,
                interval_s=QUICK_INTERVAL_S if is_quick else INTERVAL_S,
                use_gpus=use_gpus,
            )
            tell(f"Starting a cluster under {policy} …")
            with cluster:
                try:
                    run = _Run(cluster, policy, workload, tell, show, kills_service and not runs).run()
                except KeyboardInterrupt:
                    tell("Ending the cluster; its jobs save first …")
                    raise
            if cluster.left:
                run = replace(
                    run, faults=(*run.faults, f"{words.count(len(cluster.left), 'process')} had to be killed.")
                )
            runs.append(run)
    finally:
        if keep is not None:
            shutil.copytree(base, keep, ignore=_no_files, dirs_exist_ok=True)
        shutil.rmtree(base, ignore_errors=True)
    return DemoResult(tuple(runs), os.cpu_count() or 1, use_gpus)


class _Run:
    """One policy: submits, watches, and tells the story."""

    def __init__(
        self, cluster: DemoCluster, policy: str, workload: Workload, tell: Tell, show: Show, kills: bool
    ) -> None:
        self._cluster, self._policy, self._arrivals = cluster, policy, workload.arrivals
        self._tell, self._show = tell, show
        self._kill_at_s = workload.kill_service_at_s if kills else None
        self._jobs: dict[JobId, Arrival] = {}
        self._begin_s = 0.0
        self._outage: tuple[float, float] | None = None
        self._steps: dict[JobId, tuple[int, int]] = {}
        """Of the jobs that trained when the service was killed: steps told before, and first told after."""

    def run(self) -> PolicyRun:
        look = self._cluster.ask(top.RecentJobs().look)
        recent = top.RecentJobs()
        gpus = look.cluster.gpus
        where = f"{gpus} slots on {words.count(len(look.cluster.nodes), 'node')}"
        self._tell(f"Ready: {where}. Submitting {len(self._arrivals)} jobs.")
        self._begin_s = time.time()
        faults = []
        while len(self._jobs) < len(self._arrivals) or not all(job.phase.is_terminal for job in look.jobs):
            self._submit_due()
            self._kill_if_due(look)
            look = self._cluster.ask(recent.look)
            self._note_steps(look)
            self._show(look)
            if self._now_s > RUN_LIMIT_S:
                faults.append(f"not all jobs have ended within {RUN_LIMIT_S:.0f} s.")
                break
            time.sleep(LOOK_S)
        return self._told(gpus, faults)

    @property
    def _now_s(self) -> float:
        return time.time() - self._begin_s

    def _submit_due(self) -> None:
        for arrival in self._arrivals[len(self._jobs) :]:
            if arrival.at_s > self._now_s:
                return
            self._submit(arrival)

    def _submit(self, arrival: Arrival) -> None:
        view = self._cluster.ask(lambda client: client.submit(arrival.document))
        self._jobs[view.id] = arrival
        self._tell(f"{self._now_s:3.0f} s: submitted {arrival.name} ({arrival.document['command']})")

    def _kill_if_due(self, look: top.Look) -> None:
        if self._kill_at_s is None or self._now_s < self._kill_at_s:
            return
        self._kill_at_s = None
        self._steps = {job.id: (job.step, job.step) for job in look.jobs if job.step and job.phase.holds_gpus}
        killed_s = self._now_s
        self._tell(f"{killed_s:3.0f} s: killed the service (-9). Jobs train on.")
        self._cluster.kill_service()
        time.sleep(OUTAGE_S)
        self._cluster.start_again()
        self._outage = (killed_s, self._now_s)
        self._tell(f"{self._now_s:3.0f} s: the service is back.")

    def _note_steps(self, look: top.Look) -> None:
        """What jobs have told first since the service is back."""
        for job in look.jobs:
            before, after = self._steps.get(job.id, (0, 0))
            if self._outage is not None and before and after == before and job.step:
                self._steps[job.id] = before, job.step

    def _told(self, gpus: int, faults: list[str]) -> PolicyRun:
        events = self._cluster.ask(_all_events)
        views = {job.id: job for job in self._cluster.ask(lambda client: client.jobs(all=True)).jobs}
        jobs = []
        for job, arrival in self._jobs.items():
            own = [*(event for event in events if event.job == job), *self._journal(job)]
            jobs.append(story(arrival, views[job], own, self._printed(job), self._begin_s))
        ends = [job.finished_at_s for job in jobs if job.finished_at_s is not None]
        told = tuple((event.at_s - self._begin_s, event.text) for event in events if _is_worth_telling(event))
        seconds = max(ends, default=self._now_s)
        return PolicyRun(self._policy, gpus, seconds, tuple(jobs), told, self._told_outage(), tuple(faults))

    def _told_outage(self) -> Outage | None:
        steps = {self._jobs[job].name: steps for job, steps in self._steps.items()}
        return None if self._outage is None else Outage(*self._outage, steps)

    def _journal(self, job: JobId) -> list[EventView]:
        folder = self._cluster.ask(lambda client: client.job(job)).checkpoint_dir
        return journal(Path(folder) / "journal.jsonl", job)

    def _printed(self, job: JobId) -> list[str]:
        """The last lines of each of its replicas."""

        def read(client: ServiceClient) -> list[str]:
            logs = client.logs(job).logs
            return [client.read_log(job, log.node, log.replica, -LAST_BYTES).text for log in logs]

        return self._cluster.ask(read)


def _all_events(client: ServiceClient) -> list[EventView]:
    found: list[EventView] = []
    after = 0
    while page := client.events(after, limit=PAGE):
        found.extend(page.events)
        if not page.events:
            return found
        after = page.next
    return found


def _is_worth_telling(event: EventView) -> bool:
    return event.kind not in ("RoundDue", "JobReported", "LearningRateChanged", "CheckpointSaved")


def _no_files(folder: str, names: list[str]) -> set[str]:
    """What cannot be copied: sockets and pipes."""
    return {name for name in names if not ((path := Path(folder) / name).is_dir() or path.is_file())}
