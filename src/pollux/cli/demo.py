"""`pollux demo`: real training jobs on a cluster of this machine, first under Pollux and then under static FIFO."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pollux.cli import demo_report, output, report, top, words
from pollux.cli.demo_cluster import DemoCluster
from pollux.cli.demo_story import REFERENCE, DemoResult, Outage, PolicyRun, journal, story
from pollux.cli.demo_workload import FULL, QUICK, Arrival, Workload, examples_folder, read_workload
from pollux.core import JobId
from pollux.errors import InvalidInput, MissingDependency, UnknownName

if TYPE_CHECKING:
    from pollux.wire.api import EventView
    from pollux.wire.service_client import ServiceClient

POLICIES = ("pollux", REFERENCE)
NODES, SLOTS = 2, 2
INTERVAL_S, QUICK_INTERVAL_S = 5.0, 2.0
"""From round to round: jobs of half a minute cannot wait for one a minute."""
LOOK_S = 0.5
LINE_S = 10.0
"""From line to line where there is no terminal to show a table on."""
RUN_LIMIT_S = 600.0
OUTAGE_S = 3.0
"""How long a service that was killed stays away."""
PAGE = 1000
LAST_BYTES = 8192
"""Of a log: enough for its last lines."""

Tell = Callable[[str], None]
Show = Callable[[top.Look], None]


def demo(
    only: Annotated[str | None, typer.Option(metavar="POLICY", help="Run under this one only: pollux or fifo.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three small jobs instead of six.")] = False,
    kill_service: Annotated[
        bool, typer.Option("--kill-service", help="Kill the service (-9) halfway under pollux, and start it again.")
    ] = False,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Use the GPUs of this machine instead of four CPU slots.")
    ] = False,
    folder: Annotated[
        Path,
        typer.Option(
            "--report", metavar="DIR", parser=report.folder_named, help="Where report.html and its figures go."
        ),
    ] = Path("out/demo"),
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep logs, event logs and checkpoints of the clusters here.")
    ] = None,
    json_file: output.JsonFileOption = None,
) -> None:
    """See Pollux at work: six real training jobs share four CPU slots of this machine, for about five minutes.

    They run under Pollux and then, live as well, under FIFO with the GPUs that their owners asked for. It uses a
    cluster of its own and leaves nothing running. Exit code 1: a job missed its target or started from scratch.
    """
    if only is not None and only not in POLICIES:
        raise UnknownName("--only", only, POLICIES)
    if kill_service and only == REFERENCE:
        raise InvalidInput("--kill-service", only, "is for the run under pollux", "Leave out --only")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InvalidInput("--keep", str(keep), "is there already", "Name a new or an empty folder")
    report.check(folder)
    output.check_writable(json_file, "--json")
    if find_spec("torch") is None:
        raise MissingDependency("torch", "The demo", "torch")

    with _ended_by_sigterm(), _screen() as (tell, show):
        result = run_demo(
            POLICIES if only is None else [only],
            is_quick=quick,
            kills_service=kill_service,
            use_gpus=gpus,
            keep=keep,
            tell=tell,
            show=show,
        )
    demo_report.print_summary(result)
    output.note(f"The report is in {demo_report.write(result, folder)}")
    if json_file is not None:
        output.write_json(result.document(), json_file)
    if result.faults:
        for fault in result.faults:
            output.error(fault)
        raise typer.Exit(1)


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


@contextmanager
def _screen() -> Iterator[tuple[Tell, Show]]:
    """Sentences, and below them the table of `pollux top`; without a terminal, a line now and then."""
    console = output.console
    if not console.is_terminal:
        yield output.note, _Lines(output.note).show
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield (
            lambda text: console.print(text, soft_wrap=True),
            lambda look: live.update(_table(look, console), refresh=True),
        )


def _table(look: top.Look, console: Console) -> RenderableType:
    shown = top.screen(look, console.width)
    assert isinstance(shown, Group)
    return Group(Text(), *shown.renderables[:-1], Text("Ctrl-C ends the demo and its cluster", style="dim"))


class _Lines:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told_s = 0.0

    def show(self, look: top.Look) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < LINE_S:
            return
        self._told_s = now_s
        jobs = [
            f"{job.name} {words.gpus(job)}" + ("" if job.batch_size is None else f" (batch {job.batch_size})")
            for job in look.jobs
            if job.phase.holds_gpus
        ]
        waiting = sum(not job.phase.holds_gpus and not job.phase.is_terminal for job in look.jobs)
        rest = [f"{waiting} waiting"] if waiting else []
        self._tell(f"       {look.cluster.policy}: {' · '.join([*jobs, *rest]) or 'no jobs'}")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A polite kill ends the cluster as Ctrl-C does."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _no_files(folder: str, names: list[str]) -> set[str]:
    """What cannot be copied: sockets and pipes."""
    return {name for name in names if not ((path := Path(folder) / name).is_dir() or path.is_file())}
