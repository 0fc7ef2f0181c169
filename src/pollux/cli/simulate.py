"""`pollux simulate` and `pollux compare`: workloads under policies in a virtual cluster."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from pollux.cli import output
from pollux.errors import InvalidInput, InvalidSpec, UnknownName

if TYPE_CHECKING:
    from pollux.scheduler import EventLog
    from pollux.simulator.cluster_file import ClusterFile
    from pollux.simulator.metrics import Outcome
    from pollux.simulator.options import Options

NodesOption = Annotated[
    int | None, typer.Option(min=1, help="Equal nodes.", show_default="16, or as the built-in workload says")
]
GpusOption = Annotated[int | None, typer.Option(min=1, help="GPUs of each node.", show_default="4")]
ClusterOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Uneven nodes, failures and joins, from a TOML or JSON file.")
]
IntervalOption = Annotated[float | None, typer.Option(help="Seconds from round to round.", show_default="60")]
DelayOption = Annotated[
    float | None, typer.Option(help="Seconds without training after each start or re-allocation.", show_default="30")
]
InterferenceOption = Annotated[
    float | None,
    typer.Option(help="Share of its speed that a job on several nodes loses where it meets another.", show_default="0"),
]
TracesOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Measured traces as the truth, a folder an application; else the built-in ones."),
]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Where all randomness comes from.", show_default="0")]
CompatOption = Annotated[
    str | None, typer.Option(metavar="PRESET", help="Follow somebody else's rules: artifact (the published simulator).")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other option: world.…, agent.…, scheduler.… or policy.…"),
]
WORKLOAD_HELP = "CSV file (name, time, application, num_replicas, batch_size) or a built-in workload: demo, paper …"


def simulate(
    workload: Annotated[str, typer.Argument(help=WORKLOAD_HELP)],
    policy: Annotated[str, typer.Option(help="Name of the policy; `pollux policies` lists them.")] = "tiresias",
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    cluster: ClusterOption = None,
    interval: IntervalOption = None,
    realloc_delay: DelayOption = None,
    interference: InterferenceOption = None,
    traces: TracesOption = None,
    seed: SeedOption = None,
    compat: CompatOption = None,
    settings: SetOption = None,
    json_file: output.JsonFileOption = None,
    events: Annotated[
        Path | None,
        typer.Option(metavar="FILE", allow_dash=True, help="Write every event of the scheduler, one JSON line each."),
    ] = None,
) -> None:
    """Run a workload under one policy in a virtual cluster, with the scheduler that is also deployed."""
    _use_one_thread()
    from pollux.simulator.scenario import Scenario
    from pollux.simulator.scenario import simulate as run

    if json_file == events == output.STDOUT:
        raise InvalidInput("--events", "-", "--json is printed already", "Give one of them a file")
    flags = _flags(interval, realloc_delay, interference, seed)
    options = _options(flags, compat, settings)
    scenario = Scenario(workload, policy, _cluster(workload, nodes, gpus_per_node, cluster), traces, options)
    output.check_writable(json_file, "--json")
    output.check_writable(events, "--events")
    with _event_log(events) as log, output.progress(f"{workload} under {policy}") as advance:
        # From the start of this process: what the command cost, imports included.
        outcome = run(scenario, log, on_start=advance.expect, on_end=lambda: advance(1), cpu_began_s=0.0)
    if json_file is not None:
        output.write_json(outcome.document(), json_file)
    if output.STDOUT not in (json_file, events):
        _print_outcome(outcome)
    for what, path in (("The figures of every job and round are", json_file), ("The events are", events)):
        if path not in (None, output.STDOUT):
            output.note(f"{what} in {path}")


def compare(
    workloads: Annotated[list[str], typer.Argument(help=WORKLOAD_HELP)],
    policies: Annotated[str, typer.Option(metavar="A,B,…", help="Names of policies, with commas between them.")],
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time.", show_default="number of cores")] = None,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    cluster: ClusterOption = None,
    interval: IntervalOption = None,
    realloc_delay: DelayOption = None,
    interference: InterferenceOption = None,
    traces: TracesOption = None,
    seed: SeedOption = None,
    compat: CompatOption = None,
    settings: SetOption = None,
    json_file: output.JsonFileOption = None,
) -> None:
    """Run workloads under several policies, in parallel, and set the results side by side."""
    _use_one_thread()
    from pollux.policies import registry
    from pollux.simulator.comparison import run_all
    from pollux.simulator.scenario import Scenario

    names = list(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    if not names:
        raise InvalidInput("--policies", policies, "names no policy", f"Known: {', '.join(registry.names())}")
    output.check_writable(json_file, "--json")
    options = _options(_flags(interval, realloc_delay, interference, seed), compat, settings)
    by_policy = _options_by_policy(options, names)
    distinct = list(dict.fromkeys(workloads))
    scenarios = [
        Scenario(workload, name, _cluster(workload, nodes, gpus_per_node, cluster), traces, by_policy[name])
        for workload in distinct
        for name in names
    ]
    with output.progress("simulating", len(scenarios)) as advance:
        found = run_all(scenarios, jobs or os.cpu_count() or 1, advance)
    labels = dict(zip(distinct, _labels(distinct), strict=True))
    outcomes = [replace(run, workload=labels[its.workload]) for run, its in zip(found, scenarios, strict=True)]
    if json_file is not None:
        output.write_json(_comparison(outcomes, names), json_file)
    if json_file != output.STDOUT:
        _print_comparison(outcomes, names)
        if json_file is not None:
            output.note(f"The figures of every job and round are in {json_file}")


def _use_one_thread() -> None:
    """Before NumPy is imported: a run does no algebra worth a second thread, and idle BLAS threads burn CPU waiting."""
    for library in ("OPENBLAS", "MKL", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")


def _flags(
    interval: float | None, realloc_delay: float | None, interference: float | None, seed: int | None
) -> dict[str, object]:
    given = {
        "interval_s": interval,
        "world.realloc_delay_s": realloc_delay,
        "world.interference": interference,
        "seed": seed,
    }
    return {key: value for key, value in given.items() if value is not None}


def _options(flags: Mapping[str, object], compat: str | None, settings: Sequence[str] | None) -> Options:
    """Defaults, then the preset, then the flags, then what was set by name."""
    from pollux.simulator.compat import preset
    from pollux.simulator.options import Options
    from pollux.simulator.settings import applied, parse

    chosen = {**(preset(compat) if compat else {}), **flags, **parse(settings or ())}
    return applied(Options(), chosen)


def _options_by_policy(options: Options, policies: Sequence[str]) -> dict[str, Options]:
    """Each policy gets those of the policies' options that it has; one that none of them has is refused."""
    from pollux.core import FrozenMap
    from pollux.policies import registry

    known = {name: registry.describe(name)["options"] for name in policies}
    for option in options.policy:
        if not any(option in has for has in known.values()):
            everybody = sorted({f"policy.{name}" for has in known.values() for name in has})
            raise UnknownName("setting", f"policy.{option}", everybody)
    return {
        name: replace(options, policy=FrozenMap({key: value for key, value in options.policy.items() if key in has}))
        for name, has in known.items()
    }


