"""SIGTERM: inside the job's loops it ends at a step with a checkpoint, anywhere else at once. The same under torchrun.

A script runs alone and under torchrun, is ended in the middle of a pass, and started again the other way.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest
import torch
from tests.agent.training import Run, delivered, expected, loader_of, network, sgd, train_turn

from pollux.agent.checkpoint import Checkpoints
from pollux.agent.journal import read_journal
from pollux.agent.signals import ignore_terminate, on_terminate
from pollux.torch import Job
from pollux.wire.entries import CheckpointSaved, TrainingFinished, TrainingResumed, TrainingStarted, TrainingStopped

ROOT = Path(__file__).resolve().parents[2]
COUNT, PASSES, STEPS = 1000, 3, 3 * 63
READY_AFTER = 10
"""Steps; a signal is heard at most two beats later, 32 steps."""
PATIENCE_S = 60.0

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
from torch.nn import functional
from pollux.torch import Job
from tests.agent.training import loader_of, network, sgd

torch.set_num_threads(1)
folder = Path(sys.argv[1])
job = Job(adapt=False, checkpoint_dir=folder.parent)
module = network()
model, optimizer, loader = job.prepare(module, sgd(module), loader_of({count}, 16, num_workers=1))
rank = job._replicas.rank
seen = (folder / f"seen-{{rank}}").open("a")
first = job.steps
try:
    for _ in job.passes({passes}):
        for x, y, index in loader:
            optimizer.zero_grad()
            job.backward(functional.mse_loss(model(x).squeeze(1), y))
            optimizer.step()
            seen.write(json.dumps([job.steps, index.tolist()]) + "\\n")
            seen.flush()
            if job.steps == first + {ready_after}:
                (folder / f"ready-{{rank}}").write_text(str(os.getpid()))
                while not (folder / "go").exists():
                    time.sleep(0.01)
            time.sleep(0.01)
except SystemExit as leaving:
    (folder / f"left-{{rank}}").write_text(str(leaving.code))
    raise
(folder / f"done-{{rank}}").write_text(str(job.num_replicas))
"""


def run_script(script: str, folder: str, replicas: int) -> None:
    """Alone, or under torchrun, whose own processes are started as it always does."""
    os.setsid()
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    multiprocessing.set_start_method("fork", force=True)  # as it is elsewhere: the loader's workers
    if replicas == 1:
        sys.argv = [script, folder]
        runpy.run_path(script, run_name="__main__")
    else:
        from torch.distributed import run

        run.main(["--standalone", "--nproc-per-node", str(replicas), script, folder])


Start = Callable[[str, int], tuple[Path, ForkServerProcess]]


