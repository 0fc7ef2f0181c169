"""The convergence guard inside a job: efficiency over-stated four times is caught, a healthy job is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pollux.agent import adapting
from pollux.agent.batching import BatchConfig
from pollux.agent.journal import read_journal
from pollux.goodput.noise import NoiseAverage, NoiseSample
from pollux.torch import Job
from pollux.wire.entries import GuardFired

INITIAL, GROWN = 128, 512
GROWS_AT = 600
DIMENSIONS = 24
BATCHES_A_PASS = 64


@pytest.fixture(autouse=True)
def one_thread_and_beats_by_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Beats every 16 steps however fast the machine is, so that the guard sees the same numbers everywhere."""
    monkeypatch.setattr(adapting, "BEAT_S", 1e9)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def regression() -> TensorDataset:
    """Features of different size: the loss falls for long. Gradients hardly scatter: a larger batch brings nothing."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.arange(1, DIMENSIONS + 1) ** -0.5
    x = torch.randn(BATCHES_A_PASS * INITIAL, DIMENSIONS, generator=generator) * sizes
    truth = torch.randn(DIMENSIONS, generator=generator) / sizes.sqrt()
    return TensorDataset(x, x @ truth)


def train_with_growth(folder: Path, said: NoiseSample, epochs: int) -> tuple[Job, list[GuardFired]]:
    """The batch grows fourfold after 600 steps; from then on the noise is what `said` says."""
    torch.manual_seed(0)
    job = Job(
        max_batch_size=GROWN, report_every_s=1e6, measure_noise=False, rule="none", checkpoint_dir=folder
    )  # no tuning: the test alone changes the batch size
    model = nn.Linear(DIMENSIONS, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(regression(), batch_size=INITIAL, shuffle=True)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    adapter = job._made.adapter
    for _ in job.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            job.backward((model(x).squeeze(1) - y).square().mean())
            optimizer.step()
            if job.steps == GROWS_AT:
                adapter.noise = adapter._trusted = NoiseAverage(var_floor=0.0).update(said)
                adapter.apply(BatchConfig(GROWN, GROWN, 1), "the test asks for it", None)
    job.close()
    entries = read_journal(folder / "journal.jsonl")
    return job, [entry for entry in entries if isinstance(entry, GuardFired)]


def test_efficiency_overstated_four_times_is_caught_told_and_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pure_noise = NoiseSample((1e-12,), (1.0,), 1.0)  # a step of 4·M0 claims four iterations and is worth one
    _, told = train_with_growth(tmp_path, pure_noise, epochs=24)
    assert [entry.kind for entry in told[:2]] == ["suspected", "stepped_back"]
    suspected, stepped_back = told[:2]
    entries = read_journal(tmp_path / "journal.jsonl")
    assert entries[entries.index(suspected) + 1].state.batch.batch_size == INITIAL
    for entry in (suspected, stepped_back):
        assert entry.figures["seen"] < 0.5 * entry.figures["claimed"]
        assert entry.figures["largest_scale"] == 1.0
    assert "efficiency was over-stated" in caplog.text


def test_a_growth_that_claims_what_it_is_worth_is_left_alone(tmp_path: Path) -> None:
    no_noise = NoiseSample((1.0,), (1e-3,), 1.0)  # a step of 4·M0 claims next to nothing more than one of M0
    job, told = train_with_growth(tmp_path, no_noise, epochs=15)
    assert told == []
    assert job.batch_size == GROWN