def _labels(workloads: Sequence[str]) -> list[str]:
    """Short names that tell them apart: file names without their ending, with as many folders as that takes."""
    paths = [Path(workload).with_suffix("") for workload in workloads]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return list(workloads)


@contextlib.contextmanager
def _event_log(path: Path | None) -> Iterator[EventLog | None]:
    """The file that `--events` names, whole or not at all; what a run wrote before it failed stays beside it."""
    from pollux.simulator.event_file import EventFile

    if path is None:
        yield None
    elif path == output.STDOUT:
        yield EventFile(sys.stdout)
    elif path.exists() and not path.is_file():  # a pipe, a device
        with path.open("w", encoding="utf-8") as stream:
            yield EventFile(stream)
    else:
        partial = path.with_name(f"{path.name}.partial")
        try:
            with partial.open("w", encoding="utf-8") as stream:
                yield EventFile(stream)
        except BaseException:
            output.note(f"The events up to here are in {partial}")
            raise
        partial.replace(path)


def _cluster(workload: str, nodes: int | None, gpus_per_node: int | None, file: Path | None) -> ClusterFile:
    from pollux.core import Cluster
    from pollux.simulator.cluster_file import ClusterFile, read_cluster
    from pollux.simulator.scenario import GPU_TYPE, default_cluster

    if file is not None:
        if nodes is not None or gpus_per_node is not None:
            raise InvalidSpec(
                "--cluster", str(file), "says what --nodes and --gpus-per-node say", "Leave one of them out"
            )
        return read_cluster(file, GPU_TYPE)
    if nodes is None and gpus_per_node is None:
        return default_cluster(workload)
    usual = list(default_cluster(workload).cluster)
    return ClusterFile(Cluster.uniform(nodes or len(usual), gpus_per_node or usual[0].num_gpus, GPU_TYPE))


