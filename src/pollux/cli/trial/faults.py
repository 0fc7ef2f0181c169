"""What must not happen to emulated jobs, told from what a trial left: the figures of one with faults mean nothing.

A service that was killed and came back is no fault: its jobs train on.
"""

from __future__ import annotations

from pollux.cli import words
from pollux.cli.trial.running import Trial, TrialJob, notices, printed_result
from pollux.core import Phase


def faults_of(trial: Trial) -> list[str]:
    """A sentence each; empty: all went well. Jobs that did not succeed are for the caller to tell."""
    lost = [event.detail["node"] for event in trial.events if event.kind == "NodeLost"]
    return [*(f"Node {node} was lost." for node in lost), *(fault for job in trial.jobs for fault in job_faults(job))]


def job_faults(job: TrialJob) -> list[str]:
    """Of one job."""
    found = []
    # Said again when the service comes back, hence a set.
    losses = {
        (event.detail["generation"], event.detail["membership"]) for event in job.events if event.kind == "ReplicaLost"
    }
    if losses:
        found.append(f"{job.name} has lost replicas {_times(len(losses))}, and trained on with the others.")
    starts = sum(notice.kind == "TrainingStarted" for notice in notices(job.events))
    if starts > 1:
        found.append(f"{job.name} has started from scratch {_times(starts)}.")
    if job.view.phase is Phase.SUCCEEDED:
        if job.view.failures:
            found.append(f"{job.name} has failed {_times(job.view.failures)} on its way.")
        if slip_of(job) is None:
            found.append(f"{job.name} has not printed how late its steps were (pacing_slip).")
    return found


def slip_of(job: TrialJob) -> float | None:
    """The pacing slip that it printed at its end; None: it printed none."""
    results = [result for text in job.printed if (result := printed_result(text)) is not None]
    return max((float(result["pacing_slip"]) for result in results if "pacing_slip" in result), default=None)


def _times(count: int) -> str:
    return words.count(count, "time")
