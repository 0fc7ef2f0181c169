"""One trial: jobs submitted at their times, watched until all have ended, and all that they and the service tell.

Times are real seconds. What it means is for the caller to say: nothing is judged here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pollux.cli import emulated, top, words
from pollux.cli.trial.machine import cpu_time
from pollux.core import FrozenMap, JobId, Phase, checks
from pollux.errors import InvalidSpec
from pollux.wire.api import EventView, JobView

if TYPE_CHECKING:
    from pollux.cli.trial.cluster import TrialCluster
    from pollux.wire.service_client import ServiceClient

LOOK_S = 0.5
LEAST_LOOK_S = 0.005
OUTAGE_S = 3.0
"""How long a service that was killed stays away."""
PAGE = 1000
LAST_BYTES = 8192
"""Of a log: enough for its last lines."""

Tell = Callable[[str], None]
Show = Callable[[top.Look], None]


class Arriving(Protocol):
    """A job and when it comes."""

    @property
    def at_s(self) -> float:
        """Seconds after the first."""

    @property
    def document(self) -> Mapping[str, Any]:
        """As the service takes it."""


@dataclass(frozen=True, slots=True)
class Submission:
    """The plainest of these."""

    at_s: float
    document: Mapping[str, Any]

    def __post_init__(self) -> None:
        checks.finite(InvalidSpec, "at_s", self.at_s, 0)
        checks.text(InvalidSpec, "job.name", self.document.get("name"))


@dataclass(frozen=True, slots=True)
class TrialJob:
    """What is left of one job."""

    name: str
    """As it was submitted."""
    view: JobView
    """The last one."""
    events: tuple[EventView, ...]
    """Its own, in the service's order, and then what its journal holds; a notice may be among both."""
    printed: tuple[str, ...]
    """The ends of the logs of its replicas."""
    reported_at_s: tuple[float, ...] = ()
    """When it sent its reports, as far as looks at the cluster have shown it."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The service was killed and started again."""

    killed_at_s: float
    back_at_s: float
    steps: dict[str, tuple[int, int]]
    """Of each job that trained meanwhile: optimizer steps as last told before, and as first told after."""

    @property
    def sentence(self) -> str:
        """For people."""
        steps = ", ".join(f"{name} {before}→{after}" for name, (before, after) in self.steps.items())
        return (
            f"The service was killed (SIGKILL) at {self.killed_at_s:.0f} s and back at {self.back_at_s:.0f} s; jobs "
            f"trained on (steps: {steps or 'none ran'})."
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """All that a trial left."""

    begin_s: float
    """The first submission, in seconds since 1970."""
    gpus: int
    jobs: tuple[TrialJob, ...]
    """In the order of their submissions; not all of them if it was cut short."""
    events: tuple[EventView, ...]
    """Everything that the service told, from its start on."""
    has_ended: bool
    """False: it was cut short, by the limit or by a job that failed."""
    outage: Outage | None = None
    cpu_share: float | None = None
    """How busy all cores of the machine were; None where nobody can tell."""

    @property
    def failed(self) -> list[TrialJob]:
        return [job for job in self.jobs if job.view.phase.is_terminal and job.view.phase is not Phase.SUCCEEDED]


def run_trial(
    cluster: TrialCluster,
    submissions: Sequence[Arriving],
    *,
    limit_s: float,
    kill_service_at_s: float | None = None,
    stops_at_failure: bool = False,
    tell: Tell = lambda text: None,
    show: Show = lambda look: None,
) -> Trial:
    """Submits them (in order of arrival) to a cluster that runs, and returns when all have ended, or after the limit.

    `tell` is handed sentences, `show` the cluster twice a second. `kill_service_at_s`: with SIGKILL, once that many
    seconds have passed; it is started again after a moment.
    """
    try:
        return _Run(cluster, submissions, limit_s, kill_service_at_s, stops_at_failure, tell, show).run()
    except KeyboardInterrupt:
        tell("Ending the cluster; its jobs save first …")
        raise


class _Run:
    def __init__(
        self,
        cluster: TrialCluster,
        submissions: Sequence[Arriving],
        limit_s: float,
        kill_at_s: float | None,
        stops_at_failure: bool,
        tell: Tell,
        show: Show,
    ) -> None:
        self._cluster, self._submissions = cluster, submissions
        self._limit_s, self._kill_at_s, self._stops_at_failure = limit_s, kill_at_s, stops_at_failure
        self._tell, self._show = tell, show
        self._names: dict[JobId, str] = {}
        self._begin_s = 0.0
        self._reports: dict[JobId, set[float]] = {}
        self._outage: tuple[float, float] | None = None
        self._steps: dict[JobId, tuple[int, int]] = {}
        """Of the jobs that trained when the service was killed: steps told before, and first told after."""

    def run(self) -> Trial:
        recent = top.RecentJobs()
        look = self._cluster.ask(recent.look)
        gpus = look.cluster.gpus
        nodes = look.cluster.nodes
        what = emulated.kind(nodes) if emulated.emulated_nodes(nodes) else "slot"
        jobs = words.count(len(self._submissions), "job")
        self._tell(f"Ready: {words.count(gpus, what)} on {words.count(len(nodes), 'node')}. Submitting {jobs}.")
        before = cpu_time()
        self._begin_s = time.time()
        has_ended = False
        while not has_ended and self._now_s <= self._limit_s:
            self._submit_due()
            self._kill_if_due(look)
            look = self._cluster.ask(recent.look)
            self._note(look)
            self._show(look)
            if self._stops_at_failure and any(job.phase is Phase.FAILED for job in look.jobs):
                break
            has_ended = not self._left and all(job.phase.is_terminal for job in look.jobs)
            if not has_ended:
                self._wait()
        after = cpu_time()
        share = after.share_since(before) if before is not None and after is not None else None
        events = tuple(self._cluster.ask(_all_events))
        outage = self._told_outage()
        return Trial(self._begin_s, gpus, self._collected(events), events, has_ended, outage, share)

    @property
    def _now_s(self) -> float:
        return time.time() - self._begin_s

    @property
    def _left(self) -> Sequence[Arriving]:
        return self._submissions[len(self._names) :]

    def _wait(self) -> None:
        """Until the next look, or the next submission: those are to come when they are due."""
        next_s = self._left[0].at_s - self._now_s if self._left else LOOK_S
        time.sleep(min(max(next_s, LEAST_LOOK_S), LOOK_S))

    def _submit_due(self) -> None:
        for submission in self._left:
            if submission.at_s > self._now_s:
                return
            document = submission.document
            view = self._cluster.ask(lambda client, document=document: client.submit(document))  # type: ignore[misc]
            self._names[view.id] = str(document["name"])
            command = document["command"]
            shown = command if isinstance(command, str) else " ".join(command)
            self._tell(f"{self._now_s:3.0f} s: submitted {document['name']} ({shown})")

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

    def _note(self, look: top.Look) -> None:
        """When jobs reported, and what they have told first since the service is back."""
        for job in look.jobs:
            if job.reported_at_s is not None:
                self._reports.setdefault(job.id, set()).add(job.reported_at_s)
            before, after = self._steps.get(job.id, (0, 0))
            if self._outage is not None and before and after == before and job.step:
                self._steps[job.id] = before, job.step

    def _told_outage(self) -> Outage | None:
        steps = {self._names[job]: steps for job, steps in self._steps.items()}
        return None if self._outage is None else Outage(*self._outage, steps)

    def _collected(self, events: Sequence[EventView]) -> tuple[TrialJob, ...]:
        views = {job.id: job for job in self._cluster.ask(lambda client: client.jobs(all=True)).jobs}
        found = []
        for job, name in self._names.items():
            own = [*(event for event in events if event.job == job), *self._journal(job)]
            reports = tuple(sorted(self._reports.get(job, ())))
            found.append(TrialJob(name, views[job], tuple(own), tuple(self._printed(job)), reports))
        return tuple(found)

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


def journal(path: Path, job: JobId) -> list[EventView]:
    """What a job has written down itself; the service misses some of it while it is away."""
    if not path.is_file():
        return []
    documents = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [
        EventView(0, document["body"]["at_s"], document["type"], job, "", FrozenMap(document["body"]))
        for document in documents
    ]


def notices(events: Sequence[EventView]) -> list[EventView]:
    """What the job's agent said, in the order in which it happened; what was told twice counts once."""
    told = {(event.kind, notice_time_s(event)): event for event in events if "state" in event.detail}
    return sorted(told.values(), key=notice_time_s)


def notice_time_s(notice: EventView) -> float:
    """When it happened, not when the service heard of it."""
    at_s: Any = notice.detail["at_s"]
    return float(at_s)


def printed_result(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None
