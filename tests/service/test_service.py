"""The live driver against daemons without processes: requests, rounds, crashes, nodes that come and go."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.core.kinds import model, profile, registry
from tests.service.living import Living, live

from pollux.core import Allocation, FrozenMap, JobId, NodeId, Phase, Plan, Progress, ReplicaLost, Snapshot, dumps
from pollux.errors import InvalidJob, InvalidSpec, Permanent, UnknownName
from pollux.policies import Policy
from pollux.service.options import ServiceOptions
from pollux.wire.entries import BatchSetting, ReplicasChanged, RunState, TrainingStarted
from pollux.wire.messages import AgentReport
from pollux.wire.nodes import Refused, ResizeRun, RunJob, RunPhase, StopRun

CASTOR_ALONE = {"policy": "castor", "policy_options": FrozenMap({"registry": False})}


def report_of(job: JobId, step: int = 10, **more: object) -> AgentReport:
    state = RunState(step, Progress(float(step), 100.0), 1, BatchSetting(32, 32), (1.0,), 0, 0)
    return AgentReport(job, 1, 1e9, state, **more)  # type: ignore[arg-type]


class TestRequests:
    def test_a_job_runs_as_soon_as_it_is_submitted_and_ends(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(name="net")
            assert job.id == "net-1"
            assert job.allocation.num_gpus == 1
            living.daemon_of(job.id).finish(job.id)
            assert (await living.reach(job.id, Phase.SUCCEEDED)).finished_at_s is not None

        live(main)

    def test_what_a_daemon_is_told_to_run_is_what_was_submitted(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(command="python train.py --lr 0.1", env={"KEY": "secret"}, requested_gpus=3)
            request = living.daemons[0].asked[0]
            assert isinstance(request, RunJob)
            assert request.launch.script == str(living.folder / "train.py")
            assert request.launch.arguments == ("--lr", "0.1")
            assert request.launch.environment["KEY"] == "secret"
            assert request.launch.environment["POLLUX_FIXED_BATCH"] == "1"  # fifo does not adapt batch sizes
            assert request.launch.checkpoint_dir == str(living.place.checkpoint_dir(job.id))
            assert dict(request.allocation.gpus) == {"n0": 2, "n1": 1}
            assert dict(request.addresses) == {"n1": "127.0.0.1:1001"}

        live(main)

    def test_a_plain_command_is_one_process_that_holds_several_gpus_of_one_node(self) -> None:
        async def main(living: Living) -> None:
            await living.submit(command="echo hello", gpus=1)
            job = await living.submit(command="echo hello", gpus=2)
            request = living.daemon_of(job.id).asked[-1]
            assert isinstance(request, RunJob)
            assert (request.launch.is_plain, request.launch.gpus) == (True, 2)
            assert request.allocation.num_gpus == 1
            assert dict(job.allocation.gpus) == {"n1": 2}

        live(main)

    def test_a_script_without_pollux_runs_as_a_plain_command(self) -> None:
        async def main(living: Living) -> None:
            (living.folder / "own.py").write_text("print('hello')\n")
            job = await living.submit(command="python own.py", requested_gpus=2)
            assert (job.spec.rigid, job.allocation.num_gpus) == (True, 2)
            with pytest.raises(InvalidJob, match=r"pollux\.torch"):
                await living.submit(until=None, command="python own.py", max_batch_size=64)
            with pytest.raises(InvalidJob, match="no such"):
                await living.submit(until=None, command="python gone.py")

        live(main)

    def test_a_job_that_can_never_run_is_told_so(self) -> None:
        async def main(living: Living) -> None:
            for fields, field in (
                ({"command": "echo", "gpus": 3}, "gpus"),
                ({"min_gpus": 5}, "min_gpus"),
                ({"gpu_type": "h100"}, "gpu_type"),
            ):
                with pytest.raises(InvalidJob) as caught:
                    await living.submit(until=None, **fields)
                assert [fault.field for fault in caught.value.faults] == [field]
            assert not living.service.scheduler.state.jobs

        live(main)

    def test_a_paused_job_saves_leaves_and_comes_back(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            living.service.pause(job.id)
            await living.reach(job.id, Phase.PAUSED)
            living.service.resume(job.id)
            assert (await living.reach(job.id, Phase.RUNNING)).generation == 2
            with pytest.raises(Permanent, match="nothing to resume"):
                living.service.resume(job.id)

        live(main)

    def test_a_cancelled_job_ends_and_nothing_can_be_asked_of_it_any_more(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            living.service.cancel(job.id)
            await living.reach(job.id, Phase.CANCELLED)
            for request in (living.service.pause, living.service.cancel, living.service.resume):
                with pytest.raises(Permanent, match="been cancelled"):
                    request(job.id)
            with pytest.raises(UnknownName):
                living.service.cancel(JobId("other"))

        live(main)

    def test_bounds_are_changed_within_reason(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            assert living.service.scale(job.id, 2, 4).spec.max_gpus == 4
            with pytest.raises(InvalidJob):
                living.service.scale(job.id, 9, None)
            with pytest.raises(InvalidSpec):
                living.service.scale(job.id, 3, 2)
            plain = await living.submit(command="echo", gpus=1)
            with pytest.raises(Permanent, match="plain command"):
                living.service.scale(plain.id, 1, 2)

        live(main)

    def test_logs_are_read_from_the_nodes(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            (file,) = await living.service.logs(job.id)
            assert (file.node, file.replica, file.size) == ("n0", "r0", 5)
            part = await living.service.read_log(job.id, file.node, file.replica, 2, 100)
            assert part.text == "llo"

        live(main)

    def test_a_log_that_is_not_there_is_unknown_and_one_that_cannot_be_read_is_told(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            for daemon in living.daemons:
                daemon.refusal = Refused("It cannot be.")
            for name in ("r1", "..", "../../token", "x" * 300):
                with pytest.raises(UnknownName, match=r"log of job .* on node n0 = .*Known: r0\."):
                    await living.service.read_log(job.id, NodeId("n0"), name, 0, 100)
            with pytest.raises(Permanent, match=r"It cannot be\."):
                await living.service.read_log(job.id, NodeId("n0"), "r0", 0, 100)
            with pytest.raises(UnknownName, match="node"):
                await living.service.read_log(job.id, NodeId(".."), "r0", 0, 100)

        live(main)

    def test_somebody_who_waits_for_events_is_woken(self) -> None:
        async def main(living: Living) -> None:
            last = living.store.last_number
            waiting = asyncio.create_task(living.service.wait_for_event(last, 30.0))
            await living.submit()
            await waiting
            assert living.store.last_number > last

        live(main)

    def test_a_policy_that_needs_the_future_is_refused(self) -> None:
        with pytest.raises(InvalidSpec, match="true future"):
            ServiceOptions(Path("/tmp"), policy="srtf")


class TestWaiting:
    def test_a_job_for_gpus_that_no_node_has_says_so(self) -> None:
        async def main(living: Living) -> None:
            for _ in range(3):
                last = await living.submit(command="echo", gpus=2, until=None)
            waiting = living.job(last.id)
            gone = replace(waiting, spec=replace(waiting.spec, gpu_type="emulated-t4"))  # the cluster was another one
            assert living.service.waits_for(gone) == "GPUs of type emulated-t4, which no node has"

        live(main)


class TestRounds:
    def test_idle_gpus_are_given_out_when_others_leave_and_not_only_at_the_next_interval(self) -> None:
        async def main(living: Living) -> None:
            first = await living.submit(command="echo", gpus=2)
            second = await living.submit(command="echo", gpus=2)
            third = await living.submit(command="echo", gpus=2, until=None)
            assert living.service.waits_for(living.job(third.id)) == "a free GPU"
            living.daemon_of(first.id).finish(first.id)
            await living.reach(third.id, Phase.RUNNING)
            assert living.job(second.id).phase is Phase.RUNNING

        live(main)

    def test_reports_reach_the_policy_at_the_next_round_and_are_kept(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            notice = TrainingStarted(1e9, report_of(job.id).state, 7)
            changed = ReplicasChanged(1e9 + 1, report_of(job.id).state, 1, "resized")
            daemon = living.daemon_of(job.id)
            daemon.report(report_of(job.id, notices=(notice,), loss=2.0))
            daemon.report(report_of(job.id, 20, notices=(notice, changed), loss=1.0))  # the first one comes twice
            await living.until(lambda: getattr(living.service.report_of(job.id), "loss", None) == 1.0)
            await living.submit()
            stored = [one.document for one in living.store.events(job=job.id)]
            assert [one for one in stored if isinstance(one, TrainingStarted | ReplicasChanged)] == [notice, changed]
            await living.restart()
            found = living.service.report_of(job.id)
            assert found is not None
            assert found.state.step == 20

        live(main)


class TestFailures:
    def test_a_job_that_fails_again_and_again_ends_as_failed_with_its_reason(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(retries=2)
            for generation in (1, 2, 3):
                await living.until(
                    lambda g=generation: (
                        living.job(job.id).phase is Phase.RUNNING and living.job(job.id).generation == g
                    )
                )
                living.daemon_of(job.id).fail(job.id, f"boom {generation}")
            ended = await living.reach(job.id, Phase.FAILED)
            assert (ended.num_failures, ended.exit_reason, ended.exit_code) == (3, "boom 3", 1)

        live(main)

    def test_a_start_that_is_refused_is_a_failure(self) -> None:
        async def main(living: Living) -> None:
            for daemon in living.daemons:
                daemon.refusal = Refused("script = '/tmp/train.py': cannot be read")
            job = await living.submit(until=Phase.FAILED, retries=0)
            assert "cannot be read" in job.exit_reason

        live(main)

    def test_a_daemon_that_knows_a_newer_generation_is_gone_along_with(self) -> None:
        async def main(living: Living) -> None:
            living.daemons[0].refusal = Refused("stale", is_stale=True, generation=2)
            job = await living.submit(until=None, retries=0)
            await living.until(lambda: living.job(job.id).issued_generation >= 2)
            living.daemons[0].refusal = None
            assert (await living.reach(job.id, Phase.RUNNING)).num_failures == 0

        live(main)

    def test_lost_replicas_shrink_the_allocation(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(requested_gpus=2)
            living.daemons[0].announce(ReplicaLost(job.id, 1, 1, Allocation.of({NodeId("n0"): 1})))
            await living.until(lambda: living.job(job.id).allocation.num_gpus == 1)

        live(main)

    def test_a_node_that_stays_away_is_lost_and_its_jobs_go_on_elsewhere(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(requested_gpus=3)
            await living.daemons[0].stop()
            await living.until(lambda: NodeId("n0") not in living.service.scheduler.state.cluster)
            assert living.service.node_state(NodeId("n0")) == "away"
            await living.until(lambda: living.daemons[1].forgotten == [job.id])
            await living.daemons[0].start()
            again = await living.reach(job.id, Phase.RUNNING)
            assert again.generation == 2
            assert again.num_failures == 0

        live(main, node_grace_s=0.1)

    def test_a_service_that_was_killed_as_it_heard_of_a_lost_home_ends_its_orphans(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(requested_gpus=3)
            living.service._world._end_orphans = lambda job, home: None  # type: ignore[method-assign]
            await living.daemons[0].stop()
            await living.until(lambda: NodeId("n0") not in living.service.scheduler.state.cluster)
            await living.restart()
            await living.until(lambda: living.daemons[1].forgotten == [job.id])
            await living.reach(job.id, Phase.PENDING)

        live(main, node_grace_s=0.1, recovery_s=0.5)

    def test_a_lost_node_cannot_be_undrained(self) -> None:
        async def main(living: Living) -> None:
            await living.daemons[0].stop()
            await living.until(lambda: living.service.node_state(NodeId("n0")) == "away")
            with pytest.raises(Permanent, match="away"):
                living.service.undrain(NodeId("n0"))

        live(main)

    def test_a_clock_that_is_set_back_makes_nobody_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(retries=3)
            real = time.time
            monkeypatch.setattr(time, "time", lambda: real() - 3600)
            living.daemon_of(job.id).fail(job.id)
            await living.until(lambda: living.job(job.id).generation == 2)

        live(main)

    def test_a_node_that_comes_back_in_time_has_lost_nothing(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            await living.daemons[0].stop()
            await living.until(lambda: living.service.node_state(NodeId("n0")) == "away")
            await living.daemons[0].start()
            await living.until(lambda: living.service.node_state(NodeId("n0")) == "ready")
            assert living.job(job.id).generation == 1

        live(main)

    def test_replicas_that_come_back_after_their_job_went_elsewhere_are_ended(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            await living.daemons[0].stop()
            await living.until(lambda: job.id in living.daemons[1].runs)
            await living.reach(job.id, Phase.RUNNING)
            await living.daemons[0].start()
            await living.until(lambda: living.daemons[0].runs[job.id].phase is RunPhase.ENDED)
            assert living.job(job.id).phase is Phase.RUNNING
            assert dict(living.job(job.id).allocation.gpus) == {"n1": 1}

        live(main, node_grace_s=0.1)

    def test_a_drained_node_gets_nothing_new_also_after_a_restart(self) -> None:
        async def main(living: Living) -> None:
            living.service.drain(NodeId("n0"))
            await living.restart()
            assert living.service.node_state(NodeId("n0")) == "drained"
            job = await living.submit()
            assert dict(job.allocation.gpus) == {"n1": 1}
            living.service.undrain(NodeId("n0"))
            assert living.service.node_state(NodeId("n0")) == "ready"
            with pytest.raises(UnknownName):
                living.service.drain(NodeId("n7"))

        live(main)


class TestCrashes:
    def test_a_service_that_was_killed_finds_its_jobs_as_they_are(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            before = living.service.scheduler.state
            await living.restart()
            assert living.job(job.id) == before.jobs[job.id]
            assert living.replayed().state == living.service.scheduler.state
            assert [type(request) for request in living.daemons[0].asked] == [RunJob]

        live(main)

    def test_a_start_that_nobody_heard_of_is_said_again(self) -> None:
        async def main(living: Living) -> None:
            living.daemons[0].is_slow = living.daemons[1].is_slow = True
            job = await living.submit(until=Phase.STARTING)
            await living.until(lambda: living.daemons[0].asked)
            await living.kill()
            living.daemons[0].runs.clear()  # as if it had been killed before it spoke
            living.daemons[0].is_slow = False
            await living.start()
            assert (await living.reach(job.id, Phase.RUNNING)).generation == 1
            assert [type(request) for request in living.daemons[0].asked] == [RunJob, RunJob]

        live(main)

    def test_what_happened_meanwhile_is_heard(self) -> None:
        async def main(living: Living) -> None:
            finished, failed, gone = [await living.submit() for _ in range(3)]
            await living.kill()
            living.daemon_of(finished.id).finish(finished.id)
            living.daemon_of(failed.id).fail(failed.id)
            del living.daemon_of(gone.id).runs[gone.id]
            await living.start()
            await living.reach(finished.id, Phase.SUCCEEDED)
            await living.until(lambda: living.job(failed.id).generation == 2)
            assert living.job(failed.id).num_failures == 1
            await living.until(lambda: living.job(gone.id).generation == 2)
            assert living.job(gone.id).num_failures == 0
            assert living.replayed().state == living.service.scheduler.state

        live(main)

    def test_jobs_that_nobody_here_knows_are_stopped(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            await living.kill()
            for path in living.folder.glob("pollux.db*"):
                path.unlink()
            shutil.rmtree(living.place.jobs)
            await living.start()
            await living.until(lambda: living.daemons[0].runs[job.id].phase is RunPhase.ENDED)

        live(main)

    def test_a_log_from_a_backup_catches_up(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            living.store.backup(living.folder / "copy")
            living.service.pause(job.id)
            await living.reach(job.id, Phase.PAUSED)
            living.service.resume(job.id)
            await living.until(lambda: living.job(job.id).generation == 2 and living.job(job.id).phase is Phase.RUNNING)
            await living.kill()
            for path in living.folder.glob("pollux.db*"):
                path.unlink()
            (living.folder / "copy").rename(living.place.database)
            await living.start()
            await living.until(lambda: living.job(job.id).generation > 1)  # what was ahead of the log goes on
            again = await living.reach(job.id, Phase.RUNNING)
            assert again.num_failures == 0
            assert living.daemon_of(job.id).runs[job.id].phase is RunPhase.TRAINING

        live(main)

    def test_what_daemons_tell_again_after_a_restart_does_not_fill_the_log(self) -> None:
        async def main(living: Living) -> None:
            running, ended = await living.submit(), await living.submit()
            living.daemon_of(ended.id).finish(ended.id)
            await living.reach(ended.id, Phase.SUCCEEDED)
            last = living.store.last_number
            for _ in range(3):
                await living.restart()
            kinds = [stored.kind for stored in living.store.events(after=last)]
            assert set(kinds) <= {"RoundDue", "PlanMade"}
            assert living.job(running.id).phase is Phase.RUNNING

        live(main)

    def test_snapshots_and_the_whole_log_lead_to_the_same_state(self) -> None:
        async def main(living: Living) -> None:
            for _ in range(4):
                job = await living.submit()
                living.daemon_of(job.id).finish(job.id)
                await living.reach(job.id, Phase.SUCCEEDED)
            assert living.store.latest() is not None
            state = living.service.scheduler.state
            assert living.replayed().state == state
            await living.restart()
            assert replace_time(living.service.scheduler.state) == replace_time(state)

        live(main, save_every=5)


class TestTheEnd:
    def test_jobs_save_and_stop_and_go_on_next_time(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            living.service.end(stop_jobs=True)
            await living.running
            assert living.provider.was_ended is True
            assert isinstance(living.daemons[0].asked[-1], StopRun)
            assert living.job(job.id).phase is Phase.PENDING
            living.store.close()
            await living.start()
            assert (await living.reach(job.id, Phase.RUNNING)).generation == 2

        live(main)

    def test_a_service_whose_log_cannot_be_written_goes_on_when_it_can(self) -> None:
        async def main(living: Living) -> None:
            append, broken = living.store.append, True

            def fail(record: object) -> None:
                if broken:
                    raise Permanent("pollux.db: the disk is full. Make room.")
                append(record)  # type: ignore[arg-type]

            living.store.append = fail  # type: ignore[method-assign,assignment]
            with pytest.raises(Permanent, match="disk is full"):
                await living.submit(until=None)
            living.service._rounds.hurry(0.0)
            await asyncio.sleep(0.1)
            broken = False
            assert (await living.submit()).phase is Phase.RUNNING

        live(main, interval_s=0.02)

    def test_or_they_train_on(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit()
            living.service.end(stop_jobs=False)
            await living.running
            assert living.provider.was_ended is False
            assert living.daemons[0].runs[job.id].phase is RunPhase.TRAINING
            living.store.close()
            await living.start()
            assert living.job(job.id).generation == 1

        live(main)


def replace_time(state: object) -> dict[str, object]:
    """A state without its clock."""
    return {**vars(state), "time_s": 0.0}


class AsBounded(Policy):
    """Gives every job the fewest GPUs that it may have, of n0, and has its agent told."""

    adapts_gpus: ClassVar[bool] = True
    shares_experience = True

    def plan(self, snapshot: Snapshot, seed: int) -> Plan:
        return Plan.of({job.id: Allocation.of({NodeId("n0"): job.spec.min_gpus}) for job in snapshot.jobs.values()})


class TestRegistry:
    def test_what_a_job_measured_outlives_the_service(self) -> None:
        async def main(living: Living) -> None:
            job = await living.submit(name="net")
            last = report_of(job.id, profile=profile(1, 2), model=model(50.0, fingerprint="mlp-0"))
            daemon = living.daemon_of(job.id)
            daemon.report(last)  # no round comes before its end
            await living.until(lambda: living.service.report_of(job.id) is not None)
            daemon.finish(job.id)
            await living.reach(job.id, Phase.SUCCEEDED)
            living.service.import_kinds(registry("other"), replaces=False)
            kinds = living.service.scheduler.state.pool.kinds
            assert {kind: known.num_jobs for kind, known in kinds.items()} == {"mlp-0": 1, "other": 3}
            assert kinds["mlp-0"].profile == profile(1, 2)
            await living.restart()  # from the events alone
            assert living.service.scheduler.state.pool.kinds == kinds
            living.service.scheduler.save()
            await living.restart()  # from a saved state
            assert living.service.scheduler.state.pool.kinds == kinds
            assert living.replayed().state.pool.kinds == kinds

        live(main)

    def test_jobs_are_told_of_their_kind_when_they_start_and_when_they_are_resized(self) -> None:
        async def main(living: Living) -> None:
            living.service.import_kinds(registry("net"), replaces=False)
            job = await living.submit(application="net", max_gpus=1)
            asked = living.daemon_of(job.id).asked
            assert [request.experience for request in asked] == [dumps(profile(1, 4))]
            living.service.import_kinds(registry("net"), replaces=False)
            living.service.scale(job.id, 2, 2)
            await living.until(lambda: isinstance(asked[-1], ResizeRun))
            assert asked[-1].experience == dumps(profile(1, 4, count=2))

        live(main, 2, policy=f"{__name__}:AsBounded", interval_s=0.05)

    def test_those_of_no_known_kind_and_plain_commands_are_told_nothing(self) -> None:
        async def main(living: Living) -> None:
            living.service.import_kinds(registry("net"), replaces=False)
            plain: dict[str, object] = {"application": "net", "command": "echo", "gpus": 1}
            for fields in ({"max_gpus": 1}, {"max_gpus": 1, "application": "other"}, plain):
                job = await living.submit(**fields)
                started = [request for request in living.daemon_of(job.id).asked if request.job == job.id]
                assert [request.experience for request in started] == [""]

        live(main, 2, 2, policy="castor")

    @pytest.mark.parametrize("policy", [{"policy": "pollux"}, {"policy": "fifo"}, CASTOR_ALONE])
    def test_policies_that_do_not_share_have_nobody_told(self, policy: dict[str, Any]) -> None:
        async def main(living: Living) -> None:
            living.service.import_kinds(registry("net"), replaces=False)
            job = await living.submit(application="net")
            assert [request.experience for request in living.daemon_of(job.id).asked] == [""]

        live(main, 2, **policy)
