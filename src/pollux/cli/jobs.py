"""`pollux ps`, `describe`, `pause`, `resume`, `cancel`, `scale` and `wait`: jobs of a cluster that runs."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import typer
from rich.text import Text

from pollux.cli import emulated, output, words
from pollux.cli.columns import Column, fitted, width
from pollux.cli.finding import DirOption, JobArgument, JobsArgument, Link, find
from pollux.core import Phase
from pollux.errors import InvalidInput, PolluxError
from pollux.wire.answers import to_plain
from pollux.wire.api import JobDetail, JobView, NodeView

CANCELLED = 3
TIMED_OUT = 124  # as of timeout(1)
MOST_EXIT_CODE = 125  # what shells leave to programs
LOOK_S = 0.5
WHY_WIDTH = 24
"""The least that is left of a reason before other columns go."""
NUM_EVENTS = 10
"""How many of its last events `describe` shows."""
SMALL_NEWS = frozenset({"JobReported", "LearningRateChanged"})
"""Too many, and what they say is shown above them."""


def ps(
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Also those that have ended.")] = False,
    team: Annotated[str, typer.Option(metavar="TEAM", help="Only jobs of this team.", show_default="all")] = "",
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """List jobs: those that have not ended."""
    with find(path) as client:
        jobs = client.jobs(all=show_all, team=team or None).jobs
        cluster = client.cluster()
    for warning in cluster.warnings:
        output.note(warning)
    if as_json:
        output.print_json(to_plain(jobs))
        return
    if not jobs:
        output.note("No jobs." if show_all else "No jobs that have not ended; pollux ps -a shows all.")
        return
    columns, rows = fitted(_columns(jobs, time.time()), jobs, width() - 1, 3)
    output.table([column.title for column in columns], rows)
    emulated.tell(cluster.nodes)


def _columns(jobs: Iterable[JobView], now_s: float) -> list[Column]:
    names = [Column("name", lambda job: Text(words.name(job) or "–"), 4, "left")] if any(map(words.name, jobs)) else []
    return [
        Column("job", lambda job: Text(job.id), justify="left"),
        *names,
        Column("phase", words.phase, justify="left"),
        Column("GPUs", lambda job: Text(words.gpus(job))),
        Column("on", lambda job: Text(words.placed(job.allocation) or "–"), 5, "left"),
        Column("team", lambda job: Text(job.team or "–"), 6, "left"),
        Column("done", lambda job: Text(words.share(job.progress)), 1),
        Column("ETA", lambda job: Text(words.duration(job.eta_s)), 2),
        Column("age", lambda job: Text(words.duration(words.age(job, now_s))), 3),
        Column("why", lambda job: Text(words.why(job) or "–"), justify="left", fewest=WHY_WIDTH),
    ]


def describe(job: JobArgument, path: DirOption = None, as_json: output.JsonOption = False) -> None:
    """Show all that is known of one job, and what happened to it last."""
    with find(path) as client:
        detail = client.job(job)
        found = client.events(job=detail.job.id, last=1000).events
        nodes = () if as_json else client.cluster().nodes
    recent = tuple(event for event in found if event.kind not in SMALL_NEWS)[-NUM_EVENTS:]
    if as_json:
        output.print_json({**to_plain(detail), "events": to_plain(recent)})
        return
    for name, value in _facts(detail, nodes, time.time()):
        output.console.print(Text(f"{name:<15}", style="bold") + Text(value), soft_wrap=True)
    if recent:
        output.console.print(Text("events", style="bold"))
    for event in recent:
        output.console.print(f"  {words.clock(event.at_s)}  {event.text}", soft_wrap=True)


def _facts(detail: JobDetail, nodes: Sequence[NodeView], now_s: float) -> Iterable[tuple[str, str]]:
    job = detail.job
    yield "job", words.title(job)
    if remark := emulated.remark(nodes):
        yield "runs on", remark
    if seconds := emulated.seconds(nodes):
        yield "seconds", seconds
    why = job.exit_reason or job.waits_for
    code = f" (exit code {job.exit_code})" if job.exit_code else ""
    yield "phase", f"{job.phase}{code}{': ' if why else ''}{why}"
    if job.phase.holds_gpus:
        to = "" if job.next_allocation is None else f", becomes {words.placed(job.next_allocation)}"
        yield "GPUs", f"{job.gpus} ({words.placed(job.allocation)}){to}"
    yield "may have", f"{words.count(job.min_gpus, 'GPU')}, no more and no fewer" if job.is_rigid else bounds(job)
    if detail.gpu_type:
        yield "GPU type", detail.gpu_type
    if job.progress is not None or job.step is not None:
        yield "progress", f"{words.share(job.progress)}, step {job.step or 0}, ETA {words.duration(job.eta_s)}"
    if job.batch_size is not None:
        m, s = job.per_gpu_batch_size, job.accumulation_steps
        passes = "" if not s else f" × {s + 1} passes"
        fixed = ", fixed" if detail.has_fixed_batch else ""
        yield "batch size", f"{job.batch_size} ({m} a GPU{passes}{fixed}), learning rate × {_lr(job)}"
    if job.goodput is not None or job.throughput is not None:
        speed = f"{words.figure(job.throughput)} examples/s × efficiency {words.share(job.efficiency)}"
        yield "goodput", f"{words.figure(job.goodput)} useful examples/s = {speed}"
    if job.noise_scale is not None:
        yield "noise scale", f"{words.figure(job.noise_scale)} examples"
    if job.loss is not None:
        yield "loss", words.figure(job.loss, 4)
    if detail.fit_error is not None:
        yield "model", f"throughput is off by {words.share(detail.fit_error)} on average"
    if detail.kind is not None:
        yield "kind", f"{detail.kind} (in pollux registry list)"
    yield "re-allocations", f"{job.reallocations}{_delay(detail)}; generation {job.generation}"
    yield "failures", f"{job.failures}; {job.retries} are answered by another try"
    yield "submitted", f"{words.clock(job.submitted_at_s)}, {words.duration(now_s - job.submitted_at_s)} ago"
    if job.started_at_s is not None:
        yield "first started", f"{words.clock(job.started_at_s)}, {words.duration(job.attained_gpu_s)} of GPU time"
    if job.finished_at_s is not None:
        took = words.duration(job.finished_at_s - job.submitted_at_s)
        yield "ended", f"{words.clock(job.finished_at_s)}, {took} after submission"
    if job.deadline_at_s is not None:
        yield "deadline", words.clock(job.deadline_at_s)
    kept = "" if detail.is_preemptible else ", keeps its GPUs once it runs"
    yield "owner", f"team {job.team or '–'}, priority {job.priority}{kept}"
    yield "command", shlex.join(detail.command)
    yield "folder", detail.working_dir
    yield "checkpoints", detail.checkpoint_dir or "–"
    if detail.env_names:
        yield "environment", f"{', '.join(detail.env_names)} (values are not shown)"


def bounds(job: JobView) -> str:
    if job.max_gpus is None:
        return f"{words.count(job.min_gpus, 'GPU')} or more"
    return f"{job.min_gpus} to {words.count(job.max_gpus, 'GPU')}"


def _lr(job: JobView) -> str:
    return words.figure(job.learning_rate_factor)


def _delay(detail: JobDetail) -> str:
    return "" if detail.realloc_delay_s is None else f", {detail.realloc_delay_s:.1f} s each"


def pause(jobs: JobsArgument, path: DirOption = None, as_json: output.JsonOption = False) -> None:
    """Have jobs save and leave their GPUs, until they are resumed."""
    with find(path) as client:
        _for_each(jobs, client.pause, as_json)


def resume(jobs: JobsArgument, path: DirOption = None, as_json: output.JsonOption = False) -> None:
    """Let paused jobs wait for GPUs again; they go on where they were."""
    with find(path) as client:
        _for_each(jobs, client.resume, as_json)


def cancel(jobs: JobsArgument, path: DirOption = None, as_json: output.JsonOption = False) -> None:
    """End jobs for good, and at once: they are killed (SIGKILL) and do not save. Checkpoints and logs stay.

    To have a job save first, pause it: it is asked to leave (SIGTERM), and may be cancelled afterwards.
    """
    with find(path) as client:
        _for_each(jobs, client.cancel, as_json)


def scale(
    job: JobArgument,
    min_gpus: Annotated[
        int | None, typer.Option("--min", min=1, help="The fewest GPUs it may run on.", show_default="as before")
    ] = None,
    max_gpus: Annotated[
        int | None, typer.Option("--max", min=0, help="The most; 0: no limit.", show_default="as before")
    ] = None,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Change how few and how many GPUs a job may have. It trains on; the next round heeds it."""
    if min_gpus is None and max_gpus is None:
        raise InvalidInput("--min", None, "neither --min nor --max is given", "Give one or both")
    with find(path) as client:
        before = client.job(job).job
        fewest = before.min_gpus if min_gpus is None else min_gpus
        most = before.max_gpus if max_gpus is None else max_gpus or None
        if most is not None and fewest > most:
            _refuse(fewest, most, min_gpus, max_gpus)
        after = client.scale(before.id, fewest, most)
    if as_json:
        output.print_json(to_plain(after))
    else:
        typer.echo(f"{words.title(after)}: {bounds(after)}")


