"""The six applications of the paper as inputs of benchmarks: limits, parameters, noise, and measured times.

Parameters are rounded results of our own fits. Measured times come from POLLUX_DATA (default: ../shared/data beside
the checkout); without it they are made from the parameters with noise, and whoever uses them says so.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pollux.core import BatchLimits, GradientStats, Observation, ObservationKey, Shape
from pollux.goodput import PAPER, GoodputModel, Observations, ThetaSys, t_grad, t_iter

ROOT = Path(__file__).resolve().parents[1]
REALISTIC = "workloads-realistic"
"""The folder of workloads whose jobs ask for what owners asked for."""
NOISE = 0.03
"""Standard deviation of the logarithm of made-up times."""


@dataclass(frozen=True, slots=True)
class Application:
    limits: BatchLimits
    theta: ThetaSys
    phi: tuple[float, float]
    """Noise scale early and late in training, in examples."""

    def gradient(self, rng: np.random.Generator) -> GradientStats:
        """Statistics with φ anywhere between early and late."""
        phi = float(np.exp(rng.uniform(*np.log(self.phi))))
        return GradientStats(sqr=1.0, var=phi / self.limits.initial_batch_size)

    def theta_near(self, rng: np.random.Generator) -> tuple[float, ...]:
        """Parameters of a job like this one: each time up to a few tens of per cent off, γ anywhere in 1 … 4."""
        times = np.array(self.theta[:-1]) * np.exp(rng.normal(0.0, 0.2, len(self.theta) - 1))
        return (*times.tolist(), float(rng.uniform(1.0, 4.0)))

    def model(self, rng: np.random.Generator) -> GoodputModel:
        """A job like this one, at some point of its training."""
        return GoodputModel(PAPER, self.theta_near(rng), self.gradient(rng), self.limits)


APPLICATIONS = {
    "bert": Application(
        BatchLimits(12, 384, 4, 12), ThetaSys(0.17, 0.0589, 0.268, 0.0438, 1.37, 0.0114, 2.02), (4e2, 1e3)
    ),
    "cifar10": Application(
        BatchLimits(128, 4096, 32, 1024), ThetaSys(0.0149, 0.000739, 0.0347, 0.00536, 0.125, 0.0027, 2.52), (70, 4e4)
    ),
    "deepspeech2": Application(
        BatchLimits(20, 640, 10, 80), ThetaSys(0.244, 0.027, 0.154, 0.148, 0.756, 0.0104, 2.35), (10, 2e5)
    ),
    "imagenet": Application(
        BatchLimits(200, 12800, 20, 200), ThetaSys(0.062, 0.00454, 0.0711, 0.0196, 0.312, 0.00642, 2.89), (9e2, 1.4e4)
    ),
    "ncf": Application(
        BatchLimits(256, 32768, 32, 32768),
        ThetaSys(0.00686, 7.4e-07, 0.00294, 0.00122, 0.0144, 0.000519, 1.0),
        (2e4, 6e7),
    ),
    "yolov3": Application(
        BatchLimits(8, 512, 4, 8), ThetaSys(0.171, 0.0256, 0.0654, 0.0814, 0.743, 0.0111, 1.09), (0.6, 5e3)
    ),
}

Profile = dict[ObservationKey, Observation]


def traces() -> Path | None:
    """The folder of measured times, one subfolder an application; None if it is not here."""
    folder = (
        Path(os.environ.get("POLLUX_DATA") or ROOT.parent / "shared" / "data").resolve() / "pollux-osdi21" / "traces"
    )
    return folder if folder.is_dir() else None


def workloads(traces: Path, folder: str = "workloads") -> list[Path]:
    """The provided samples of a folder beside the traces, in order."""
    return sorted((traces.parent / folder).glob("*.csv"))


def profiles(rng: np.random.Generator) -> dict[str, Profile]:
    """{application: all that was measured of it}, or made-up times where there is no measured data."""
    folder = traces()
    if folder is None:
        return {name: dict(_made_up(application, rng)) for name, application in APPLICATIONS.items()}
    return {name: dict(_measured(folder / name)) for name in APPLICATIONS}


def all_rows(folder: Path) -> dict[str, Observations]:
    """{application: every measured row}, also those of different placements with equal (N, K, m)."""
    found = {}
    for name in APPLICATIONS:
        rows = [
            (
                key.shape.num_gpus,
                key.shape.num_nodes,
                1,
                key.per_gpu_batch_size,
                seen.grad_time_s,
                seen.iteration_time_s,
            )
            for key, seen in _measured(folder / name)
        ]
        found[name] = Observations.from_rows(rows)
    return found


def _measured(folder: Path) -> Iterator[tuple[ObservationKey, Observation]]:
    """Rows of both files. In a profile, of equal (N, K, m), as different placements give, the last one stays."""
    for file in ("placements.csv", "scalability.csv"):
        with (folder / file).open(newline="") as lines:
            for row in csv.DictReader(lines):
                if "placement" in row:
                    shape = Shape(sum(map(int, row["placement"])), len(row["placement"]))
                else:
                    shape = Shape(int(row["num_replicas"]), int(row["num_nodes"]))
                key = ObservationKey(shape, int(row["local_bsz"]))
                yield key, Observation(0.0, 0, float(row["step_time"]), float(row["sync_time"]), 1)


def _made_up(application: Application, rng: np.random.Generator) -> Iterator[tuple[ObservationKey, Observation]]:
    """Densest packings of 4 GPUs a node up to 64 GPUs, each with up to eight batch sizes."""
    limits = application.limits
    sizes = np.geomspace(limits.min_per_gpu_batch_size, limits.max_per_gpu_batch_size, 8)
    for K in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        for m in sorted({round(size) for size in sizes}):
            N = -(-K // 4)
            noise = np.exp(rng.normal(0.0, NOISE, 2))
            whole = float(t_iter(application.theta, K, N, m) * noise[0])
            grad = min(float(t_grad(application.theta, m) * noise[1]), whole)
            yield ObservationKey(Shape(K, N), m), Observation(0.0, 0, whole, whole - grad, 1)
