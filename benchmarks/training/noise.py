"""One replica of jobs whose gradient noise scale is known in closed form: `noise STEPS`.

Linear regression at fixed weights: x ~ N(0, diag c), y = ε ~ N(0, σ²), loss ½(xᵀw − y)². The gradient is g = Cw and
its covariance Σ = (wᵀCw + σ²)C + g gᵀ (derived in tests/goodput/test_noise.py), so that with P = diag(1/p)

    φ = tr(PΣPᵀ)/|Pg|² = (wᵀCw + σ²) Σ (cᵢ/pᵢ²) / Σ (gᵢ/pᵢ)² + 1

p is 1 for SGD; for Adam it is where the root of its second moment settles, √(gᵢ² + Σᵢᵢ/B). Weights stay fixed because
the learning rate is 0. Printed by replica 0: [{"optimizer", "way", "passes", "measured", "truth", "standard_error"}]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.training.rows import Rows, loader
from pollux.torch import Job

FEATURES = 64
SAMPLES = 200_000
BATCH = 96
"""Of all replicas together, however many they are."""
NOISE = 2.0
VARIANCES = torch.linspace(0.5, 2.0, FEATURES, dtype=torch.float64)
WEIGHTS = torch.linspace(1.0, -0.6, FEATURES, dtype=torch.float64)
ADAM_EPS = 1e-8
OFTEN = 10.0
"""Measuring may take ten times the training: every fourth step, which is as often as there is."""


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(WEIGHTS.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights


def true_noise_scale(optimizer: str) -> float:
    gradient = VARIANCES * WEIGHTS
    residual = float(WEIGHTS @ gradient) + NOISE**2
    divisor = torch.ones(FEATURES, dtype=torch.float64)
    if optimizer == "adam":
        variance = residual * VARIANCES + gradient.square()
        divisor = (gradient.square() + variance / BATCH).sqrt() + ADAM_EPS
    noise = residual * float((VARIANCES / divisor.square()).sum())
    return noise / float((gradient / divisor).square().sum()) + 1.0


def measured(rows: Rows, optimizer_name: str, passes: int, steps: int, **options: Any) -> tuple[float, float]:
    """What a whole job says of its noise scale, and the standard error that it sees in that."""
    replicas = distributed.get_world_size()
    model = Regression()
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer_name]
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.0)
    job = Job(max_batch_size=BATCH, max_per_gpu_batch_size=BATCH // (replicas * passes), noise_budget=OFTEN, **options)
    model, optimizer, batches = job.prepare(model, optimizer, loader(rows, batch_size=BATCH, shuffle=True))
    for _ in job.passes(1 + steps * BATCH // SAMPLES):
        for x, y in batches:
            optimizer.zero_grad()
            job.backward(0.5 * (model(x) - y).square().mean())
            optimizer.step()
            if job.steps >= steps:
                break
    noise = job.noise_scale
    assert noise is not None
    error = job._made.adapter.noise.relative_error()
    job.close()
    return noise, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(5)
    x = torch.randn(SAMPLES, FEATURES) * VARIANCES.float().sqrt()
    rows = Rows(x, NOISE * torch.randn(SAMPLES))
    is_alone = distributed.get_world_size() == 1
    ways: list[tuple[str, int, dict[str, Any]]] = [
        ("split batch" if is_alone else "replicas", 1, {}),
        ("accumulation" if is_alone else "replicas and accumulation", 2, {}),
    ]
    if is_alone:
        ways.append(("difference of two steps", 1, {"batch_dependent": True}))
    found = []
    for optimizer in ("sgd", "adam"):
        for seed, (way, passes, options) in enumerate(ways):
            value, error = measured(rows, optimizer, passes, arguments.steps, seed=seed, **options)
            found.append(
                {
                    "optimizer": optimizer,
                    "way": way,
                    "passes": passes,
                    "measured": value,
                    "truth": true_noise_scale(optimizer),
                    "standard_error": error,
                }
            )
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
