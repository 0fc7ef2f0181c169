"""A burst of jobs on as many nodes and slots as one machine carries: an emulated cluster with light replicas.

Everything but the GPUs is real: a daemon for each node, a process for each slot in use, and all jobs through REST.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from pollux.cli import top
from pollux.cli.emulated import emulated_document
from pollux.cli.trial.cluster import TrialCluster
from pollux.cli.trial.faults import faults_of, job_faults, slip_of
from pollux.cli.trial.folder import trial_folder
from pollux.cli.trial.running import Submission, Tell, Trial, run_trial
from pollux.core import Phase

NODES, SLOTS, JOBS = 8, 4, 40
COMPRESS = 20.0
SHARES = {"cifar10": 0.07, "ncf": 0.22, "deepspeech2": 0.0135, "bert": 0.023, "yolov3": 0.0078, "imagenet": 0.00055}
"""Of each application what takes about five minutes on one GPU: a quarter of a minute here."""
TRAINING = (Phase.RUNNING, Phase.RESIZING)
INTERVAL_S = 60.0
LIMIT_S = 600.0
LINE_S = 10.0
"""Real seconds from one line of progress to the next."""


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """What came of it. Seconds are real ones."""

    nodes: int
    slots: int
    """Of all nodes."""
    compress: float
    jobs: int
    succeeded: int
    """Jobs that did, with nothing lost on their way."""
    most_slots: int
    """In use at once, as often as it was looked."""
    most_training: int
    """Of these, held by jobs that trained."""
    most_jobs: int
    """That held slots at once."""
    rounds: int
    reallocations: int
    seconds: float
    """From the first submission to the last end."""
    pacing_slip: float
    """Of the job whose steps were latest."""
    cpu_share: float | None
    """Of all cores; None where nobody can tell."""
    faults: tuple[str, ...] = ()
    """Jobs that did not succeed, what was lost on the way, and processes that did not end, a sentence each."""


def run_scale(
    *,
    nodes: int = NODES,
    slots: int = SLOTS,
    jobs: int = JOBS,
    compress: float = COMPRESS,
    length: float = 1.0,
    tell: Tell = lambda line: None,
) -> ScaleResult:
    """Submit all jobs at once and wait for their ends. Nothing of it is left running.

    `length`: how long jobs are; 1 is five emulated minutes on one GPU.
    """
    seen = Seen(tell)
    with trial_folder() as base:
        cluster = TrialCluster(
            base / "scale",
            "pollux",
            nodes=nodes,
            slots=slots,
            interval_s=INTERVAL_S,
            options=("--emulate", "--compress", f"{compress:g}"),
        )
        tell(f"starting {nodes} nodes × {slots} slots")
        with cluster:
            burst = [Submission(0.0, document) for document in documents(jobs, length)]
            trial = run_trial(cluster, burst, limit_s=LIMIT_S, show=seen.look)
    return told(trial, seen, nodes=nodes, jobs=jobs, compress=compress, killed=len(cluster.left))


def documents(count: int, length: float = 1.0) -> Iterator[dict[str, Any]]:
    """All applications in turns."""
    for number, (application, share) in enumerate(islice(cycle(SHARES.items()), count)):
        yield emulated_document(f"{application}:{share * length:.4g}", name=f"{application}-{number}")


class Seen:
    """The most that was in use at once, as often as somebody looks; a line now and then."""

    def __init__(self, tell: Tell) -> None:
        self.slots = self.training = self.jobs = 0
        self._tell = tell
        self._told_s = 0.0

    def look(self, look: top.Look) -> None:
        cluster = look.cluster
        slots = cluster.gpus - cluster.free_gpus
        holding = [job for job in look.jobs if job.phase.holds_gpus]
        training = sum(job.gpus for job in holding if job.phase in TRAINING)
        self.slots, self.training = max(self.slots, slots), max(self.training, training)
        self.jobs = max(self.jobs, len(holding))
        if cluster.time_s - self._told_s >= LINE_S:
            self._told_s = cluster.time_s
            ended = sum(count for phase, count in cluster.num_jobs.items() if Phase(phase).is_terminal)
            waiting = cluster.num_jobs.get(Phase.PENDING, 0)
            self._tell(
                f"{cluster.policy}: {len(holding)} jobs on {slots} of {cluster.gpus} slots, {training} of which train; "
                f"{waiting} wait, {ended} have ended"
            )


def told(trial: Trial, seen: Seen, *, nodes: int, jobs: int, compress: float, killed: int) -> ScaleResult:
    """What a trial and those who watched it tell. `killed`: processes that its end did not end."""
    slips = [slip for job in trial.jobs if (slip := slip_of(job)) is not None]
    ends = [job.view.finished_at_s for job in trial.jobs if job.view.finished_at_s is not None]
    unwell = [job for job in trial.jobs if job.view.phase is not Phase.SUCCEEDED]
    faults = [f"{job.name} is {job.view.phase}: {job.view.exit_reason}" for job in unwell]
    faults += faults_of(trial)
    if len(trial.jobs) < jobs:
        faults.append(f"{jobs - len(trial.jobs)} of {jobs} jobs could not be submitted in time.")
    if killed:
        faults.append(f"Processes that had to be killed: {killed}.")
    return ScaleResult(
        nodes=nodes,
        slots=trial.gpus,
        compress=compress,
        jobs=jobs,
        succeeded=sum(job not in unwell and not job_faults(job) for job in trial.jobs),
        most_slots=seen.slots,
        most_training=seen.training,
        most_jobs=seen.jobs,
        rounds=sum(event.kind == "RoundDue" for event in trial.events),
        reallocations=sum(job.view.reallocations for job in trial.jobs),
        seconds=max(ends, default=trial.begin_s) - trial.begin_s,
        pacing_slip=max(slips, default=0.0),
        cpu_share=trial.cpu_share,
        faults=tuple(faults),
    )
