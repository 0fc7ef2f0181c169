"""`pollux workload`: workloads made from the built-in applications, by chance or after a cluster's log.

`pollux policies`: what there is to choose.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import output

if TYPE_CHECKING:
    from pollux.simulator.importers import JobList, Replay, ReplayOptions

FLAGS: Mapping[str, str] = {
    "num_jobs": "--jobs",
    "window_start_h": "--start-hour",
    "window_h": "--hours",
    "duration_s": "--hours",
    "min_duration_s": "--min-duration",
    "max_gpu_hours": "--max-gpu-hours",
    "max_gpus": "--max-gpus",
    "configuration": "--configuration",
    "arrivals": "--arrivals",
    "mix": "--mix",
    "seed": "--seed",
    "consecutive": "--consecutive",
    "starts_at": "--from",
    "cluster": "--cluster",
    "format": "--format",
}
"""What the fields of options are called on the command line."""

_FIELD = re.compile(rf"\b({'|'.join(field for field in FLAGS if '_' in field)}|consecutive)\b")

app = typer.Typer(no_args_is_help=True, help="Make and list workloads for `pollux simulate`.")


@app.command("generate")
def generate(
    file: Annotated[Path, typer.Argument(help="Where to write the CSV; - prints it.", allow_dash=True)],
    jobs: Annotated[int, typer.Option(help="How many jobs.")] = 160,
    hours: Annotated[float, typer.Option(help="Within how many hours they are submitted.")] = 8.0,
    arrivals: Annotated[str, typer.Option(help="poisson, uniform or daily (busy in the middle).")] = "poisson",
    configuration: Annotated[
        str, typer.Option(help="tuned (sizes that scale well) or realistic (as owners choose them).")
    ] = "tuned",
    mix: Annotated[
        list[str] | None,
        typer.Option(metavar="APPLICATION=SHARE", help="Share of an application; the paper's mix if none is given."),
    ] = None,
    max_gpus: Annotated[int | None, typer.Option(help="No job asks for more.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
) -> None:
    """Make a workload from the built-in applications."""
    from pollux.core import FrozenMap
    from pollux.errors import InvalidSpec
    from pollux.simulator.generator import PAPER_MIX, GeneratorOptions
    from pollux.simulator.generator import generate as make
    from pollux.simulator.settings import parse
    from pollux.simulator.workload import to_csv

    shares: dict[str, float] = {}
    for name, share in parse(mix or (), "--mix", "cifar10=0.5").items():
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise InvalidSpec("--mix", f"{name}={share}", "is not a share", "Write for example cifar10=0.5")
        shares[name] = float(share)
    _check_positive({"--jobs": jobs, "--hours": hours, "--max-gpus": max_gpus})
    with _flags_named():
        options = GeneratorOptions(
            num_jobs=jobs,
            duration_s=hours * 3600,
            seed=seed,
            arrivals=arrivals,
            configuration=configuration,
            mix=FrozenMap(shares) if shares else PAPER_MIX,
            max_gpus=max_gpus,
        )
        workload = make(options)
    output.write_text([to_csv(workload)], file, "FILE")
    if file != output.STDOUT:
        output.note(_next_step(jobs, file))


def _check_positive(flags: Mapping[str, float | None]) -> None:
    from pollux.errors import InvalidSpec

    for flag, value in flags.items():
        if value is not None and not value > 0:
            raise InvalidSpec(flag, value, "must be above 0", "Give a positive number")


@contextlib.contextmanager
def _flags_named() -> Iterator[None]:
    """Errors speak of what was typed, not of the fields that it went to."""
    from pollux.errors import InvalidInput, InvalidSpec

    try:
        yield
    except InvalidInput as error:
        if error.field not in FLAGS:
            raise
        problem, fix = (_FIELD.sub(lambda found: FLAGS[found[0]], text) for text in (error.problem, error.fix))
        raise InvalidSpec(FLAGS[error.field], error.value, problem, fix) from error


def _next_step(num_jobs: int, file: Path) -> str:
    named = file if file.parent.parts else f"./{file}"  # not the built-in workload of that name
    return f"{'1 job is' if num_jobs == 1 else f'{num_jobs} jobs are'} in {file}; try: pollux simulate {named}"


@app.command("import")
def import_log(
    log: Annotated[Path, typer.Argument(help="The cluster's job list, unpacked.")],
    file: Annotated[Path, typer.Argument(help="Where to write the CSV; - prints it.", allow_dash=True)],
    format_name: Annotated[
        str | None,
        typer.Option("--format", help="philly, philly-csv, helios or pai; told by the first line if not given."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="How many jobs to draw; 160 if not given, all with --consecutive.")
    ] = None,
    start_hour: Annotated[
        float | None, typer.Option(help="First hour of the day to draw from; 2 if not given.")
    ] = None,
    hours: Annotated[float, typer.Option(help="Length of the window to draw from, in hours.")] = 8.0,
    consecutive: Annotated[
        bool,
        typer.Option("--consecutive", help="Keep the dates: the busiest --hours of the log, or those --from a time."),
    ] = False,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="TIME", help="With --consecutive: where to start, such as '2017-10-09 08:00'."),
    ] = None,
    configuration: Annotated[
        str, typer.Option(help="tuned (sizes that scale well) or realistic (the GPUs of the log).")
    ] = "tuned",
    max_gpus: Annotated[int | None, typer.Option(help="No job asks for more.")] = None,
    min_duration: Annotated[float, typer.Option(help="Leave out jobs that ran for fewer seconds.")] = 60.0,
    max_gpu_hours: Annotated[float, typer.Option(help="Leave out jobs of so many GPU-hours or more.")] = 1000.0,
    cluster: Annotated[
        str | None, typer.Option(help="Only jobs of this cluster or virtual cluster of the log.")
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Pass damaged jobs over instead of refusing the log.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
) -> None:
    """Make a workload from a cluster's log: its arrivals and sizes, with the built-in applications in the jobs' place.

    Jobs of many days are overlaid on one, as the paper does it, or kept as they came with --consecutive.
    """
    from pollux.errors import InvalidSpec
    from pollux.simulator.importers import ReplayOptions, read_log, replay
    from pollux.simulator.workload import to_csv

    _check_not_the_log(log, file)
    _check_positive({"--jobs": jobs, "--hours": hours, "--max-gpus": max_gpus, "--max-gpu-hours": max_gpu_hours})
    if consecutive and start_hour is not None:
        problem = "is an hour of any day, but --consecutive keeps the dates"
        raise InvalidSpec("--start-hour", start_hour, problem, "Give --from with a date, or leave one of them out")
    if start is not None and not consecutive:
        raise InvalidSpec("--from", start, "needs the dates", "Add --consecutive, or give --start-hour instead")
    with _flags_named():
        options = ReplayOptions(
            num_jobs=jobs,
            window_start_h=2.0 if start_hour is None else start_hour,
            window_h=hours,
            min_duration_s=min_duration,
            max_gpu_hours=max_gpu_hours,
            configuration=configuration,
            max_gpus=max_gpus,
            seed=seed,
            consecutive=consecutive,
            starts_at=None if start is None else _time("--from", start),
            cluster=cluster,
        )
        job_list = read_log(log, format_name, skip_damaged=skip_damaged)
        found = replay(job_list, options)
    output.write_text([to_csv(found.workload)], file, "FILE")
    if file != output.STDOUT:
        _show_import(job_list, found, options)
        output.note(_next_step(len(found.workload.jobs), file))


def _check_not_the_log(log: Path, file: Path) -> None:
    """Also through links: the log may be the only copy there is."""
    from pollux.errors import InvalidSpec

    try:
        is_log = file != output.STDOUT and os.path.samefile(log, file)
    except (OSError, ValueError):  # one of them is not there, or cannot be
        return
    if is_log:
        raise InvalidSpec("FILE", str(file), "is the log itself, which would be lost", "Name another file to write to")


def _time(flag: str, text: str) -> float:
    from pollux.errors import InvalidSpec
    from pollux.simulator.importers.recorded import parse_time

    if (time := parse_time(text)) is None:
        raise InvalidSpec(flag, text, "is not a time", "Write it as '2017-10-09 08:00'")
    return time


def _show_import(log: JobList, found: Replay, options: ReplayOptions) -> None:
    """What became of the log's jobs, and what was drawn of each size."""
    from pollux.simulator.importers import CATEGORIES
    from pollux.simulator.importers.replay import clock

    if found.starts_at is None:
        window = f"submitted in hours {options.window_hours} of any day"
    else:
        window = f"submitted within {options.window_h:g} h from {clock(found.starts_at)}"
    steps = [
        ("in the log", log.num_logged),
        *((f"– passed over: {reason}", count) for reason, count in log.passed_over.items()),
        *([(f"– not of cluster {options.cluster}", found.num_elsewhere)] if options.cluster is not None else []),
        (f"– shorter than {options.min_duration_s:g} s", found.num_too_short),
        (f"– of {options.max_gpu_hours:g} GPU-hours or more", found.num_too_large),
        (window, found.num_in_window),
        ("in the workload", len(found.workload.jobs)),
    ]
    output.table(("jobs", "number"), steps)
    counts = Counter(job.application for job in found.workload.jobs)
    above = [0.0, *(category.below_gpu_hours for category in CATEGORIES)]
    sizes = [
        (category.name, low, min(category.below_gpu_hours, options.max_gpu_hours), name, counts[name])
        for low, category in zip(above, CATEGORIES, strict=False)
        for name in category.applications
        if low < options.max_gpu_hours
    ]
    output.table(("size", "GPU-hours from", "to below", "application", "drawn"), sizes)


@app.command("list")
def list_built_in(as_json: output.JsonOption = False) -> None:
    """List the built-in workloads."""
    from pollux.simulator.generator import BUILT_IN

    if as_json:
        output.print_json(
            {
                name: {
                    "title": found.title,
                    "jobs": found.num_jobs,
                    "nodes": found.num_nodes,
                    "gpus_per_node": found.gpus_per_node,
                }
                for name, found in BUILT_IN.items()
            }
        )
        return
    rows = [
        (name, found.num_jobs, f"{found.num_nodes} × {found.gpus_per_node} GPUs", found.title)
        for name, found in BUILT_IN.items()
    ]
    output.table(("name", "jobs", "cluster", "what it is"), rows)


def policies(as_json: output.JsonOption = False) -> None:
    """List the policies, what they need to know, and their options."""
    from pollux.policies import registry

    found = {name: registry.describe(name) for name in registry.names()}
    if as_json:
        output.print_json(found)
        return
    rows = [
        (name, facts["summary"], facts["needs"], ", ".join(f"{key}={value}" for key, value in facts["options"].items()))
        for name, facts in found.items()
    ]
    output.table(("policy", "what it does", "needs", "options (--set policy.…)"), rows)
