"""`pollux bench`: what planning costs at any size of cluster, on made-up jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import output, run_options
from pollux.errors import InvalidInput, InvalidSpec, UnknownName

if TYPE_CHECKING:
    from pollux.policies import Policy
    from pollux.simulator.plan_cost import PlanCost

app = typer.Typer(no_args_is_help=True, help="Measure what planning costs, on made-up jobs.")

FLAGS: Mapping[str, str] = {
    "num_gpus": "--gpus",
    "num_jobs": "--jobs",
    "gpus_per_node": "--gpus-per-node",
    "mix": "--mix",
    "policy": "--policy",
    "seed": "--seed",
}
"""What fields are called on the command line."""
MAX_GPUS_BESIDE = 256
"""Beyond that the paper's search takes minutes a plan and leaves jobs without GPUs."""


@app.command("plan")
def plan(
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the cluster, a multiple of those of a node.")] = 64,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs at a time.")] = 20,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each node.")] = 4,
    mix: Annotated[
        str,
        typer.Option(help="standard (as in the paper, a third keeps one GPU) or elastic (each may have up to 64)."),
    ] = "standard",
    policy: Annotated[str, typer.Option(help="Name of the policy; `pollux policies` lists them.")] = "pollux",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to count, after three that settle.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Where all randomness comes from.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help="An option of the policy, such as p=-10.")
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="SOLVER",
            help=f"Also plan each round with pollux and this solver: genetic, up to {MAX_GPUS_BESIDE} GPUs.",
        ),
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Plan made-up rounds and show CPU time, proven gap, changes and memory.

    From one round to the next the policy's own plan is in force, 3 % of the jobs leave and as many arrive, the
    gradient noise of each that runs drifts by 3 %, and 5 % may use twice the GPUs of before. A plan is timed from
    snapshot to plan, goodput tables included.
    """
    run_options.use_one_thread()
    from pollux.simulator.plan_cost import plan_cost, settling_rounds
    from pollux.simulator.rounds import Rounds
    from pollux.simulator.settings import parse

    try:
        measured = _policy(policy, parse(settings or (), example="p=-10"))
        compared = _beside(beside, gpus)
        made = Rounds(gpus, jobs, gpus_per_node, mix, seed)
    except InvalidInput as error:
        raise _named(error) from error
    before_mib = _peak_mib()
    with output.progress(f"planning {gpus} GPUs, {jobs} jobs", rounds + settling_rounds(jobs)) as advance:
        cost, other = plan_cost(measured, made, rounds, compared, lambda: advance(1))
    peak_mib = _peak_mib()
    document: dict[str, Any] = {
        "gpus": gpus,
        "gpus_per_node": gpus_per_node,
        "jobs": jobs,
        "mix": mix,
        "policy": policy,
        "rounds": rounds,
        "seed": seed,
        **cost.figures(),
        "peak_mib": peak_mib,
        "planning_mib": peak_mib - before_mib,
        "beside": None if other is None else {"solver": beside, **other.figures()},
        "fitness_ratio": _fitness_ratio(cost, other),
    }
    if as_json:
        output.print_json(document)
    else:
        _show(document)


def _policy(name: str, options: Mapping[str, object]) -> Policy:
    from pollux.policies import registry

    made = registry.make(name, options)
    if made.needs_oracle:
        problem = "needs the truth about jobs, and made-up ones have none"
        raise InvalidSpec("policy", name, problem, "Choose one without an oracle: pollux, tiresias, fifo …")
    return made


def _beside(solver: str | None, num_gpus: int) -> Policy | None:
    if solver is None:
        return None
    if solver != "genetic":
        raise UnknownName("--beside", solver, ["genetic"])
    if num_gpus > MAX_GPUS_BESIDE:
        problem = f"is for clusters of up to {MAX_GPUS_BESIDE} GPUs: beyond, it takes minutes a plan"
        raise InvalidSpec("--beside", solver, problem, "Leave it out, or give fewer --gpus")
    return _policy("pollux", {"solver": solver})


def _named(error: InvalidInput) -> InvalidInput:
    """The same, with what was typed in place of the fields that it went to."""
    if error.field not in FLAGS:
        return error
    problem, fix = (text.replace("gpus_per_node", "--gpus-per-node") for text in (error.problem, error.fix))
    return InvalidInput(FLAGS[error.field], error.value, problem, fix)


def _peak_mib() -> float:
    """The most memory that this process has had so far."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _fitness_ratio(cost: PlanCost, other: PlanCost | None) -> dict[str, float] | None:
    """Fitness over that of the other's plan for the same snapshot; None where one of them tells none."""
    pairs = [] if other is None else list(zip(cost.fitness, other.fitness, strict=True))
    ratios = sorted(ours / theirs for ours, theirs in pairs if ours is not None and theirs)
    if not ratios or len(ratios) < len(pairs):
        return None
    return {"min": ratios[0], "median": ratios[len(ratios) // 2]}


def _show(document: Mapping[str, Any]) -> None:
    columns: dict[str, Mapping[str, Any]] = {document["policy"]: document}
    if document["beside"] is not None:
        columns[f"pollux, {document['beside']['solver']}"] = document["beside"]
    rows: list[list[object]] = [
        [f"CPU ms a plan, {name}", *(_number(of["cpu_ms"][name]) for of in columns.values())]
        for name in ("median", "p99", "max")
    ]
    rows += [
        [f"proven gap, {name}", *("–" if of["gap"] is None else f"{of['gap'][name]:.4%}" for of in columns.values())]
        for name in ("median", "p99", "max")
    ]
    rows += [
        [f"jobs {name} a round", *(f"{of[name]:.1f}" for of in columns.values())]
        for name in ("started", "moved", "stopped")
    ]
    others = [""] * (len(columns) - 1)
    rows.append(["peak memory", f"{document['peak_mib']:.0f} MiB", *others])
    rows.append(["of that for planning", f"{document['planning_mib']:.0f} MiB", *others])
    if (ratio := document["fitness_ratio"]) is not None:
        rows.append(["fitness over genetic's, lowest", f"{ratio['min']:.4f}", *others])
        rows.append(["fitness over genetic's, median", f"{ratio['median']:.4f}", *others])
    num_nodes = document["gpus"] // document["gpus_per_node"]
    title = (
        f"{document['gpus']} GPUs ({num_nodes} × {document['gpus_per_node']}), {document['jobs']} jobs, "
        f"{document['mix']} mix, {document['rounds']} rounds"
    )
    output.table(("", *columns), rows, title=title)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100.0 else f"{value:,.0f}"
