import contextlib
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.wire.strategies import entry_at, report_at, state_at

from pollux.agent import journal as journal_module
from pollux.agent.journal import Journal, read_journal
from pollux.core import dumps
from pollux.errors import InvalidDocument, MissingDependency
from pollux.wire.entries import BatchChanged, BatchSetting, LearningRateChanged, TrainingResumed, TrainingStarted

ROOT = Path(__file__).resolve().parents[2]
FACTORS = (1.0, 2.0)


def started(step=0, factors=FACTORS):
    return TrainingStarted(1e9, state_at(step, learning_rate_factors=factors), seed=7)


class Scalars:
    """Stands in for torch's writer."""

    def __init__(self, folder=None, **_options):
        self.written = []
        self.is_closed = False

    def add_scalar(self, tag, scalar_value, global_step):
        self.written.append((tag, scalar_value, global_step))

    def close(self):
        self.is_closed = True


class FullScalars(Scalars):
    def add_scalar(self, tag, scalar_value, global_step):
        raise OSError("No space left on device")

    close = add_scalar


def test_entries_are_lines_that_read_back_and_later_runs_append(tmp_path):
    path = tmp_path / "new" / "folder" / "journal.jsonl"
    first = Journal(path)
    first.write(started())
    first.write(entry_at(1))
    assert read_journal(path) == [started(), entry_at(1)]  # before it is closed
    first.close()
    first.close()
    second = Journal(path)
    second.write(entry_at(2))
    second.close()
    assert read_journal(path) == [started(), entry_at(1), entry_at(2)]
    assert path.read_text("ascii").splitlines() == [dumps(entry) for entry in read_journal(path)]


def test_without_a_path_nothing_is_written_but_all_is_told(tmp_path):
    heard = []
    journal = Journal(None, tell=heard.append)
    journal.write(entry_at(1))
    journal.scalars(1, {"loss": 1.0})
    journal.report(report_at(1))
    journal.close()
    assert heard == [entry_at(1)]