def _refuse(fewest: int, most: int, min_gpus: int | None, max_gpus: int | None) -> None:
    if min_gpus is None:
        raise InvalidInput("--max", most, f"less than the {fewest} that it needs at least", "Give a smaller --min, too")
    if max_gpus is None:
        raise InvalidInput("--min", fewest, f"more than the {most} that it may have at most", "Give --max, too")
    raise InvalidInput("--min", fewest, f"more than --max {most}", f"Give --max {fewest}, or a smaller --min")


def wait(
    jobs: JobsArgument,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", min=0.0, help="Give up after so many seconds.", show_default="never")
    ] = None,
    path: DirOption = None,
    as_json: output.JsonOption = False,
) -> None:
    """Wait until jobs have ended. Exit code: 0 if all succeeded; else that of the first that did not.

    1, or the job's own exit code, if it failed; 3 if it was cancelled; 124 if the time is up.
    """
    until_s = math.inf if timeout is None else time.monotonic() + timeout
    ends: list[JobView] = []
    with Link(path) as link:
        ids = [link.view(name).id for name in jobs]
        for job_id in dict.fromkeys(ids):
            view = link.view(job_id)
            while not view.phase.is_terminal and time.monotonic() < until_s:
                time.sleep(LOOK_S)
                view = link.view(job_id)
            ends.append(view)
            if not as_json:
                tell_end(view)
    if as_json:
        output.print_json(to_plain(ends))
    raise typer.Exit(next(filter(None, map(exit_code, ends)), 0))


