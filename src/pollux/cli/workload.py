"""`pollux workload`: synthetic workloads from the built-in applications. `pollux policies`: what there is to choose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pollux.cli import output

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
    for flag, value in (("--jobs", jobs), ("--hours", hours), ("--max-gpus", max_gpus)):
        if value is not None and not value > 0:
            raise InvalidSpec(flag, value, "must be above 0", "Give a positive number")
    options = GeneratorOptions(
        num_jobs=jobs,
        duration_s=hours * 3600,
        seed=seed,
        arrivals=arrivals,
        configuration=configuration,
        mix=FrozenMap(shares) if shares else PAPER_MIX,
        max_gpus=max_gpus,
    )
    output.write_text([to_csv(make(options))], file, "FILE")
    if file != output.STDOUT:
        named = file if file.parent.parts else f"./{file}"  # not the built-in workload of that name
        output.note(f"{jobs} jobs are in {file}; try: pollux simulate {named}")


@app.command("list")
def list_built_in(as_json: output.JsonOption = False) -> None:
    """List the built-in workloads."""
    from pollux.simulator.generator import BUILT_IN

    if as_json:
        output.print_json(
            {
                name: {
                    "title": found.title,
                    "jobs": found.options.num_jobs,
                    "nodes": found.num_nodes,
                    "gpus_per_node": found.gpus_per_node,
                }
                for name, found in BUILT_IN.items()
            }
        )
        return
    rows = [
        (name, found.options.num_jobs, f"{found.num_nodes} × {found.gpus_per_node} GPUs", found.title)
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
