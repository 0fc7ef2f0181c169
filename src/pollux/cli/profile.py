"""`pollux profile`: fit, show and plot goodput models.

Rooms are imported inside the commands: `pollux --help` must not wait for NumPy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import output
from pollux.errors import InvalidInput

if TYPE_CHECKING:
    from pollux.applications import Application
    from pollux.applications.fitting import FittedApplication
    from pollux.core import Shape
    from pollux.goodput import BestConfig

app = typer.Typer(no_args_is_help=True, help="Fit, show and plot goodput models.")

ApplicationsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[APPLICATION]…", help="Built-in applications; all if none is named.")
]
GPUS_PER_NODE = 4
STAGES = (0.1, 0.5, 0.9)
"""Fractions of training at which tables and plots look."""


@app.command()
def fit(
    traces: Annotated[Path, typer.Argument(metavar="TRACES_DIR", help="Folder of traces, one folder an application.")],
    json_file: output.JsonFileOption = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="DIR", help="Write each as an application file into DIR.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--application", "-a", help="Only this application; may be given again.")
    ] = None,
    gpu_type: Annotated[str, typer.Option(help="Name of the GPU type that the traces were measured on.")] = "t4",
    model: Annotated[str, typer.Option(help="Throughput model: paper, racks, or package.module:attribute.")] = "paper",
) -> None:
    """Fit applications to measured traces and say how well the model follows them.

    Errors are means of |predicted / measured - 1| of the time per iteration. Held out: fitted to half of the
    placements, errors on the other half.
    """
    from pollux.applications.catalogue import to_text
    from pollux.applications.fitting import fit_application
    from pollux.goodput import throughput_model
    from pollux.simulator.traces import application_names, read_application

    chosen = throughput_model(model)
    names = only or application_names(traces)
    source = f"fitted by `pollux profile fit` to the measurements in {traces.parent.name or traces.name}"
    fitted: list[FittedApplication] = []
    with output.progress("fitting", len(names)) as advance:
        for name in names:
            fitted.append(fit_application(read_application(traces, name), gpu_type, source, chosen))
            advance(1)
    if write is not None:
        with _writing("--write", write):
            write.mkdir(parents=True, exist_ok=True)
            for each in fitted:
                path = write / f"{each.application.name}.json"
                path.write_text(to_text(each.application), encoding="utf-8")
        output.note(f"wrote {len(fitted)} application files to {write}")
    if json_file != output.STDOUT:
        _show_errors(fitted)
    if json_file is not None:
        output.write_json({each.application.name: _figures(each) for each in fitted}, json_file)


def _figures(each: FittedApplication) -> dict[str, Any]:
    application, found = each.application, each.fit
    return {
        "mean_relative_error": found.mean_relative_error,
        "published_procedure_error": each.published.mean_relative_error,
        "heldout_mean_relative_error": each.heldout_mean_relative_error,
        "heldout_published_error": each.heldout_published_error,
        "theta": dict(zip(found.model.parameters, found.theta, strict=True)),
        "throughput_model": found.model.name,
        "priors": found.priors,
        "converged": found.converged,
        "iterations": found.iterations,
        "observations": len(found.residuals),
        "worst_relative_error": max(abs(residual) for residual in found.residuals),
        "noise_rms_log_error": each.noise_rms_log_error,
        "efficiency_mean_abs_error": each.efficiency_mean_abs_error,
        "initial_batch_size": application.limits.initial_batch_size,
        "max_batch_size": application.limits.max_batch_size,
        "min_per_gpu_batch_size": application.limits.min_per_gpu_batch_size,
        "max_per_gpu_batch_size": application.limits.max_per_gpu_batch_size,
        "epochs": application.epochs,
        "total_progress": application.total_progress,
    }


def _show_errors(fitted: list[FittedApplication]) -> None:
    output.table(
        ["application", "points", "error", "published", "held out", "published, held out", "efficiency", "converged"],
        [
            [
                each.application.name,
                len(each.fit.residuals),
                _percent(each.fit.mean_relative_error),
                _percent(each.published.mean_relative_error),
                _percent(each.heldout_mean_relative_error),
                _percent(each.heldout_published_error),
                _percent(each.efficiency_mean_abs_error),
                each.fit.converged,
            ]
            for each in fitted
        ],
        title="Mean relative error of the time per iteration, beside the published procedure's",
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


@app.command()
def show(names: ApplicationsArgument = None, as_json: output.JsonOption = False) -> None:
    """Show built-in applications: parameters, limits, and the best batch size for some numbers of GPUs."""
    from pollux import applications

    chosen = [applications.load(name) for name in names or applications.names()]
    if as_json:
        from pollux.core import codec

        output.print_json({each.name: {**codec.encode(each), "best": _best_figures(each)} for each in chosen})
        return
    if not names:
        output.table(
            ["application", "task", "M0", "M_max", "m", "epochs", "GPU types", "optimizer", "learning rate"],
            [
                [
                    each.name,
                    each.title,
                    each.limits.initial_batch_size,
                    each.limits.max_batch_size,
                    f"{each.limits.min_per_gpu_batch_size}–{each.limits.max_per_gpu_batch_size}",
                    each.epochs,
                    ", ".join(each.throughput),
                    each.optimizer,
                    each.scaling_rule,
                ]
                for each in chosen
            ],
            title="Built-in applications (pollux profile show NAME for one of them)",
        )
        return
    for each in chosen:
        _show_application(each)


def _show_application(application: Application) -> None:
    output.console.print(f"{application.name}: {application.title}")
    output.console.print(f"  {application.source}", soft_wrap=True)
    for gpu_type, fitted in application.throughput.items():
        output.console.print(f"  {fitted.model} model on {gpu_type}, mean error {_percent(fitted.mean_relative_error)}")
        output.table(
            ["parameter", "value"], [(name, fitted.params[name]) for name in sorted(fitted.params, key=_in_pairs)]
        )
        columns = [text for stage in STAGES for text in (f"batch at {stage:.0%}", f"goodput at {stage:.0%}")]
        rows = [
            [shape.num_gpus, shape.num_nodes, *(cell for best in row for cell in _cells(best, shape))]
            for shape, row in _best_rows(application, gpu_type)
        ]
        output.table(
            ["GPUs", "nodes", *columns],
            rows,
            title="Best total batch size and goodput (examples/s) as training goes on",
        )


def _in_pairs(parameter: str) -> tuple[int, str]:
    """α and β of compute first, then of each level outwards, γ last."""
    level = parameter.partition("_")[2]
    known = ("grad", "local", "node", "rack")
    return (known.index(level) if level in known else len(known), parameter)


def _best_rows(application: Application, gpu_type: str) -> list[tuple[Shape, list[BestConfig]]]:
    """The settled configuration at each stage, for packed shapes of growing size."""
    from pollux.core import Shape

    shapes = [Shape(num_gpus, -(-num_gpus // GPUS_PER_NODE)) for num_gpus in (1, 2, 4, 8, 16, 32, 64)]
    return [(shape, [application.settled(gpu_type, stage, shape) for stage in STAGES]) for shape in shapes]


def _cells(best: BestConfig, shape: Shape) -> list[object]:
    return [best.batch_size(shape.num_gpus), round(best.goodput, 1)] if best.goodput else [None, None]


def _best_figures(application: Application) -> list[dict[str, Any]]:
    return [
        {
            "gpu_type": gpu_type,
            "num_gpus": shape.num_gpus,
            "num_nodes": shape.num_nodes,
            "progress": stage,
            "per_gpu_batch_size": best.per_gpu_batch_size,
            "accumulation_steps": best.accumulation_steps,
            "batch_size": best.batch_size(shape.num_gpus),
            "goodput": best.goodput,
        }
        for gpu_type in application.throughput
        for shape, row in _best_rows(application, gpu_type)
        for stage, best in zip(STAGES, row, strict=True)
    ]


@app.command()
def plot(
    names: ApplicationsArgument = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the pictures.")] = Path("out/profile"),
    seed: Annotated[int, typer.Option(help="Of the measurement noise in the fitting example.", min=0)] = 0,
    as_json: output.JsonOption = False,
) -> None:
    """Fit and plot the goodput model of built-in applications, one picture each and an overview.

    Each application is measured with 3 % noise on more and more GPUs, as a job would, and fitted to what was seen.
    """
    from pollux import applications
    from pollux.cli import plots

    chosen = [applications.load(name) for name in names or applications.names()]
    written: list[Path] = []
    learned: list[tuple[str, plots.Learned]] = []
    with _writing("--out", out):
        out.mkdir(parents=True, exist_ok=True)
        with output.progress("plotting", len(chosen) + 1) as advance:
            for each in chosen:
                steps = plots.learn(each, seed)
                learned += [(each.name, step) for step in steps]
                written.append(plots.application_figure(each, steps, STAGES, out / f"{each.name}.png"))
                advance(1)
            written.append(plots.overview_figure(chosen, STAGES, out / "overview.png"))
            advance(1)
    if as_json:
        fits = [
            {
                "application": name,
                "observations": step.observations,
                "max_gpus": step.max_gpus,
                "error": step.error,
                "priors": step.priors,
            }
            for name, step in learned
        ]
        output.print_json({"files": written, "fits": fits})
        return
    output.table(
        ["application", "observations", "largest K seen", "error on all shapes", "still priors"],
        [
            [name, step.observations, step.max_gpus, _percent(step.error), ", ".join(step.priors) or "none"]
            for name, step in learned
        ],
        title="What a job knows of its own throughput as it explores (3 % measurement noise)",
    )
    output.console.print("Pictures:")
    for path in written:
        output.console.print(f"  {path}", soft_wrap=True)


@contextlib.contextmanager
def _writing(option: str, folder: Path) -> Iterator[None]:
    """Turns a failure to write into a folder into an error that names the option."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInput(
            option, str(folder), f"cannot be written: {reason}", "Name a folder that you may write to"
        ) from None