def _print_outcome(outcome: Outcome) -> None:
    figures = outcome.figures()
    rows = [
        ("jobs", f"{len(outcome.jobs)}"),
        ("average JCT", _duration(figures["avg_jct_s"])),
        ("p50, p90, p99", ", ".join(_duration(figures[f"p{p}_jct_s"]) for p in (50, 90, 99))),
        ("makespan", _duration(figures["makespan_s"])),
        ("re-allocations a job", f"{figures['reallocations_per_job']:.2f}"),
        ("GPU-hours held", f"{figures['gpu_hours']:.1f} ({_percent(figures['utilisation'])} of the cluster's)"),
        ("statistical efficiency", _percent(figures["avg_efficiency"])),
        ("contention", f"{figures['avg_contention']:.1f} active jobs, at most {figures['max_contention']}"),
        ("planning", f"{figures['policy_cpu_ms_mean']:.2f} ms a round, p99 {figures['policy_cpu_ms_p99']:.2f} ms"),
        ("CPU time", f"{figures['cpu_s']:.2f} s"),
    ]
    output.table(("figure", "value"), rows, title=f"{outcome.workload} under {outcome.policy}")


def _print_comparison(outcomes: Sequence[Outcome], policies: Sequence[str]) -> None:
    runs = [(outcome.workload, outcome.policy, outcome.figures()) for outcome in outcomes]
    if len(outcomes) > len(policies):
        runs += [("mean", policy, means) for policy, means in _means(outcomes, policies).items()]
    # One unit for all: columns are for comparing.
    unit, seconds = ("h", 3600) if max(figures["avg_jct_s"] for _, _, figures in runs) >= 6000 else ("min", 60)
    times = {"avg JCT": "avg_jct_s", "p50": "p50_jct_s", "p99": "p99_jct_s", "makespan": "makespan_s"}
    rows = [
        (
            workload,
            policy,
            *(_number(figures[key] / seconds, 2) for key in times.values()),
            _number(figures["reallocations_per_job"], 2),
            _number(_times(100, figures["utilisation"]), 0),
            _number(_times(100, figures["avg_efficiency"]), 0),
            _number(figures["cpu_s"], 2),
        )
        for workload, policy, figures in runs
    ]
    headings = [f"{heading}, {unit}" for heading in times]
    output.table(("workload", "policy", *headings, "re-allocs", "use, %", "efficiency, %", "CPU, s"), rows)


def _comparison(outcomes: Sequence[Outcome], policies: Sequence[str]) -> dict[str, Any]:
    return {"means": _means(outcomes, policies), "runs": [outcome.document() for outcome in outcomes]}


def _means(outcomes: Sequence[Outcome], policies: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Of each figure, over the workloads."""
    means: dict[str, dict[str, float | None]] = {}
    for policy in policies:
        all_figures = [outcome.figures() for outcome in outcomes if outcome.policy == policy]
        means[policy] = {
            key: None
            if any(figures[key] is None for figures in all_figures)
            else math.fsum(figures[key] for figures in all_figures) / len(all_figures)
            for key in all_figures[0]
        }
    return means


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _number(value: float | None, digits: int) -> Text:
    return Text("–" if value is None else f"{value:.{digits}f}", justify="right")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
