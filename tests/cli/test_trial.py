"""Trials: how jobs are submitted and watched, what is collected of them, and how busy a machine is."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pollux.cli.trial import running
from pollux.cli.trial.cluster import TrialCluster
from pollux.cli.trial.faults import faults_of, job_faults, slip_of
from pollux.cli.trial.folder import check_keep, trial_folder
from pollux.cli.trial.machine import CpuTime, cpu_time
from pollux.cli.trial.running import Outage, Submission, Trial, TrialJob, notices, printed_result, run_trial
from pollux.core import FrozenMap, JobId, Phase
from pollux.errors import InvalidInput, InvalidSpec
from pollux.wire.api import ClusterView, EventView, JobDetail, JobList, JobView, LogFile, LogList

FACTS = {"team": "", "is_rigid": False, "priority": 0, "min_gpus": 1, "max_gpus": None, "gpus": 1, "generation": 1}
FACTS |= {"allocation": FrozenMap(), "next_allocation": None, "reallocations": 0, "failures": 0, "retries": 0}
FACTS |= {"submitted_at_s": 0.0, "started_at_s": 0.0, "attained_gpu_s": 0.0}


class FakeCluster:
    """A service whose jobs end in the phases that it was given, one look after they were submitted."""

    def __init__(self, folder, ends):
        self.folder, self.ends = folder, ends
        self.jobs = {}
        self.killed = 0
        self.said = []
        self.on_start = lambda: None

    def ask(self, question):
        submitted = JobList(tuple(map(self.view, self.jobs)))
        client = SimpleNamespace(
            submit=self.submit,
            cluster=self.cluster,
            job=self.job,
            logs=self.logs,
            read_log=self.read_log,
            events=self.events,
            jobs=lambda all: submitted,
        )
        return question(client)

    def submit(self, document):
        job = JobId(f"{document['name']}-1")
        self.jobs[job] = document["name"]
        self.said.append(document["name"])
        return SimpleNamespace(id=job)

    def cluster(self):
        return ClusterView("1", 1, "pollux", 5.0, 1, 0.0, 0.0, False, 4, 4, (), FrozenMap())

    def view(self, job):
        phase = self.ends[self.jobs[job]]
        finished = 1.0 if phase.is_terminal else None
        return JobView(id=job, name=self.jobs[job], phase=phase, finished_at_s=finished, step=7, **FACTS)

    def job(self, job):
        rest = {"command": (), "working_dir": "", "env_names": (), "application": None, "gpu_type": None}
        rest |= {"requested_gpus": None, "is_preemptible": True, "has_fixed_batch": False, "initial_batch_size": None}
        rest |= {"max_batch_size": None, "realloc_delay_s": None, "fit_error": None}
        return JobDetail(job=self.view(job), checkpoint_dir=str(self.folder / job), **rest)

    def logs(self, job):
        return LogList((LogFile("r0", "n0", 10, False, 0.0),))

    def read_log(self, job, node, replica, offset):
        return SimpleNamespace(text=f"{self.jobs[job]} says\n")

    def events(self, after, limit):
        found = [EventView(number, 1.0, "JobFinished", job, "…") for number, job in enumerate(self.jobs, 1)]
        left = [event for event in found if event.sequence > after]
        return SimpleNamespace(events=left, next=len(found))

    def kill_service(self):
        self.killed += 1

    def start_again(self):
        self.killed += 1
        self.on_start()


def submission(name, at_s=0.0):
    return Submission(at_s, {"name": name, "command": ["python", f"{name}.py"]})


def notice(at_s, kind, heard_s=None):
    return EventView(1, heard_s or at_s, kind, "a-1", "…", FrozenMap({"at_s": at_s, "state": {"replicas": 1}}))


class TestATrial:
    def test_submits_in_order_and_collects_what_is_left(self, tmp_path):
        cluster = FakeCluster(tmp_path, {"a": Phase.SUCCEEDED, "b": Phase.SUCCEEDED})
        told, looks = [], []
        found = run_trial(
            cluster, [submission("a"), submission("b", 0.05)], limit_s=30.0, tell=told.append, show=looks.append
        )
        assert cluster.said == ["a", "b"]
        assert found.has_ended
        assert found.failed == []
        assert [job.name for job in found.jobs] == ["a", "b"]
        assert found.jobs[1].printed == ("b says\n",)
        assert [event.job for event in found.jobs[0].events] == ["a-1"]
        assert len(found.events) == 2
        assert "submitted b (python b.py)" in told[-1]
        assert looks

    def test_that_stops_at_a_failure_submits_no_more(self, tmp_path):
        cluster = FakeCluster(tmp_path, {"a": Phase.FAILED})
        found = run_trial(cluster, [submission("a"), submission("b", 500.0)], limit_s=30.0, stops_at_failure=True)
        assert not found.has_ended
        assert [job.name for job in found.failed] == ["a"]

    def test_without_an_end_is_cut_short(self, tmp_path):
        cluster = FakeCluster(tmp_path, {"a": Phase.RUNNING})
        found = run_trial(cluster, [submission("a")], limit_s=0.01)
        assert not found.has_ended
        assert found.failed == []

    def test_kills_the_service_once_and_tells_how_far_jobs_came(self, tmp_path, monkeypatch):
        monkeypatch.setattr(running, "OUTAGE_S", 0.0)
        monkeypatch.setattr(running, "LOOK_S", 0.01)
        cluster = FakeCluster(tmp_path, {"a": Phase.RUNNING})
        cluster.on_start = lambda: cluster.ends.update(a=Phase.SUCCEEDED)
        found = run_trial(cluster, [submission("a")], limit_s=100.0, kill_service_at_s=0.05)
        assert cluster.killed == 2  # and started again
        assert found.outage is not None
        assert found.outage.steps == {"a": (7, 7)}

    def test_says_that_the_cluster_is_ended_if_somebody_loses_patience(self, tmp_path):
        told = []

        def press(look):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_trial(
                FakeCluster(tmp_path, {"a": Phase.RUNNING}),
                [submission("a")],
                limit_s=9.0,
                tell=told.append,
                show=press,
            )
        assert told[-1].startswith("Ending the cluster")

    def test_a_submission_has_a_name_and_a_time(self):
        with pytest.raises(InvalidSpec, match="at_s"):
            submission("a", -1.0)
        with pytest.raises(InvalidSpec, match="name"):
            Submission(0.0, {})


class TestACluster:
    def test_hands_more_options_on_to_pollux_up(self, tmp_path):
        cluster = TrialCluster(
            tmp_path, "fifo", nodes=2, slots=4, interval_s=60.0, options=("--emulate", "--compress", "20")
        )
        assert cluster._options[-3:] == ["--emulate", "--compress", "20"]
        assert cluster._options[:2] == ["--policy", "fifo"]


class TestNotices:
    def test_are_told_once_in_the_order_in_which_they_happened(self):
        events = [notice(5.0, "BatchChanged", 7.0), notice(2.0, "TrainingStarted"), notice(5.0, "BatchChanged")]
        events.append(EventView(1, 1.0, "JobSubmitted", "a-1", "…"))
        assert [event.kind for event in notices(events)] == ["TrainingStarted", "BatchChanged"]

    def test_a_result_is_the_last_line_that_is_one(self):
        assert printed_result('{"steps": 1}\nwarning\n{"steps": 2}\n[3]\n4\n') == {"steps": 2}
        assert printed_result("nothing\n") is None


class TestAFolder:
    def test_is_gone_afterwards_but_for_what_is_kept(self, tmp_path):
        with trial_folder(tmp_path / "kept") as base:
            (base / "service.log").write_text("said")
        assert not base.exists()
        assert (tmp_path / "kept" / "service.log").read_text() == "said"
        with pytest.raises(InvalidInput, match="--keep"):
            check_keep(tmp_path / "kept")
        check_keep(tmp_path / "other")
        check_keep(None)


class TestAMachine:
    def test_is_as_busy_as_its_cores_were_not_idle(self, tmp_path):
        stat = tmp_path / "stat"
        stat.write_text("cpu  10 0 20 60 10 0 0 0 5 5\ncpu0 1 2 3 4\n")
        before = cpu_time(stat)
        stat.write_text("cpu  40 0 50 90 20 0 0 0 9 9\ncpu0 1 2 3 4\n")
        after = cpu_time(stat)
        assert before == CpuTime(30, 100)
        assert after.share_since(before) == 0.6
        assert after.share_since(after) is None

    def test_that_does_not_say_is_not_asked(self, tmp_path):
        assert cpu_time(tmp_path / "none") is None
        (tmp_path / "odd").write_text("mem 1 2 3")
        assert cpu_time(tmp_path / "odd") is None


SLIP = '{"pacing_slip": 0.02}\n'


def an_emulated_job(*events, printed=(SLIP,), phase=Phase.SUCCEEDED, failures=0):
    facts = {**FACTS, "failures": failures, "finished_at_s": 9.0}
    return TrialJob("a", JobView(id=JobId("a-1"), name="a", phase=phase, **facts), events, printed)


def lost(membership):
    detail = FrozenMap({"generation": 1, "membership": membership, "survivors": FrozenMap()})
    return EventView(1, 1.0, "ReplicaLost", "a-1", "…", detail)


class TestFaults:
    def test_there_are_none_if_all_went_well_even_without_the_service_for_a_while(self):
        ready = EventView(1, 1.0, "ReplicasReady", "a-1", "…", FrozenMap({"generation": 1}))
        job = an_emulated_job(ready, notice(1.0, "TrainingStarted"), notice(1.0, "TrainingStarted", 5.0), ready)
        trial = Trial(0.0, 4, (job,), (ready,), True, Outage(2.0, 5.0, {"a": (1, 2)}))
        assert faults_of(trial) == []

    def test_lost_replicas_are_told_and_each_loss_counts_once(self):
        assert job_faults(an_emulated_job(lost(2), lost(2), lost(3))) == [
            "a has lost replicas 2 times, and trained on with the others."
        ]

    def test_a_lost_node_is_told(self):
        gone = EventView(1, 1.0, "NodeLost", "", "…", FrozenMap({"node": "n1"}))
        assert faults_of(Trial(0.0, 4, (an_emulated_job(),), (gone,), True)) == ["Node n1 was lost."]

    def test_to_start_from_scratch_twice_is_told(self):
        job = an_emulated_job(notice(1.0, "TrainingStarted"), notice(3.0, "TrainingStarted"))
        assert job_faults(job) == ["a has started from scratch 2 times."]

    def test_a_failure_that_was_survived_is_told_and_the_last_one_is_not_told_twice(self):
        assert job_faults(an_emulated_job(failures=1)) == ["a has failed 1 time on its way."]
        assert job_faults(an_emulated_job(failures=1, phase=Phase.FAILED, printed=())) == []

    def test_who_does_not_tell_its_slip_has_not_kept_it(self):
        assert slip_of(an_emulated_job(printed=(SLIP, "3\n"))) == 0.02
        assert slip_of(an_emulated_job(printed=('{"value": 1.0}\n',))) is None
        assert job_faults(an_emulated_job(printed=())) == ["a has not printed how late its steps were (pacing_slip)."]


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs():
    with pytest.raises(InvalidInput, match=r"--keep .*cannot be made"):
        check_keep(Path("/proc/nowhere/kept"))


def test_the_folder_of_a_trial_goes_though_it_cannot_be_kept():
    kept = Path("/proc/nowhere/kept")
    with pytest.raises(OSError, match="nowhere"), trial_folder(kept) as base:
        assert base.is_dir()
    assert not base.exists()