def exit_code(job: JobView) -> int:
    """What `wait` and `run` end with."""
    match job.phase:
        case Phase.SUCCEEDED:
            return 0
        case Phase.CANCELLED:
            return CANCELLED
        case Phase.FAILED:
            return job.exit_code if job.exit_code is not None and 0 < job.exit_code <= MOST_EXIT_CODE else 1
    return TIMED_OUT


def tell_end(job: JobView) -> None:
    if not job.phase.is_terminal:
        output.note(f"{words.title(job)} is still {job.phase}.")
        return
    why = f": {words.why(job)}" if job.exit_reason and job.phase is not Phase.SUCCEEDED else ""
    took = words.duration((job.finished_at_s or job.submitted_at_s) - job.submitted_at_s)
    output.note(f"{words.title(job)} {job.phase} after {took}{why}")


def _for_each(jobs: list[str], request: Callable[[str], JobView], as_json: bool) -> None:
    """All of them, whatever becomes of one; the first failure is what the command ends with."""
    done: list[JobView] = []
    failures: list[PolluxError] = []
    for name in dict.fromkeys(jobs):
        try:
            done.append(request(name))
        except PolluxError as failure:
            failures.append(failure)
            if len(jobs) > 1:
                output.error(f"{name}: {failure}")
            continue
        if not as_json:
            typer.echo(f"{words.title(done[-1])}: {done[-1].phase}")
    if as_json:
        output.print_json(to_plain(done))
    if failures and len(jobs) > 1:
        raise typer.Exit(1)
    if failures:
        raise failures[0]
