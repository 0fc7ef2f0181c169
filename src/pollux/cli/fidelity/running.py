"""The two sides of a comparison: the workload live on an emulated cluster, and in the simulator as its twin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pollux.cli import words
from pollux.cli.emulated import emulated_document
from pollux.cli.fidelity.course import Course, Steps, changes_of, reported_pauses, rounds_of
from pollux.cli.fidelity.delays import Side, delays
from pollux.cli.fidelity.result import FidelityResult, Pair, Setting
from pollux.cli.trial.cluster import TrialCluster
from pollux.cli.trial.faults import faults_of, slip_of
from pollux.cli.trial.folder import trial_folder
from pollux.cli.trial.running import (
    Show,
    Submission,
    Tell,
    Trial,
    TrialJob,
    notice_time_s,
    notices,
    run_trial,
)
from pollux.core import FrozenMap, JobId
from pollux.errors import InvalidInput, Permanent
from pollux.wire.api import EventView

if TYPE_CHECKING:
    from pollux.scheduler import Record
    from pollux.simulator.metrics import Outcome
    from pollux.simulator.options import Options
    from pollux.simulator.scenario import Prepared, Scenario

REPORT_INTERVAL_S = 30.0
"""How often the agents of emulated jobs report."""
HYSTERESIS = 1.05
"""By how much another batch size must be better for them to take it."""
NEWCOMER_S, FIRST_REPORT_S = 0.5, 0.4
"""Real seconds, which compression does not shorten: replicas that join a job get ready; and a first report is late, by
the start of its processes and the steps that it waits for. Read off early runs on two cores; the same for all."""
SPARE = 2.0
SPARE_S = 120.0
"""A live run that takes so many times as long as the simulator says, and so many real seconds more, is given up."""
LAST_LINES = 8


def run_fidelity(
    workload: str,
    *,
    compress: float,
    policy: str = "pollux",
    nodes: int = 2,
    slots: int = 4,
    interval_s: float = 60.0,
    realloc_delay_s: float = 30.0,
    kill_service_at_s: float | None = None,
    keep: Path | None = None,
    tell: Tell = lambda text: None,
    show: Show = lambda look: None,
) -> FidelityResult:
    """A workload (a file or a built-in name) live and simulated under one policy. Ends all it has started, always.

    All seconds are emulated ones. Refuses (`InvalidInput`) what cannot run before anything is started; `Permanent`: a
    job failed, with the end of its log, or the run did not come to its end.
    """
    setting = Setting(workload, policy, compress, nodes, slots, interval_s, realloc_delay_s)
    twin = Twin.of(setting)
    expected_s = max(job.finished_at_s for job in twin.outcome.jobs)
    tell(
        f"{words.count(len(twin.ready.workload.jobs), 'job')} under {policy}. The simulator expects "
        f"{words.duration(expected_s)} of emulated time: {words.duration(expected_s / compress)} here."
    )
    with trial_folder(keep) as base:
        tell(f"Starting an emulated cluster ({nodes} × {slots} GPUs, {compress:g} × faster than real) …")
        cluster = TrialCluster(
            base / policy, policy, nodes=nodes, slots=slots, interval_s=interval_s, options=up_options(setting)
        )
        with cluster:
            trial = run_trial(
                cluster,
                submissions(twin.ready, compress),
                limit_s=SPARE * expected_s / compress + SPARE_S,
                kill_service_at_s=None if kill_service_at_s is None else kill_service_at_s / compress,
                stops_at_failure=True,
                tell=tell,
                show=show,
            )
    _check(trial, keep)
    result = compared(setting, trial, twin)
    left = (f"{words.count(len(cluster.left), 'process')} had to be killed.",) if cluster.left else ()
    return replace(result, faults=(*result.faults, *left))


def up_options(setting: Setting) -> list[str]:
    """What `pollux up` is told beyond what every trial tells it."""
    return ["--emulate", "--compress", f"{setting.compress:g}", "--realloc-delay", f"{setting.realloc_delay_s:g}"]


# The simulated side


@dataclass(frozen=True, slots=True)
class Twin:
    """The simulated run."""

    ready: Prepared
    outcome: Outcome
    records: tuple[Record, ...]

    @classmethod
    def of(cls, setting: Setting) -> Twin:
        from pollux.scheduler import MemoryLog
        from pollux.simulator.scenario import prepare, simulate

        scenario = scenario_of(setting)
        ready = prepare(scenario)
        if ready.policy.needs_oracle:
            problem = "needs to know the true future of every job, which nobody does live"
            raise InvalidInput("--policy", setting.policy, problem, "Use pollux, fifo, fifo-backfill or tiresias")
        log = MemoryLog()
        outcome = simulate(scenario, log, truths=ready.truths)
        return cls(ready, outcome, tuple(log.records()))

    def events(self) -> list[EventView]:
        """As the live service would tell them."""
        from pollux.core import encode

        return [
            EventView(
                number,
                record.time_s,
                type(record.event).__name__,
                str(getattr(record.event, "job", "")),
                "",
                FrozenMap(encode(record.event)),
            )
            for number, record in enumerate(self.records, 1)
        ]


def scenario_of(setting: Setting) -> Scenario:
    """The run that mirrors the live one."""
    from pollux.core import Cluster
    from pollux.simulator.cluster_file import ClusterFile
    from pollux.simulator.scenario import GPU_TYPE, Scenario

    cluster = ClusterFile(Cluster.uniform(setting.nodes, setting.slots, GPU_TYPE))
    return Scenario(setting.workload, setting.policy, cluster, options=twin_options(setting), histories=True)


def twin_options(setting: Setting) -> Options:
    """What the live cluster does by itself, said to the simulator; nothing of it comes from the run it is held
    against."""
    from pollux.policies import registry
    from pollux.scheduler import SchedulerOptions
    from pollux.service.options import ServiceOptions
    from pollux.simulator.options import AgentOptions, Options, WorldOptions

    known = registry.describe(setting.policy)["options"]
    policy = {"unmeasured_delay_s": setting.realloc_delay_s} if "unmeasured_delay_s" in known else {}
    return Options(
        interval_s=setting.interval_s,
        early_gap_s=ServiceOptions(Path()).early_gap_s,
        world=WorldOptions(realloc_delay_s=setting.realloc_delay_s, warm_up_s=NEWCOMER_S * setting.compress),
        agent=AgentOptions(
            report_interval_s=REPORT_INTERVAL_S,
            first_report_s=REPORT_INTERVAL_S + FIRST_REPORT_S * setting.compress,
            hysteresis=HYSTERESIS,
        ),
        scheduler=SchedulerOptions(in_place=True),
        policy=FrozenMap(policy),
    )


# The live side


def submissions(ready: Prepared, compress: float) -> list[Submission]:
    """The jobs of a workload as emulated ones, each as its owner would submit it under that policy, in real seconds."""
    from pollux.simulator.scenario import spec_of

    found = []
    for job in ready.workload.jobs:
        spec = spec_of(job, ready.truths[job.application], ready.policy, ready.scenario.options.agent)
        document = emulated_document(
            job.application,
            name=job.name,
            requested_gpus=job.num_gpus,
            batch_size=spec.requested_batch_size if spec.fixed_batch else None,
            fixed_batch=spec.fixed_batch,
        )
        found.append(Submission(job.submitted_at_s / compress, document))
    return found


def _check(trial: Trial, keep: Path | None) -> None:
    """`Permanent` if there is nothing to compare."""
    if failed := trial.failed:
        job = failed[0]
        rest = "" if len(failed) == 1 else f" ({len(failed) - 1} more failed, too)"
        ends = [text.rstrip().splitlines()[-LAST_LINES:] for text in job.printed if text.strip()]
        said = "\n".join(["Its log ends:", *max(ends, key=len)]) if ends else "It printed nothing."
        why = words.failed(job.view.exit_reason, job.view.exit_code)
        raise Permanent(f"Emulated job {job.name} is {job.view.phase}{rest}: {why}\n{said}")
    if not trial.has_ended:
        left = [job.name for job in trial.jobs if not job.view.phase.is_terminal]
        where = "Give --keep DIR to see its logs" if keep is None else f"See the logs in {keep}"
        raise Permanent(
            f"Given up: after {SPARE:g} times the time expected, {', '.join(left) or 'the last jobs'} had not "
            f"ended. {where}, or lower --compress."
        )


# Both


def compared(setting: Setting, trial: Trial, twin: Twin) -> FidelityResult:
    """What came of both."""
    clock = _Clock(trial.begin_s, setting.compress)
    live_events, simulated_events = clock.events(trial.events), twin.events()
    by_name = {job.name: job for job in trial.jobs}
    pairs = tuple(
        Pair(
            job.name,
            job.application,
            job.num_gpus,
            _live(by_name[job.name], live_events, clock, setting.realloc_delay_s),
            _simulated(job.name, twin, simulated_events, setting.realloc_delay_s),
        )
        for job in twin.ready.workload.jobs
    )
    live = Side(live_events, [pair.live for pair in pairs])
    simulated = Side(simulated_events, [pair.simulated for pair in pairs])
    last_s = max(pair.live.finished_at_s for pair in pairs)
    return FidelityResult(
        setting,
        pairs,
        delays(live, simulated),
        tuple(at_s for at_s in rounds_of(live_events) if 0 <= at_s <= last_s),
        tuple(rounds_of(simulated_events)),
        last_s / setting.compress,
        trial.cpu_share,
        trial.outage,
        tuple(faults_of(trial)),
        told_of(twin_options(setting)),
    )


def told_of(options: Options) -> FrozenMap[str, object]:
    """What is not the default of `pollux simulate`."""
    names = {
        "": ("early_gap_s",),
        "world": ("realloc_delay_s", "warm_up_s"),
        "agent": ("report_interval_s", "first_report_s", "hysteresis"),
        "scheduler": ("in_place",),
    }
    found = {
        f"{section}.{name}" if section else name: getattr(getattr(options, section) if section else options, name)
        for section, own in names.items()
        for name in own
    }
    return FrozenMap({**found, **{f"policy.{name}": value for name, value in options.policy.items()}})


@dataclass(frozen=True, slots=True)
class _Clock:
    """From seconds since 1970 to emulated seconds since the beginning of the workload."""

    begin_s: float
    compress: float

    def __call__(self, at_s: float) -> float:
        return (at_s - self.begin_s) * self.compress

    def events(self, events: Iterable[EventView]) -> list[EventView]:
        return [replace(event, at_s=self(event.at_s)) for event in events]


def _live(job: TrialJob, events: Sequence[EventView], clock: _Clock, delay_s: float) -> Course:
    """`delay_s`: what re-allocations are taken to have cost of which the job has told nothing before its end."""
    view, told = job.view, notices(job.events)
    assert view.finished_at_s is not None  # nothing is compared of runs without an end
    ends = [notice_time_s(notice) for notice in told if notice.kind == "TrainingFinished"]
    changes, stops = changes_of(view.id, events)
    return Course(
        clock(view.submitted_at_s),
        clock(view.finished_at_s),
        view.reallocations,
        changes,
        stops,
        _batch_sizes((clock(notice_time_s(notice)), _batch_size(notice)) for notice in told),
        tuple(pause_s * clock.compress for pause_s in reported_pauses(job.events)),
        tuple(map(clock, job.reported_at_s)),
        max(view.finished_at_s - ends[-1], 0.0) * clock.compress if ends else 0.0,
        slip_of(job) or 0.0,  # None is a fault
        delay_s,
    )


def _simulated(name: str, twin: Twin, events: Sequence[EventView], delay_s: float) -> Course:
    outcome = next(job for job in twin.outcome.jobs if job.name == name)
    history = (twin.outcome.histories or {})[name]
    changes, stops = changes_of(JobId(name), events)
    return Course(
        outcome.submitted_at_s,
        outcome.finished_at_s,
        outcome.num_reallocations,
        changes,
        stops,
        _batch_sizes(zip(history.time_s, history.batch_size, strict=True)),
        tuple(delay_s for change in changes if not change.is_start),
        tuple(event.at_s for event in events if event.kind == "JobReported" and event.job == name),
    )


def _batch_size(notice: EventView) -> int:
    state: Any = notice.detail["state"]
    return int(state["batch"]["batch_size"])


def _batch_sizes(steps: Iterable[tuple[float, int]]) -> Steps:
    """Without those that change nothing, and those of a job that holds no GPUs."""
    found: list[tuple[float, int]] = []
    for at_s, size in steps:
        if size and (not found or size != found[-1][1]):
            found.append((at_s, size))
    return tuple(found)
