"""Checkpoints and journals that earlier versions wrote: training goes on from them."""

import json

import pytest

pytest.importorskip("torch")

from tests.agent.scripts import printed_by
from tests.fixtures.recorded import TRAIN, VERSIONS, unpack

from pollux.agent.checkpoint import Checkpoints
from pollux.agent.journal import read_journal
from pollux.wire.entries import TrainingStarted

MORE_STEPS = 5


@pytest.fixture(params=VERSIONS)
def recorded(request, tmp_path):
    return unpack(request.param, tmp_path)


def test_a_checkpoint_is_read_whole(recorded):
    loaded = Checkpoints(recorded.checkpoints).load_latest()
    assert loaded is not None
    assert loaded.step == recorded.expected["checkpoint"]["step"]


def test_a_job_goes_on_from_a_checkpoint(recorded, fork):
    step = recorded.expected["checkpoint"]["step"]
    command = [str(TRAIN), "--steps", str(MORE_STEPS)]
    [printed] = fork(printed_by, [[command], {"POLLUX_CHECKPOINT_DIR": str(recorded.checkpoints)}])
    told = json.loads(printed.splitlines()[-1])
    assert (told["began"], told["ended"]) == (step, step + MORE_STEPS)
    assert told["seen"] >= step + MORE_STEPS  # the script's own count, one for each pass of a step
    assert Checkpoints(recorded.checkpoints).load_latest().step == step + MORE_STEPS


def test_a_journal_is_read_to_its_last_line(recorded):
    path = recorded.checkpoints / "journal.jsonl"
    entries = read_journal(path)
    assert len(entries) == len(path.read_text().splitlines())
    assert isinstance(entries[0], TrainingStarted)
    assert entries[-1].state.step == recorded.expected["checkpoint"]["step"]
