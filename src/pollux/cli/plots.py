"""Pictures of the goodput model. The only place of the command line that knows matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pollux.applications import Application
from pollux.core import Shape
from pollux.errors import MissingDependency
from pollux.goodput import Fit, GoodputModel, Observations, fit, iteration_time
from pollux.goodput.numerics import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GPUS_PER_NODE = 4
MAX_GPUS = 64
ALL_SIZES = range(1, MAX_GPUS + 1)
SIZES = (1, 2, 4, 8, 16, 32, 64)
STEPS = (1, 3, 8, 14)
"""After how many observations the learning job is looked at."""
COLOURS = ("#0b6e99", "#d9730d", "#6940a5", "#448361", "#ad1a72", "#64473a")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency("matplotlib", "pollux profile plot", "plot") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "font.size": 9}
    )
    return plt


def packed(num_gpus: int) -> Shape:
    """A job on as few nodes of four GPUs as hold it."""
    return Shape(num_gpus, -(-num_gpus // GPUS_PER_NODE))


class Learned(NamedTuple):
    """What a job believes after some observations."""

    observations: int
    max_gpus: int
    fit: Fit
    error: float
    """Mean relative error of the time per iteration over all sizes up to 64 GPUs, seen and unseen."""
    priors: tuple[str, ...]


def learn(application: Application, seed: int) -> list[Learned]:
    """Let a job measure itself with 3 % noise on 1, 2, 4 … GPUs, two batch sizes each, and fit as it goes."""
    rng = np.random.default_rng(seed)
    truth = _truth(application)
    limits = application.limits
    rows = []
    for K in SIZES:
        shape = packed(K)
        best = application.settled(_gpu_type(application), 0.5, shape)
        if not best.goodput:
            break
        # A job begins with M0 on one GPU, then follows its goodput.
        first = min(limits.initial_batch_size, limits.max_per_gpu_batch_size) if K == 1 else best.per_gpu_batch_size
        for m in (first, max(limits.min_per_gpu_batch_size, first // 2)):
            noise = np.exp(rng.normal(0.0, 0.03, 2))
            grad = float(truth.model.t_grad(truth.theta, m))
            step = float(truth.model.t_step(truth.theta, K, truth.model.level(shape.num_nodes, 1), m))
            rows.append((K, shape.num_nodes, 1, m, grad * noise[0], max(step, grad) * noise[1]))
    learned: list[Learned] = []
    everywhere = [(packed(K), m) for K in range(1, MAX_GPUS + 1) for m in {rows[0][3], limits.min_per_gpu_batch_size}]
    for count in sorted({min(step, len(rows)) for step in STEPS}):
        found = fit(Observations.from_rows(rows[:count]), warm=learned[-1].fit if learned else None)
        errors = [
            abs(_seconds(found.theta, truth, shape, m) / _seconds(truth.theta, truth, shape, m) - 1)
            for shape, m in everywhere
        ]
        learned.append(Learned(count, found.max_gpus_observed, found, float(np.mean(errors)), found.priors))
    return learned


def _seconds(theta: tuple[float, ...], truth: GoodputModel, shape: Shape, m: float) -> float:
    level = truth.model.level(shape.num_nodes, shape.num_racks)
    return float(iteration_time(truth.model, theta, shape.num_gpus, level, m, 0))


def _gpu_type(application: Application) -> str:
    return next(iter(application.throughput))


def _truth(application: Application) -> GoodputModel:
    gradient = application.gradient(0.5, application.limits.initial_batch_size)
    return application.goodput(_gpu_type(application), gradient)


def _settled(application: Application, stage: float) -> tuple[FloatArray, FloatArray]:
    """Goodput and total batch size of a tuned job on 1 … 64 packed GPUs; nan where nothing fits."""
    found = [(K, application.settled(_gpu_type(application), stage, packed(K))) for K in ALL_SIZES]
    goodput = np.array([best.goodput or np.nan for _, best in found])
    return goodput, np.array([best.batch_size(K) or np.nan for K, best in found])


def application_figure(
    application: Application, learned: Sequence[Learned], stages: Sequence[float], path: Path
) -> Path:
    """Four views of one application: what is learned, what noise allows, what goodput follows, which batch is best."""
    plt = _pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    figure.suptitle(f"{application.title}: the goodput model", fontweight="bold")
    _plot_learning(axes[0, 0], application, learned)
    _plot_efficiency(axes[0, 1], application, stages)
    _plot_goodput(axes[1, 0], application, stages)
    _plot_batch_size(axes[1, 1], application, stages)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _plot_learning(axes: Axes, application: Application, learned: Sequence[Learned]) -> None:
    truth = _truth(application)
    sizes = np.arange(1, MAX_GPUS + 1)
    m = min(application.limits.initial_batch_size, application.limits.max_per_gpu_batch_size)
    for step, colour in zip(learned, COLOURS, strict=False):
        seconds = [_seconds(step.fit.theta, truth, packed(int(K)), m) for K in sizes]
        axes.plot(sizes, seconds, color=colour, label=f"{step.observations} on K ≤ {step.max_gpus}")
    seconds = [_seconds(truth.theta, truth, packed(int(K)), m) for K in sizes]
    axes.plot(sizes, seconds, color="black", linestyle=":", linewidth=2, label="truth")
    axes.set(title=f"Learned time per iteration (m = {m})", xlabel="GPUs, packed", ylabel="seconds")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    axes.set_xscale("log", base=2)
    axes.legend(title="after observations", fontsize=8, ncols=2, loc="upper left")


def _plot_efficiency(axes: Axes, application: Application, stages: Sequence[float]) -> None:
    limits = application.limits
    batch = np.geomspace(limits.initial_batch_size, limits.max_batch_size, 60)
    for stage, colour in zip(stages, COLOURS, strict=False):
        truth = _truth(application)
        values = [float(truth.with_gradient(application.gradient(stage, M)).efficiency(M)) for M in batch.tolist()]
        axes.plot(batch, values, color=colour, label=f"{stage:.0%} of training")
    axes.set(title="Statistical efficiency", xlabel="total batch size", ylabel="progress per example", ylim=(0, 1.05))
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)


def _plot_goodput(axes: Axes, application: Application, stages: Sequence[float]) -> None:
    for stage, colour in zip(stages, COLOURS, strict=False):
        axes.plot(ALL_SIZES, _settled(application, stage)[0], color=colour, label=f"{stage:.0%} of training")
    axes.set(title="Goodput of the best batch size", xlabel="GPUs, packed", ylabel="useful examples/s", ylim=(0, None))
    axes.legend(fontsize=8)


def _plot_batch_size(axes: Axes, application: Application, stages: Sequence[float]) -> None:
    limits = application.limits
    for stage, colour in zip(stages, COLOURS, strict=False):
        axes.plot(ALL_SIZES, _settled(application, stage)[1], color=colour, label=f"{stage:.0%} of training")
    axes.set(title="Best total batch size", xlabel="GPUs, packed", ylabel="examples")
    axes.set_yscale("log", base=2)
    axes.set_ylim(limits.initial_batch_size * 0.8, limits.max_batch_size * 1.25)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(fontsize=8)


def overview_figure(applications: Sequence[Application], stages: Sequence[float], path: Path) -> Path:
    """All applications side by side: speedup in goodput over one GPU, early and late in training."""
    plt = _pyplot()
    columns = min(3, len(applications))
    rows = -(-len(applications) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.6 * columns, 2.9 * rows), layout="constrained", squeeze=False)
    figure.suptitle("What more GPUs are worth depends on the task and on the stage of training", fontweight="bold")
    for axes, application in zip(grid.flat, applications, strict=False):
        highest = 2.0
        for stage, colour in zip(stages, COLOURS, strict=False):
            goodput, _ = _settled(application, stage)
            axes.plot(ALL_SIZES, goodput / goodput[0], color=colour, label=f"{stage:.0%} of training")
            highest = max(highest, float(np.nanmax(goodput / goodput[0])))
        axes.plot(ALL_SIZES, ALL_SIZES, color="black", alpha=0.25, linewidth=1)
        axes.set(title=application.title, xlabel="GPUs", ylabel="goodput over one GPU", xlim=(1, MAX_GPUS))
        axes.set_ylim(0, highest * 1.1)
    for axes in grid.flat[len(applications) :]:
        axes.set_visible(False)
    grid.flat[0].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
