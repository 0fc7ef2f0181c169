"""What the commands that simulate have in common: their options, and what these stand for."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli.report import MAX_FAIR_JOBS
from pollux.errors import InvalidInput, InvalidSpec

if TYPE_CHECKING:
    from pollux.simulator.cluster_file import ClusterFile
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
FairnessOption = Annotated[
    bool | None,
    typer.Option(
        "--fairness/--no-fairness",
        help="Also run each job alone on its fair share, for finish-time fairness ρ. Slow.",
        show_default=f"off; with --report on, up to {MAX_FAIR_JOBS} jobs a workload",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other option: world.…, agent.…, scheduler.… or policy.…"),
]
WORKLOAD_HELP = "CSV file (name, time, application, num_replicas, batch_size) or a built-in workload: demo, paper …"
PoliciesOption = Annotated[str, typer.Option(metavar="A,B,…", help="Names of policies, with commas between them.")]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Runs at a time.", show_default="number of cores")]


def policy_names(text: str) -> list[str]:
    """Those that `--policies` lists, each once."""
    from pollux.policies import registry

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidInput("--policies", text, "names no policy", f"Known: {', '.join(registry.names())}")
    return names


def use_one_thread() -> None:
    """Before NumPy is imported: a run does no algebra worth a second thread, and idle BLAS threads burn CPU waiting."""
    for library in ("OPENBLAS", "MKL", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")


def collect_seldom() -> None:
    """A run leaves next to nothing that Python's garbage collector would find; looking for it costs 2 % of the time."""
    gc.set_threshold(100_000, 50, 100)


def flags_of(
    interval: float | None, realloc_delay: float | None, interference: float | None, seed: int | None
) -> dict[str, object]:
    given = {
        "interval_s": interval,
        "world.realloc_delay_s": realloc_delay,
        "world.interference": interference,
        "seed": seed,
    }
    return {key: value for key, value in given.items() if value is not None}


def options_of(
    policies: Sequence[str], flags: Mapping[str, object], compat: str | None, settings: Sequence[str] | None
) -> dict[str, Options]:
    """Of each policy: defaults, then the preset, then the flags, then what was set by name."""
    from pollux.simulator import compat as presets
    from pollux.simulator.settings import parse

    return presets.options_of(policies, {**flags, **parse(settings or ())}, compat)


def labels(workloads: Sequence[str]) -> list[str]:
    """Short names that tell them apart: file names without their ending, with as many folders as that takes."""
    paths = [Path(workload).with_suffix("") for workload in workloads]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return list(workloads)


def cluster_of(workload: str, nodes: int | None, gpus_per_node: int | None, file: Path | None) -> ClusterFile:
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