def test_a_line_that_was_cut_off_is_left_out_and_then_overwritten(tmp_path):
    path = tmp_path / "journal.jsonl"
    whole = dumps(entry_at(1)) + "\n"
    for length in range(len(whole)):
        path.write_text(whole + whole[:length], "ascii")
        assert read_journal(path) == [entry_at(1)]
        journal = Journal(path)
        journal.write(entry_at(2))
        journal.close()
        assert read_journal(path) == [entry_at(1), entry_at(2)]


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
def test_the_end_of_the_last_line_is_found_however_far_back_it_is(tmp_path, monkeypatch, block):
    monkeypatch.setattr(journal_module, "_BLOCK_BYTES", block)
    path = tmp_path / "journal.jsonl"
    torn = dumps(entry_at(5))[:-9]
    for kept in ([], [entry_at(1)], [entry_at(1), entry_at(2)]):
        path.write_text("".join(dumps(entry) + "\n" for entry in kept) + torn, "ascii")
        journal = Journal(path)
        journal.write(entry_at(3))
        journal.close()
        assert read_journal(path) == [*kept, entry_at(3)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text(f"{dumps(entry_at(1))}\nnonsense\n{dumps(entry_at(2))}\n", "ascii")
    with pytest.raises(InvalidDocument, match="is not JSON") as caught:
        read_journal(path)
    assert caught.value.field.startswith("line 2")
    assert str(path) in caught.value.fix


def test_a_file_of_another_kind_is_left_alone(tmp_path, caplog):
    path = tmp_path / "thesis.txt"
    path.write_text("Chapter one")
    journal = Journal(path)
    journal.write(entry_at(1))
    journal.write(entry_at(2))
    journal.close()
    assert path.read_text() == "Chapter one"
    assert len(caplog.records) == 1
    assert "is no journal" in caplog.text


def test_a_journal_that_cannot_be_opened_is_logged_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file" / "journal.jsonl")
    for step in range(3):
        journal.write(entry_at(step))
    journal.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@contextlib.contextmanager
def files_may_grow_to(num_bytes):
    """The kernel cuts writes short at that size, as a disk that fills up does. Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_logged_once_and_spoils_no_line(tmp_path, caplog):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write(entry_at(1))
    room = path.stat().st_size + 20
    with files_may_grow_to(room):
        journal.write(entry_at(2))
        is_torn = path.stat().st_size == room
        journal.write(entry_at(3))
    assert is_torn
    assert read_journal(path) == [entry_at(1)]
    journal.write(entry_at(4))
    journal.close()
    assert read_journal(path) == [entry_at(1), entry_at(4)]
    assert ["The disk took 20 of" in caplog.messages[0], "lacks 2 entries" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


def test_a_gap_is_told_when_the_disk_takes_entries_again(tmp_path, caplog):
    (tmp_path / "folder").touch()
    journal = Journal(tmp_path / "folder" / "journal.jsonl")
    journal.write(entry_at(1))
    journal.write(entry_at(2))
    (tmp_path / "folder").unlink()
    journal.write(entry_at(3))
    journal.write(entry_at(4))
    journal.close()
    assert read_journal(tmp_path / "folder" / "journal.jsonl") == [entry_at(3), entry_at(4)]
    assert ["cannot be written" in caplog.messages[0], "lacks 2 entries" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


def test_what_was_written_survives_a_kill(tmp_path):
    path = tmp_path / "journal.jsonl"
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from pollux.agent.journal import Journal\n"
        "from tests.wire.strategies import entry_at\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for step in range(5):\n"
        "    journal.write(entry_at(step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert read_journal(path) == [entry_at(step) for step in range(5)]


def test_threads_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    threads = [
        threading.Thread(target=lambda first=first: [journal.write(entry_at(first + i)) for i in range(50)])
        for first in (0, 50, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert sorted(entry.state.step for entry in read_journal(path)) == list(range(150))


class TestLearningRate:
    def entries(self, path, *factors):
        journal = Journal(path, clock=lambda: 5.0)
        journal.write(started())
        for step, values in enumerate(factors, 1):
            journal.learning_rate(state_at(step, learning_rate_factors=values))
        journal.close()
        return [entry for entry in read_journal(path) if isinstance(entry, LearningRateChanged)]

    def test_a_small_move_is_not_news(self, tmp_path):
        assert self.entries(tmp_path / "j", (1.005, 2.0), (0.995, 2.015), FACTORS) == []

    def test_small_moves_that_add_up_are(self, tmp_path):
        drift = [(1 + 0.004 * step, 2.0) for step in range(1, 10)]
        found = self.entries(tmp_path / "j", *drift)
        assert [(entry.state.step, entry.before) for entry in found] == [(3, FACTORS), (6, drift[2]), (9, drift[5])]
        assert found[0].state.learning_rate_factors == drift[2]
        assert found[0].at_s == 5.0

    def test_a_move_in_one_group_is(self, tmp_path):
        assert len(self.entries(tmp_path / "j", (1.0, 1.9))) == 1

    def test_a_factor_that_leaves_zero_and_another_number_of_groups_are(self, tmp_path):
        assert len(self.entries(tmp_path / "j", (0.0, 2.0), (1e-9, 2.0), (1e-9,))) == 3

    def test_after_a_resume_the_old_factors_do_not_count(self, tmp_path):
        journal = Journal(tmp_path / "j")
        journal.write(TrainingResumed(0.0, state_at(9, learning_rate_factors=(3.0,)), "c/9"))
        journal.learning_rate(state_at(9, learning_rate_factors=(3.0,)))
        journal.close()
        assert len(read_journal(tmp_path / "j")) == 1

    def test_the_first_factors_are_not_news_without_a_start(self):
        heard = []
        journal = Journal(None, tell=heard.append)
        journal.learning_rate(state_at(1, learning_rate_factors=(2.0,)))
        journal.learning_rate(state_at(2, learning_rate_factors=(4.0,)))
        assert [entry.before for entry in heard] == [(2.0,)]


@pytest.fixture
def stand_in(monkeypatch):
    made = []

    def use(kind):
        def make(*args, **options):
            made.append(kind(*args, **options))
            return made[-1]

        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", make)
        return made

    return use


class TestTensorBoard:
    def test_scalars_reach_a_real_event_file(self, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        journal = Journal(None, tmp_path)
        journal.write(started(0, (1.0,)))
        changed = state_at(10, batch=BatchSetting(128, 64), learning_rate_factors=(1.5,))
        journal.write(BatchChanged(1e9, changed, BatchSetting(64, 32), "tuned", 1.2))
        journal.scalars(20, {"loss": 0.5, "efficiency": 0.75, "goodput": 60.0, "noise_scale": 300.0})
        journal.close()
        read = EventAccumulator(str(tmp_path))
        read.Reload()
        found = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
        assert found == {
            "pollux/batch_size": [(0, 64.0), (10, 128.0)],
            "pollux/learning_rate_factor": [(0, 1.0), (10, 1.5)],
            "pollux/loss": [(20, 0.5)],
            "pollux/efficiency": [(20, 0.75)],
            "pollux/goodput": [(20, 60.0)],
            "pollux/noise_scale": [(20, 300.0)],
        }

    def test_a_report_gives_the_figures_that_it_has(self, tmp_path, stand_in):
        made = stand_in(Scalars)
        journal = Journal(None, tmp_path)
        journal.report(report_at(4, loss=0.5, throughput=9.0, efficiency=0.5, goodput=4.5, noise_scale=7.0))
        journal.report(report_at(5))
        journal.scalars(6, {"loss": float("nan"), "grad_norm": float("inf")})
        journal.close()
        setting = {"batch_size": 64, "learning_rate_factor": 1.0}
        figures = {"loss": 0.5, "throughput": 9.0, "efficiency": 0.5, "goodput": 4.5, "noise_scale": 7.0}
        first = [(f"pollux/{name}", value, 4) for name, value in {**setting, **figures}.items()]
        assert made[0].written == [*first, *((f"pollux/{name}", value, 5) for name, value in setting.items())]
        assert made[0].is_closed

    def test_each_group_has_a_curve_of_its_own(self, tmp_path, stand_in):
        made = stand_in(Scalars)
        Journal(None, tmp_path).write(started())
        names = [tag for tag, _, _ in made[0].written]
        assert names == ["pollux/batch_size", "pollux/learning_rate_factor/0", "pollux/learning_rate_factor/1"]

    def test_a_disk_that_fails_is_logged_once_and_the_file_goes_on(self, tmp_path, stand_in, caplog):
        stand_in(FullScalars)
        journal = Journal(tmp_path / "j", tmp_path)
        for step in range(3):
            journal.write(entry_at(step))
        journal.close()
        assert len(read_journal(tmp_path / "j")) == 3
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_a_close_that_fails_is_logged(self, tmp_path, stand_in, caplog):
        stand_in(FullScalars)
        Journal(None, tmp_path).close()
        assert "last numbers" in caplog.text

    def test_a_folder_that_cannot_be_made_is_logged(self, tmp_path, caplog):
        (tmp_path / "file").touch()
        journal = Journal(None, tmp_path / "file" / "tb")
        journal.write(entry_at(1))
        journal.close()
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_the_missing_package_is_named_at_once(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(MissingDependency, match=r"pollux\[tensorboard\]") as caught:
            Journal(None, tmp_path)
        assert caught.value.package == "tensorboard"
