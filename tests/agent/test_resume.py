"""A job that ends and is started again goes on as if nothing had been: same samples, same weights, same knowledge."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.agent.training import (
    Run,
    adamw,
    delivered,
    expected,
    loader_of,
    network,
    sgd,
    steady,
    train_turn,
    weights_of,
)
from torch import nn
from torch.nn import functional

from pollux.agent.batching import BatchConfig
from pollux.agent.checkpoint import Checkpoints
from pollux.errors import CheckpointError
from pollux.torch import Job

COUNT = 203


class KilledError(Exception):
    """The process dies here: nothing after the last checkpoint counts."""


def finish_writes(job: Job) -> None:
    assert job._made.saver._writer.flush(60.0)


def train_until(
    folder: Path | None,
    *,
    die_at: int | None = None,
    turns: int = 3,
    save_at: int | None = None,
    make_optimizer: Any = sgd,
    extra: tuple[nn.Module, ...] = (),
    **options: Any,
) -> Run:
    """Train, have a checkpoint taken soon after step `save_at`, and die at step `die_at`."""
    torch.manual_seed(1)
    job = Job(adapt=False, checkpoint_dir=folder, **options)
    module = network(*extra)
    model, optimizer, loader = job.prepare(module, make_optimizer(module), loader_of(COUNT, 16))
    steady(job)
    run = Run(answer=job)

    def after() -> None:
        if job.steps == save_at:
            job.save()
        if job.steps == die_at:
            if job.is_main:
                finish_writes(job)
            raise KilledError

    try:
        for _ in job.passes(turns):
            train_turn(job, model, optimizer, loader, run, after)
    except KilledError:
        pass
    run.weights = weights_of(module)
    job.close()
    return run


def resumed_step(folder: Path) -> int:
    """Of the newest checkpoint."""
    loaded = Checkpoints(folder).load_latest()
    assert loaded is not None
    return loaded.step


def until(run: Run, step: int) -> Run:
    return dataclasses.replace(run, seen=[one for one in run.seen if one[0] < step])


# --- one replica, bit for bit


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_a_resumed_run_goes_on_bit_for_bit_in_the_middle_of_a_pass(tmp_path, make_optimizer):
    options = {"make_optimizer": make_optimizer, "extra": (nn.Dropout(0.3),)}
    whole = train_until(None, **options)
    first = train_until(tmp_path, die_at=20, save_at=3, **options)
    step = resumed_step(tmp_path)
    assert 3 < step < 20
    assert step % 13 != 0  # in the middle of a pass
    second = train_until(tmp_path, **options)
    assert delivered([until(first, step)]) + delivered([second]) == expected(COUNT, 3)
    assert second.losses[-1] == whole.losses[-1]
    assert second.weights.tobytes() == whole.weights.tobytes()


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path, caplog):
    whole = train_until(None, extra=(nn.Dropout(0.3),))
    train_until(tmp_path, die_at=12, save_at=2, extra=(nn.Dropout(0.3),))
    before = resumed_step(tmp_path)
    train_until(tmp_path, die_at=30, save_at=18, extra=(nn.Dropout(0.3),))
    newest = Checkpoints(tmp_path).list()[-1]
    assert resumed_step(tmp_path) > before
    model = newest / "model.pt"
    model.write_bytes(model.read_bytes()[:-1])
    second = train_until(tmp_path, extra=(nn.Dropout(0.3),))
    assert f"{newest}" in caplog.text
    assert second.seen[0][0] == before
    assert second.weights.tobytes() == whole.weights.tobytes()


def test_training_does_not_begin_anew_when_no_checkpoint_can_be_used(tmp_path):
    train_until(tmp_path, die_at=12, save_at=2)
    for path in Checkpoints(tmp_path).list():
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="can be used"):
        train_until(tmp_path)


# --- another number of replicas


def part(rank: int, replicas: int, folder: str, arguments: dict[str, Any]) -> Run:
    run = train_until(Path(folder), **arguments)
    run.answer = run.answer.batch_size
    return run


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_replicas_goes_on_with_the_samples_that_are_left(spawn, tmp_path, before, after):
    whole = train_until(None)
    first = spawn(part, before, str(tmp_path), {"die_at": 20, "save_at": 3})
    step = resumed_step(tmp_path)
    assert 3 < step < 20
    assert step % 13 != 0
    second = spawn(part, after, str(tmp_path), {})
    seen = delivered([until(run, step) for run in first]) + delivered(second)
    assert seen == expected(COUNT, 3)
    for run in second:
        assert run.weights.tobytes() == second[0].weights.tobytes()
        assert np.linalg.norm(run.weights - whole.weights) <= 1e-5 * np.linalg.norm(whole.weights)


# --- everything else that a job knows


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@dataclasses.dataclass
class Script:
    """A whole script: schedule, scaler, averages, registered objects, state, two loops."""

    folder: Path
    die_at: int | None = None
    per_iteration: bool = False
    adapt: bool = False
    seen: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    run: Run = dataclasses.field(default_factory=Run)

    def __call__(self) -> Script:
        torch.manual_seed(2)
        self.early, self.late = Counter(), Counter()
        self.job = job = Job(adapt=self.adapt, max_batch_size=64, checkpoint_dir=self.folder, checkpoint_every_s=1e-6)
        job.register("early", self.early)
        module = network()
        optimizer = sgd(module)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20 if self.per_iteration else 1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10)
        self.model, self.optimizer, self.scaler, loader, self.schedule = job.prepare(
            module, optimizer, scaler, loader_of(COUNT, 16), schedule
        )
        steady(job)
        job.register("late", self.late)
        job.state.setdefault("best", 0)
        self.average = job.average("loss")
        try:
            for name, turns in (("first", 2), ("second", 3)):
                for epoch in job.epochs(turns):
                    self.seen.append((name, epoch))
                    self.turn(loader)
                    if not self.per_iteration:
                        self.schedule.step()
        except KilledError:
            pass
        self.weights = weights_of(module)
        self.rate = optimizer.param_groups[0]["lr"]
        job.close()
        return self

    def turn(self, loader: Any) -> None:
        job = self.job
        for x, y, index in loader:
            self.optimizer.zero_grad()
            loss = functional.mse_loss(self.model(x).squeeze(1), y)
            job.backward(self.scaler.scale(loss))
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.per_iteration:
                self.schedule.step()
            self.average.add(float(loss.detach()), count=len(x))
            self.early.value += len(x)
            self.late.value += 2 * len(x)
            job.state["best"] += len(x)
            self.run.seen.append((job.steps, index.tolist()))
            if job.steps == self.die_at:
                finish_writes(job)
                raise KilledError

    @property
    def facts(self) -> dict[str, Any]:
        """What has to be equal after an interruption."""
        return {
            "weights": self.weights.tobytes(),
            "rate": self.rate,
            "scale": self.scaler.get_scale(),
            "early": self.early.value,
            "late": self.late.value,
            "state": self.job.state,
            "average": self.average.compute(),
            "progress": self.job.progress,
            "schedule": self.schedule.last_epoch,
        }


@pytest.mark.parametrize("per_iteration", [False, True])
@pytest.mark.parametrize("die_at", [20, 45])
def test_all_that_a_script_keeps_survives_and_finished_loops_are_not_run_again(tmp_path, per_iteration, die_at):
    whole = Script(tmp_path / "whole", per_iteration=per_iteration)()
    assert whole.seen == [("first", 0), ("first", 1), ("second", 0), ("second", 1), ("second", 2)]
    assert whole.rate < 0.05
    assert whole.scaler.get_scale() > 4.0
    first = Script(tmp_path / "parts", die_at, per_iteration)()
    second = Script(tmp_path / "parts", None, per_iteration)()
    assert second.seen == whole.seen[die_at // 13 :]
    assert second.facts == whole.facts
    step = second.run.seen[0][0]
    assert step > 0
    assert delivered([until(first.run, step), second.run]) == expected(COUNT, 5)
    third = Script(tmp_path / "parts", None, per_iteration)()
    assert third.seen == []
    assert third.facts == whole.facts


def test_what_the_agent_has_learnt_survives(tmp_path):
    job = Job(max_batch_size=64, checkpoint_dir=tmp_path, report_every_s=1e6)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(COUNT, 16))
    run = Run()

    def after() -> None:
        if job.steps == 60 and job._made.stepper.is_last:
            job._made.dealer.config = BatchConfig(40, 20, 2)
            job._made.adapter._memory.failed(48)
            job._made.adapter._memory.proven = 20

    for _ in job.passes(12):
        train_turn(job, model, optimizer, loader, run, after)
    job.close()
    before = job._made.adapter
    module = network()
    again = Job(max_batch_size=64, checkpoint_dir=tmp_path)
    again.prepare(module, sgd(module), loader_of(COUNT, 16))
    after_it = again._made.adapter
    assert before.noise.effective_samples > 0
    assert after_it.noise == before.noise
    assert again.noise_scale == job.noise_scale
    assert after_it.guard.state() == before.guard.state()
    assert after_it.profile() == before.profile()
    assert after_it.profile().observations
    assert after_it.limits == before.limits
    assert after_it.limits.max_per_gpu_batch_size == 24
    assert again._made.dealer.config == job._made.dealer.config
    assert again.batch_size == 40
    assert again.progress == job.progress
    assert again.steps == job.steps
    again.close()


# --- on an interval


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    begun, release = threading.Event(), threading.Event()
    written: list[int] = []
    save = Checkpoints.save

    def slow(self: Checkpoints, step: int, *args: Any) -> Path:
        begun.set()
        assert release.wait(60.0)
        written.append(step)
        return save(self, step, *args)

    monkeypatch.setattr(Checkpoints, "save", slow)
    job = Job(adapt=False, checkpoint_dir=tmp_path, checkpoint_every_s=1e-6)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(COUNT, 16))
    steady(job)
    steps_meanwhile = 0

    def after() -> None:
        nonlocal steps_meanwhile
        assert job.steps < 3 or begun.wait(60.0)
        steps_meanwhile += begun.is_set() and not release.is_set()
        if steps_meanwhile == 30:
            release.set()

    for _ in job.passes(6):
        train_turn(job, model, optimizer, loader, Run(), after)
    job.close()
    assert steps_meanwhile == 30
    assert written[-1] == job.steps


def test_a_checkpoint_that_is_due_is_made_once(tmp_path):
    job = Job(adapt=False, checkpoint_dir=tmp_path)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(COUNT, 16))
    steady(job)
    saver = job._made.saver
    now, saved = 0.0, []
    saver._clock = lambda: now
    saver._last_s = now
    submit = saver._writer.submit

    def note(step: int, *args: Any) -> bool:
        saved.append(step)
        return submit(step, *args)

    saver._writer.submit = note

    def after() -> None:
        nonlocal now
        now += 30.0  # one in ten steps is due

    for _ in job.passes(8):
        train_turn(job, model, optimizer, loader, Run(), after)
    job.close()
    gaps = np.diff(saved[:-1])
    assert len(saved) > 3
    assert gaps.min() >= 10


# --- between loops


def two_loops(folder: Path | None, *, dies: bool = False) -> np.ndarray:
    """A script that draws random numbers of its own and evaluates between two loops."""
    torch.manual_seed(1)
    job = Job(adapt=False, checkpoint_dir=folder)
    module = network(nn.Dropout(0.3))
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(COUNT, 16))
    steady(job)
    for loop in range(2):
        for _ in job.passes(2):
            train_turn(job, model, optimizer, loader, Run(), lambda: None)
        if dies:
            break
        if loop == 0:
            with torch.no_grad():
                module[0].weight.add_(0.1 * torch.randn_like(module[0].weight))
    job.close()
    return weights_of(module)


def test_random_numbers_go_on_where_they_were_when_a_loop_ended(tmp_path):
    whole = two_loops(None)
    two_loops(tmp_path, dies=True)
    assert two_loops(tmp_path).tobytes() == whole.tobytes()
