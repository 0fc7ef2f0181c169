"""The demo's jobs under one policy after the other, each on a fresh cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.cli import words
from pollux.cli.demo.story import REFERENCE, DemoResult, PolicyRun, story
from pollux.cli.demo.workload import FULL, QUICK, Workload, read_workload
from pollux.cli.examples import examples_folder
from pollux.cli.trial.cluster import TrialCluster
from pollux.cli.trial.folder import trial_folder
from pollux.cli.trial.running import Show, Tell, Trial, run_trial

if TYPE_CHECKING:
    from pollux.wire.api import EventView

POLICIES = ("pollux", REFERENCE)
NODES, SLOTS = 2, 2
INTERVAL_S, QUICK_INTERVAL_S = 5.0, 2.0
"""From round to round: jobs of half a minute cannot wait for one a minute."""
RUN_LIMIT_S = 600.0


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
    runs: list[PolicyRun] = []
    with trial_folder(keep) as base:
        for policy in policies:
            cluster = TrialCluster(
                base / policy,
                policy,
                nodes=NODES,
                slots=SLOTS,
                interval_s=QUICK_INTERVAL_S if is_quick else INTERVAL_S,
                use_gpus=use_gpus,
            )
            tell(f"Starting a cluster under {policy} …")
            with cluster:
                trial = run_trial(
                    cluster,
                    workload.arrivals,
                    limit_s=RUN_LIMIT_S,
                    kill_service_at_s=workload.kill_service_at_s if kills_service and not runs else None,
                    tell=tell,
                    show=show,
                )
            runs.append(_told(policy, workload, trial, cluster.left))
    return DemoResult(tuple(runs), os.cpu_count() or 1, use_gpus)


def _told(policy: str, workload: Workload, trial: Trial, killed: Sequence[int]) -> PolicyRun:
    """The story of a trial. `killed`: processes that its end did not end."""
    jobs = tuple(
        story(arrival, job.view, job.events, job.printed, trial.begin_s)
        for arrival, job in zip(workload.arrivals, trial.jobs, strict=False)  # not all, if it was cut short
    )
    ends = [job.finished_at_s for job in jobs if job.finished_at_s is not None]
    told = tuple((event.at_s - trial.begin_s, event.text) for event in trial.events if _is_worth_telling(event))
    faults = [] if trial.has_ended else [f"not all jobs have ended within {RUN_LIMIT_S:.0f} s."]
    if killed:
        faults.append(f"{words.count(len(killed), 'process')} had to be killed.")
    seconds = max(ends, default=RUN_LIMIT_S)
    return PolicyRun(policy, trial.gpus, seconds, jobs, told, trial.outage, tuple(faults))


def _is_worth_telling(event: EventView) -> bool:
    return event.kind not in ("RoundDue", "JobReported", "LearningRateChanged", "CheckpointSaved")
