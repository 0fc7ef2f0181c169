"""`pollux profile`: fit, show and plot goodput models.

Rooms are imported inside the commands: `pollux --help` must not wait for NumPy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import output
from pollux.errors import InvalidInput

if TYPE_CHECKING:
    from pollux.applications import Application
    from pollux.applications.fitting import FittedApplication

app = typer.Typer(no_args_is_help=True, help="Fit, show and plot goodput models.")

ApplicationsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[APPLICATION]…", help="Built-in applications; all if none is named.")
]
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
        try:
            write.mkdir(parents=True, exist_ok=True)
            for each in fitted:
                path = write / f"{each.application.name}.json"
                path.write_text(to_text(each.application), encoding="utf-8")
        except OSError as error:
            raise InvalidInput("--write", str(write), str(error), "Name a folder that you may write to") from error
        output.note(f"wrote {len(fitted)} application files to {write}")
    if json_file is not None:
        output.write_json({each.application.name: _figures(each) for each in fitted}, json_file)
    if json_file != output.STDOUT:
        _show_errors(fitted)


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


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


@app.command()
def show(names: ApplicationsArgument = None, as_json: output.JsonOption = False) -> None:
    """Show built-in applications: parameters, limits, and the best batch size for some numbers of GPUs."""
    from pollux import applications

    chosen = [applications.load(name) for name in names or applications.names()]
    if as_json:
        from pollux.core import codec

        output.print_json({each.name: codec.encode(each) for each in chosen})
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
    from pollux.core import Shape

    output.console.print(f"{application.name}: {application.title}")
    output.console.print(f"  {application.source}", soft_wrap=True)
    for gpu_type, fitted in application.throughput.items():
        output.console.print(f"  {fitted.model} model on {gpu_type}, mean error {_percent(fitted.mean_relative_error)}")
        output.table(["parameter", "value"], list(fitted.params.items()))
        rows = []
        for num_gpus in (1, 2, 4, 8, 16, 32, 64):
            row: list[object] = [num_gpus, -(-num_gpus // 4)]
            for stage in STAGES:
                gradient = application.gradient(stage, application.limits.initial_batch_size)
                best = application.goodput(gpu_type, gradient).best(Shape(num_gpus, -(-num_gpus // 4)))
                row += [best.batch_size(num_gpus), round(best.goodput, 1)] if best.goodput else [None, None]
            rows.append(row)
        columns = [text for stage in STAGES for text in (f"batch at {stage:.0%}", f"goodput at {stage:.0%}")]
        output.table(
            ["GPUs", "nodes", *columns],
            rows,
            title="Best total batch size and goodput (examples/s) as training goes on",
        )


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
    rows: list[list[object]] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput("--out", str(out), str(error), "Name a folder that you may write to") from error
    with output.progress("plotting", len(chosen) + 1) as advance:
        for each in chosen:
            learned = plots.learn(each, seed)
            written.append(plots.application_figure(each, learned, STAGES, out / f"{each.name}.png"))
            rows += [[each.name, step.observations, step.max_gpus, step.error, list(step.priors)] for step in learned]
            advance(1)
        written.append(plots.overview_figure(chosen, STAGES, out / "overview.png"))
        advance(1)
    columns = ["application", "observations", "largest K seen", "error on all shapes", "still priors"]
    if as_json:
        keys = ("application", "observations", "max_gpus", "error", "priors")
        output.print_json({"files": written, "fits": [dict(zip(keys, row, strict=True)) for row in rows]})
        return
    shown = [[*row[:3], _percent(float(str(row[3]))), ", ".join(map(str, row[4])) or "none"] for row in rows]  # type: ignore[call-overload]
    output.table(columns, shown, title="What a job knows of its own throughput as it explores (3 % measurement noise)")
    output.console.print("Pictures:")
    for path in written:
        output.console.print(f"  {path}", soft_wrap=True)
