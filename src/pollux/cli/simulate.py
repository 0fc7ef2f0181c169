"""`pollux simulate` and `pollux compare`: workloads under policies in a virtual cluster."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import output, report, run_options
from pollux.core import FrozenMap, KindProfile
from pollux.errors import InvalidInput

if TYPE_CHECKING:
    from pollux.scheduler import EventLog
    from pollux.simulator.metrics import Outcome


def simulate(
    workload: Annotated[str, typer.Argument(help=run_options.WORKLOAD_HELP)],
    policy: Annotated[str, typer.Option(help="Name of the policy; `pollux policies` lists them.")] = "pollux",
    nodes: run_options.NodesOption = None,
    gpus_per_node: run_options.GpusOption = None,
    cluster: run_options.ClusterOption = None,
    interval: run_options.IntervalOption = None,
    realloc_delay: run_options.DelayOption = None,
    interference: run_options.InterferenceOption = None,
    traces: run_options.TracesOption = None,
    seed: run_options.SeedOption = None,
    compat: run_options.CompatOption = None,
    fairness: run_options.FairnessOption = None,
    settings: run_options.SetOption = None,
    json_file: output.JsonFileOption = None,
    report_folder: report.ReportOption = None,
    events: Annotated[
        Path | None,
        typer.Option(metavar="FILE", allow_dash=True, help="Write every event of the scheduler, one JSON line each."),
    ] = None,
    registry_file: Annotated[
        Path | None,
        typer.Option("--registry", metavar="FILE", help="Begin with what is known by `pollux registry export`."),
    ] = None,
    save_registry: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what is known of each kind of job at the end.")
    ] = None,
) -> None:
    """Run a workload under one policy in a virtual cluster, with the scheduler that is also deployed."""
    run_options.use_one_thread()
    run_options.collect_seldom()
    from pollux.simulator.scenario import Scenario
    from pollux.simulator.scenario import simulate as run

    if json_file == events == output.STDOUT:
        raise InvalidInput("--events", "-", "--json is printed already", "Give one of them a file")
    flags = run_options.flags_of(interval, realloc_delay, interference, seed)
    options = run_options.options_of([policy], flags, compat, settings)[policy]
    nodes_of_run = run_options.cluster_of(workload, nodes, gpus_per_node, cluster)
    known = FrozenMap[str, KindProfile]() if registry_file is None else _kinds_in(registry_file)
    scenario = Scenario(workload, policy, nodes_of_run, traces, options, bool(fairness), kinds=known)
    output.check_writable(save_registry, "--save-registry")
    output.check_writable(json_file, "--json")
    output.check_writable(events, "--events")
    report.check(report_folder)
    (scenario,) = report.prepared([scenario], report_folder, fairness)
    with _event_log(events) as log, output.progress(f"{workload} under {policy}") as advance:
        # From the start of this process: what the command cost, imports included.
        outcome = run(scenario, log, on_start=advance.expect, on_end=lambda: advance(1), cpu_began_s=0.0)
    if json_file is not None:
        output.write_json(outcome.document(), json_file)
    if output.STDOUT not in (json_file, events):
        _print_outcome(outcome)
    if save_registry is not None:
        _write_kinds(outcome.kinds, save_registry)
    for what, path in (
        ("The figures of every job and round are", json_file),
        ("The events are", events),
        ("The registry is", save_registry),
    ):
        if path not in (None, output.STDOUT):
            output.note(f"{what} in {path}")
    report.write([outcome], report_folder, f"{outcome.workload} under {policy}")


def compare(
    workloads: Annotated[list[str], typer.Argument(help=run_options.WORKLOAD_HELP)],
    policies: run_options.PoliciesOption,
    jobs: run_options.JobsOption = None,
    nodes: run_options.NodesOption = None,
    gpus_per_node: run_options.GpusOption = None,
    cluster: run_options.ClusterOption = None,
    interval: run_options.IntervalOption = None,
    realloc_delay: run_options.DelayOption = None,
    interference: run_options.InterferenceOption = None,
    traces: run_options.TracesOption = None,
    seed: run_options.SeedOption = None,
    compat: run_options.CompatOption = None,
    fairness: run_options.FairnessOption = None,
    settings: run_options.SetOption = None,
    json_file: output.JsonFileOption = None,
    report_folder: report.ReportOption = None,
) -> None:
    """Run workloads under several policies, in parallel, and set the results side by side."""
    run_options.use_one_thread()
    run_options.collect_seldom()
    from pollux.simulator.comparison import run_all
    from pollux.simulator.scenario import Scenario

    names = run_options.policy_names(policies)
    output.check_writable(json_file, "--json")
    report.check(report_folder)
    by_policy = run_options.options_of(
        names, run_options.flags_of(interval, realloc_delay, interference, seed), compat, settings
    )
    distinct = list(dict.fromkeys(workloads))
    scenarios = [
        Scenario(
            workload,
            name,
            run_options.cluster_of(workload, nodes, gpus_per_node, cluster),
            traces,
            by_policy[name],
            bool(fairness),
        )
        for workload in distinct
        for name in names
    ]
    scenarios = report.prepared(scenarios, report_folder, fairness)
    with output.progress("simulating", len(scenarios)) as advance:
        found = run_all(scenarios, jobs or os.cpu_count() or 1, advance)
    labels = dict(zip(distinct, run_options.labels(distinct), strict=True))
    outcomes = [replace(run, workload=labels[its.workload]) for run, its in zip(found, scenarios, strict=True)]
    if json_file is not None:
        output.write_json(_comparison(outcomes), json_file)
    if json_file != output.STDOUT:
        _print_comparison(outcomes, names)
        if json_file is not None:
            output.note(f"The figures of every job and round are in {json_file}")
    report.write(outcomes, report_folder, f"{', '.join(names)} on {', '.join(labels.values())}")


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


def _kinds_in(path: Path) -> FrozenMap[str, KindProfile]:
    from pollux.cli import registry  # and all that talks to a cluster, which a simulation need not wait for

    return registry.read(path, "--registry").kinds


def _write_kinds(kinds: FrozenMap[str, KindProfile], path: Path) -> None:
    from pollux.cli import registry

    registry.write(kinds, path, "--save-registry")


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
        *_fairness_rows(outcome),
    ]
    output.table(("figure", "value"), rows, title=f"{outcome.workload} under {outcome.policy}")


def _fairness_rows(outcome: Outcome) -> list[tuple[str, str]]:
    fairness = outcome.fairness
    if fairness is None:
        return []
    spread = ", ".join(f"{fairness.percentile(p):.2f}" for p in (50, 90, 99))
    return [
        ("finish-time fairness", f"worst ρ {fairness.worst:.2f}, {_percent(fairness.unfair_fraction)} of jobs above 1"),
        ("ρ p50, p90, p99", spread),
        ("CPU time of isolated runs", f"{fairness.cpu_s:.2f} s"),
    ]


def _print_comparison(outcomes: Sequence[Outcome], policies: Sequence[str]) -> None:
    from pollux.simulator.metrics import means

    runs = [(outcome.workload, outcome.policy, outcome.figures()) for outcome in outcomes]
    if len(outcomes) > len(policies):
        runs += [("mean", policy, of_policy) for policy, of_policy in means(outcomes).items()]
    # One unit for all: columns are for comparing.
    unit, seconds = ("h", 3600) if max(figures["avg_jct_s"] for _, _, figures in runs) >= 6000 else ("min", 60)
    times = {"avg JCT": "avg_jct_s", "p50": "p50_jct_s", "p99": "p99_jct_s", "makespan": "makespan_s"}
    fair = ["worst ρ", "ρ > 1, %"] if any(outcome.fairness for outcome in outcomes) else []
    rows = [
        (
            workload,
            policy,
            *(output.number(figures[key] / seconds, 2) for key in times.values()),
            output.number(figures["reallocations_per_job"], 2),
            output.number(_times(100, figures["utilisation"]), 0),
            output.number(_times(100, figures["avg_efficiency"]), 0),
            output.number(figures["cpu_s"], 2),
            *(
                (output.number(figures["worst_rho"], 2), output.number(_times(100, figures["unfair_fraction"]), 0))
                if fair
                else ()
            ),
        )
        for workload, policy, figures in runs
    ]
    headings = [f"{heading}, {unit}" for heading in times]
    output.table(("workload", "policy", *headings, "re-allocs", "use, %", "efficiency, %", "CPU, s", *fair), rows)


def _comparison(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    from pollux.simulator.metrics import means

    return {"means": means(outcomes), "runs": [outcome.document() for outcome in outcomes]}


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