@pytest.fixture
def start(tmp_path: Path, server: ForkServerContext) -> Iterator[Start]:
    """Start the script, in a folder of its own, on so many replicas; what still runs at the end is killed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(count=COUNT, passes=PASSES, ready_after=READY_AFTER))
    started: list[ForkServerProcess] = []

    def run(name: str, replicas: int) -> tuple[Path, ForkServerProcess]:
        folder = tmp_path / name
        folder.mkdir()
        process = server.Process(target=run_script, args=(str(script), str(folder), replicas))
        process.start()
        started.append(process)
        return folder, process

    yield run
    for process in started:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()


def wait_for(path: Path, process: ForkServerProcess) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text()):
        assert process.is_alive(), (path.parent / "log").read_text()
        assert time.monotonic() < deadline, (path.parent / "log").read_text()
        time.sleep(0.02)
    return path.read_text()


def ended(folder: Path, process: ForkServerProcess) -> int:
    process.join(PATIENCE_S)
    assert process.exitcode is not None, (folder / "log").read_text()
    return process.exitcode


def runs_of(folder: Path) -> list[Run]:
    """What each replica saw, by rank."""
    files = sorted(folder.glob("seen-*"))
    return [Run(seen=[tuple(json.loads(line)) for line in path.read_text().splitlines()]) for path in files]


def test_a_script_that_is_asked_to_end_leaves_a_checkpoint_and_goes_on_from_it(tmp_path: Path, start: Start) -> None:
    samples: list[int] = []
    step = 0
    for replicas, whom in ((2, "launcher"), (1, "script"), (2, "one replica")):
        folder, process = start(whom, replicas)
        pids = [int(wait_for(folder / f"ready-{rank}", process)) for rank in range(replicas)]
        os.kill(pids[-1] if whom == "one replica" else process.pid, signal.SIGTERM)
        (folder / "go").touch()
        code = ended(folder, process)
        assert code == 143 if replicas == 1 else code != 0
        # torchrun ends what is left once one has ended: by then the checkpoint must be there.
        assert (folder / f"left-{replicas - 1}").read_text() == "143"
        loaded = Checkpoints(tmp_path).load_latest()
        assert loaded is not None
        assert step + READY_AFTER < loaded.step < STEPS
        step = loaded.step
        runs = runs_of(folder)
        assert max(run.seen[-1][0] for run in runs) == step - 1
        samples += delivered(runs)

    folder, process = start("nobody", 1)
    (folder / "go").touch()
    assert ended(folder, process) == 0, (folder / "log").read_text()
    assert (folder / "done-0").read_text() == "1"
    assert samples + delivered(runs_of(folder)) == expected(COUNT, PASSES)
    story = [type(entry) for entry in read_journal(tmp_path / "journal.jsonl")]
    assert story[0] is TrainingStarted
    assert story[-1] is TrainingFinished
    stops = [number for number, kind in enumerate(story) if kind is TrainingStopped]
    assert len(stops) == 3
    assert {story[number + 1] for number in stops} == {TrainingResumed}


# --- one process, without a script of its own


def outside(rank: int, replicas: int) -> None:
    job = Job(adapt=False)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(64, 16))
    for _ in job.passes(1):
        train_turn(job, model, optimizer, loader, Run(), lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE_S)


def twice(rank: int, replicas: int) -> None:
    job = Job(adapt=False)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(64, 16))

    def after() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_S)

    for _ in job.passes(1):
        train_turn(job, model, optimizer, loader, Run(), after)


@pytest.mark.parametrize("function", [outside, twice])
def test_outside_of_the_loops_and_the_second_time_a_process_ends_at_once(spawn, function):
    with pytest.raises(AssertionError, match="died without a word"):
        spawn(function, 1)


def leaving(rank: int, replicas: int, folder: str, breaks: bool) -> tuple[object, int, int]:
    """(exit code, steps, where the handler stands) of a replica that is asked in the last pass of its loop."""
    job = Job(adapt=False, checkpoint_dir=folder)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(64, 16))
    if job.steps:
        return None, job.steps, 0
    job._made.adapter._beat_every = 1
    try:
        for epoch in job.passes(2):
            for count, (x, _, _) in enumerate(loader):
                optimizer.zero_grad()
                job.backward(model(x).square().mean())
                optimizer.step()
                if epoch == 1 and count == 1 and rank == replicas - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if epoch == 1 and count == 3 and breaks:
                    break
    except SystemExit as asked:
        return asked.code, job.steps, int(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    return "went on", job.steps, 0


@pytest.mark.parametrize("breaks", [False, True])
def test_a_break_and_the_end_of_the_loop_do_not_swallow_the_signal(spawn, tmp_path, breaks):
    answers = spawn(leaving, 2, str(tmp_path), breaks)
    assert {code for code, _, _ in answers} == {143}
    assert {is_default for _, _, is_default in answers} == {1}
    (steps,) = {steps for _, steps, _ in answers}
    assert spawn(leaving, 1, str(tmp_path), breaks) == [(None, steps, 0)]


# --- at the end of the loop


def finishing(rank: int, replicas: int, folder: str, asked: tuple[int, ...]) -> tuple[object, int, list[int]]:
    """(exit code, steps, epochs) of a replica; those that are asked get the signal when the loop is over.

    The first one gets it while it writes the last checkpoint, and sends it to the others then.
    """
    job = Job(adapt=False, checkpoint_dir=folder)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(64, 16))
    pids = torch.zeros(replicas, dtype=torch.int64)
    pids[rank] = os.getpid()
    pids = job._replicas.sum(pids)
    made = job._made
    save, settle = made.saver._checkpoints.save, made.adapter.settle

    def save_and_be_asked(*args):
        for other in asked:
            os.kill(int(pids[other]), signal.SIGTERM)
        time.sleep(0.2)
        return save(*args)

    def settle_and_be_asked():
        if 0 not in asked and rank in asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return settle()

    made.saver._checkpoints.save = save_and_be_asked if 0 in asked else save
    made.adapter.settle = settle_and_be_asked
    epochs = []
    try:
        for epoch in job.passes(2):
            epochs.append(epoch)
            train_turn(job, model, optimizer, loader, Run(), lambda: None)
    except SystemExit as leaving:
        return leaving.code, job.steps, epochs
    return "went on", job.steps, epochs


@pytest.mark.parametrize(("replicas", "asked"), [(1, (0,)), (2, (0,)), (2, (1,)), (2, (0, 1))])
def test_a_signal_at_the_end_of_the_loop_waits_for_the_last_checkpoint(spawn, tmp_path, replicas, asked):
    assert spawn(finishing, replicas, str(tmp_path), asked) == [(143, 8, [0, 1])] * replicas
    loaded = Checkpoints(tmp_path).load_latest()
    assert loaded is not None
    assert (loaded.step, loaded.facts["finished"]) == (8, True)
    story = [type(entry) for entry in read_journal(tmp_path / "journal.jsonl")]
    assert story[-3:] == [CheckpointSaved, TrainingFinished, TrainingStopped]
    # What comes after the loop is still to be done, and nothing else.
    assert spawn(finishing, 1, str(tmp_path), ()) == [("went on", 8, [])]


def past_the_loop(rank: int, replicas: int, folder: str) -> list[str]:
    """What a replica finds on the disk right after its last loop, where a signal would end it at once."""
    job = Job(adapt=False, checkpoint_dir=folder)
    module = network()
    model, optimizer, loader = job.prepare(module, sgd(module), loader_of(64, 16))
    checkpoints = job._made.saver._checkpoints
    save = checkpoints.save

    def save_slowly(*args):
        time.sleep(0.5)
        return save(*args)

    checkpoints.save = save_slowly
    for _ in job.passes(1):
        train_turn(job, model, optimizer, loader, Run(), lambda: None)
    return [path.name for path in Checkpoints(folder).list()]


def test_no_replica_is_past_its_loop_before_the_checkpoint_is_on_disk(spawn, tmp_path):
    assert spawn(past_the_loop, 2, str(tmp_path)) == [["checkpoint-000001-step-4"]] * 2


# --- under a daemon


def asked_often(rank: int, replicas: int) -> tuple[int, int, list[bool]]:
    """How often it was asked, how a process ended that was forked inside and asked twice, and who handles signals."""
    asked = []
    before = signal.getsignal(signal.SIGTERM)
    handlers = []
    with on_terminate(lambda: asked.append(1), is_managed=True):
        pass
    handlers.append(signal.getsignal(signal.SIGTERM) is before)
    with on_terminate(lambda: asked.append(1), is_managed=True):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    with on_terminate(lambda: asked.append(1), is_managed=True):
        ignore_terminate()
    os.kill(os.getpid(), signal.SIGTERM)
    handlers.append(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
    return len(asked), os.waitstatus_to_exitcode(status), handlers


def test_under_a_daemon_no_signal_after_the_first_ends_a_process(spawn):
    [(asked, child, handlers)] = spawn(asked_often, 1)
    assert asked >= 1
    assert child == -signal.SIGTERM
    assert handlers == [True, True]
