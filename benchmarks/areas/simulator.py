"""The simulator: what whole runs cost, how large they may be, and how far our own rules are from the published ones.

Costs are those of the command (`pollux simulate …`) in a process of its own, imports and reading included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import inputs
from benchmarks.measurement import Finding, LeftOut, Measurement, Table, median, spread
from benchmarks.processes import cost
from pollux.simulator.compat import preset
from pollux.simulator.options import Options
from pollux.simulator.scenario import Scenario, simulate
from pollux.simulator.settings import applied

REPETITIONS = 3
PUBLISHED_CPU_S = {"tiresias": 21.0, "optimus": 82.0}
"""Recorded for the published simulator, one workload of 160 jobs, Python 3.8, one core; it cannot run here."""
DEVIATIONS = {
    "all of them: our default": {},
    "epochs not rounded to whole seconds": {"world.whole_seconds": False},
    "one GPU does not accumulate": {"agent.single_gpu_accumulation": False},
    "the oracle prices one GPU as it is": {"world.oracle_doubles_one_gpu": False},
    "ncf is not pinned to one GPU": {"agent.pinned": []},
    "reports, and with them whole seconds, every 30 s": {"agent.report_interval_s": 30.0},
}


def measure() -> Iterator[Finding]:
    data = inputs.traces()
    if data is None:
        for key in ("tiresias_run_cpu_s", "optimus_run_cpu_s"):
            yield LeftOut(f"simulator.{key}", "needs the measured traces of POLLUX_DATA")
    else:
        yield from _runs(data)
        yield _deviations(data)
    yield from _scale()


def _runs(traces: Path) -> Iterator[Finding]:
    files = [*inputs.workloads(traces), *inputs.workloads(traces, inputs.REALISTIC)]
    for policy, published in PUBLISHED_CPU_S.items():
        commands = [
            ("simulate", file, "--policy", policy, "--compat", "artifact", "--traces", traces) for file in files
        ]
        with tempfile.TemporaryDirectory() as folder:
            for command in commands:
                cost(command, Path(folder))
            first = [[cost(command).cpu_s for command in commands] for _ in range(REPETITIONS)]
            later = [[cost(command, Path(folder)).cpu_s for command in commands] for _ in range(REPETITIONS)]
        by_file = [median(column) for column in zip(*first, strict=True)]
        worst = max(range(len(files)), key=by_file.__getitem__)
        where = f"160 jobs, --compat artifact, mean of the {len(files)} tuned and realistic workloads"
        yield _run_measurement(
            f"simulator.{policy}_run_cpu_s",
            first,
            f"{where}, nothing in the cache; the dearest, {files[worst].parent.name}/{files[worst].stem}: "
            f"{by_file[worst]:.2f} s; the published simulator: {published:g} s recorded",
        )
        key = f"simulator.{policy}_run_again_cpu_s"
        yield _run_measurement(key, later, f"{where}, times beyond four nodes in the cache of earlier runs")


def _run_measurement(key: str, costs: Sequence[Sequence[float]], note: str) -> Measurement:
    means = [sum(row) / len(row) for row in costs]
    return Measurement(key, median(means), "s", bound=1.5, spread=spread(means), note=note)


def _deviations(traces: Path) -> Table:
    """Each rule of ours alone, on top of the published ones."""
    rows: list[list[str | float]] = []
    published = applied(Options(), preset("artifact"))
    files = [*inputs.workloads(traces), *inputs.workloads(traces, inputs.REALISTIC)]
    reference = {policy: _average_jcts(traces, files, policy, published) for policy in PUBLISHED_CPU_S}
    for name, changes in DEVIATIONS.items():
        options = applied(published, changes) if changes else Options()
        row: list[str | float] = [name]
        for policy, usual in reference.items():
            found = _average_jcts(traces, files, policy, options)
            ratios = [100 * (ours / theirs - 1) for ours, theirs in zip(found, usual, strict=True)]
            row += [f"{sum(ratios) / len(ratios):+.2f} %", f"{min(ratios):+.2f} … {max(ratios):+.2f} %"]
        rows.append(row)
    columns = ("rule of ours", *(f"{policy}, {what}" for policy in PUBLISHED_CPU_S for what in ("mean", "range")))
    note = f"Change of the average JCT against `--compat artifact`, over {len(files)} tuned and realistic workloads."
    return Table("What our own rules change", columns, rows, note)


def _average_jcts(traces: Path, files: Sequence[Path], policy: str, options: Options) -> list[float]:
    runs = (simulate(Scenario(str(file), policy, traces=traces, options=options)) for file in files)
    return [run.figures()["avg_jct_s"] for run in runs]


def _scale() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scale.csv"
        # As many jobs an hour for each GPU as in the paper's workloads.
        cost(("workload", "generate", file, "--jobs", "10000", "--hours", "31.25"))
        used = cost(("simulate", file, "--policy", "tiresias", "--nodes", "256", "--gpus-per-node", "4"))
    note = "10,000 generated jobs on 256 × 4 GPUs under tiresias, built-in applications"
    yield Measurement("simulator.scale_10k_jobs_cpu_s", used.cpu_s, "s", bound=180.0, note=note)
    yield Measurement("simulator.scale_10k_jobs_mib", used.peak_mib, "MiB", bound=2048.0, note=f"peak memory of {note}")
