"""A replica that leaves with the state, which nobody took over: it saves alone. With real daemons: tests/elastic."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.agent.training import loader_of, network, sgd

from pollux.agent.checkpoint import Checkpoints
from pollux.agent.journal import read_journal
from pollux.agent.membership import Left
from pollux.torch import Job
from pollux.wire.entries import CheckpointSaved, TrainingStopped


def leaver(folder: Path | None) -> Job:
    """One that was not the first, and is no member any more."""
    job = Job(adapt=False, checkpoint_dir=folder)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(64, 16))
    turns = job.passes(1)
    next(turns)
    for count, (x, _, _) in enumerate(loader):
        optimizer.zero_grad()
        job.backward(model(x).square().mean())
        optimizer.step()
        if count == 2:
            break
    turns.close()
    job._replicas.become(1, 2, 1, None)
    job._made.assign_roles()
    job._replicas.is_member = False
    return job


@pytest.fixture(name="folder")
def a_folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def exit_code(job: Job, *, has_state_to_save: bool) -> object:
    with pytest.raises(SystemExit) as leaving:
        job._trained._go(Left(has_state_to_save))
    return leaving.value.code


def test_whoever_has_the_state_saves_it_whatever_its_rank(folder):
    job = leaver(folder)
    assert Checkpoints(folder).list() == ()
    assert exit_code(job, has_state_to_save=True) == 143
    loaded = Checkpoints(folder).load_latest()
    assert loaded is not None
    assert loaded.step == 3
    *_, saved, stopped = read_journal(folder / "journal.jsonl")
    assert isinstance(saved, CheckpointSaved)
    assert saved.checkpoint == str(loaded.path)
    assert isinstance(stopped, TrainingStopped)
    assert "nobody took over" in stopped.reason
    again = Job(adapt=False, checkpoint_dir=folder)
    module = network()
    again.prepare(module, sgd(module), loader_of(64, 16))
    assert again.steps == 3
    again.close()


def test_one_that_cannot_save_does_not_say_that_it_did(folder, caplog):
    job = leaver(folder)
    folder.rename(folder.with_name("moved"))
    folder.touch()
    assert exit_code(job, has_state_to_save=True) == 1
    assert "of step 3 is not on disk" in caplog.text
    assert "it is not saved" in caplog.text


def test_nor_does_one_without_a_folder(caplog):
    assert exit_code(leaver(None), has_state_to_save=True) == 1
    assert "it is not saved" in caplog.text


def test_one_whose_state_was_taken_over_saves_nothing(folder):
    assert exit_code(leaver(folder), has_state_to_save=False) == 0
    assert Checkpoints(folder).list() == ()
