"""Pictures of the goodput model. The only place of the command line that knows matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pollux.applications import Application
from pollux.core import Shape
from pollux.errors import MissingDependency
from pollux.goodput import Fit, GoodputModel, Observations, ShapeSet, fit, iteration_time, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GPUS_PER_NODE = 4
MAX_GPUS = 64
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
        best = truth.best(shape)
        if not best.goodput:
            break
        for m in (best.per_gpu_batch_size, max(limits.min_per_gpu_batch_size, best.per_gpu_batch_size // 2)):
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


def _truth(application: Application, stage: float = 0.5) -> GoodputModel:
    gpu_type = next(iter(application.throughput))
    return application.goodput(gpu_type, application.gradient(stage, application.limits.initial_batch_size))


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
        truth = _truth(application, stage)
        values = [float(truth.with_gradient(application.gradient(stage, M)).efficiency(M)) for M in batch.tolist()]
        axes.plot(batch, values, color=colour, label=f"{stage:.0%} of training")
    axes.set(title="Statistical efficiency", xlabel="total batch size", ylabel="progress per example", ylim=(0, 1.05))
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)


def _plot_goodput(axes: Axes, application: Application, stages: Sequence[float]) -> None:
    sizes = list(range(1, MAX_GPUS + 1))
    shapes = ShapeSet.of([packed(K) for K in sizes])
    found = tables([_truth(application, stage) for stage in stages], shapes)
    for goodput, stage, colour in zip(found.goodput, stages, COLOURS, strict=False):
        axes.plot(sizes, np.where(goodput > 0, goodput, np.nan), color=colour, label=f"{stage:.0%} of training")
    axes.set(title="Goodput of the best batch size", xlabel="GPUs, packed", ylabel="useful examples/s", ylim=(0, None))
    axes.legend(fontsize=8)


def _plot_batch_size(axes: Axes, application: Application, stages: Sequence[float]) -> None:
    sizes = np.arange(1, MAX_GPUS + 1)
    shapes = ShapeSet.of([packed(int(K)) for K in sizes])
    found = tables([_truth(application, stage) for stage in stages], shapes)
    batch = sizes * found.per_gpu_batch_size * (found.accumulation_steps + 1)
    for row, stage, colour in zip(batch, stages, COLOURS, strict=False):
        axes.plot(sizes, np.where(row > 0, row, np.nan), color=colour, label=f"{stage:.0%} of training")
    axes.set(title="Best total batch size", xlabel="GPUs, packed", ylabel="examples")
    axes.set_yscale("log", base=2)
    axes.legend(fontsize=8)


def overview_figure(applications: Sequence[Application], stages: Sequence[float], path: Path) -> Path:
    """All applications side by side: speedup in goodput over one GPU, early and late in training."""
    plt = _pyplot()
    columns = min(3, len(applications))
    rows = -(-len(applications) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.6 * columns, 2.9 * rows), layout="constrained", squeeze=False)
    figure.suptitle(
        "Goodput over one GPU: more GPUs pay off late in training, when large batches do", fontweight="bold"
    )
    sizes = list(range(1, MAX_GPUS + 1))
    shapes = ShapeSet.of([packed(K) for K in sizes])
    for axes, application in zip(grid.flat, applications, strict=False):
        found = tables([_truth(application, stage) for stage in stages], shapes)
        for goodput, stage, colour in zip(found.goodput, stages, COLOURS, strict=False):
            speedup = np.where(goodput > 0, goodput / goodput[0], np.nan)
            axes.plot(sizes, speedup, color=colour, label=f"{stage:.0%} of training")
        axes.plot(sizes, sizes, color="black", alpha=0.25, linewidth=1)
        axes.set(title=application.title, xlabel="GPUs", ylabel="speedup", xlim=(1, MAX_GPUS))
        axes.set_ylim(0, max(2.0, float(np.nanmax(found.goodput / found.goodput[:, :1])) * 1.1))
    for axes in grid.flat[len(applications) :]:
        axes.set_visible(False)
    grid.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
