"""Nodes on this machine. The daemons and keepers are real, but for torch, which they load in the slow test only."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pollux.core import JobId, NodeId
from pollux.errors import InvalidSpec, Permanent, Temporary
from pollux.node import launching
from pollux.providers.local import LocalProvider, devices, supervised
from pollux.testing import ProviderContract
from pollux.wire.frames import ask
from pollux.wire.nodes import DescribeNode, Launch, ListReplicas, Seat, Spawn

QUICK = (sys.executable, "-P", str(Path(__file__).parent / "quick_daemon.py"))
PATIENT_S = 100.0
TOKEN = "0123456789abcdef0123456789abcdef"
N0, N1 = NodeId("n0"), NodeId("n1")


def new_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="provider-", dir="/tmp"))
    (folder / "token").write_text(TOKEN)
    return folder


def processes(folder: Path) -> list[str]:
    """The commands that name the folder: daemons, keepers, and what was forked from these."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in command:
            found.append(f"{path.parent.name} {command.decode()}")
    return found


class TestContract(ProviderContract):
    folder: Path

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def place(cls):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launching, "COMMAND", QUICK)
            cls.folder = new_folder()
            yield

    @classmethod
    def make(cls, nodes):
        return LocalProvider(cls.folder, cls.folder / "token", nodes, 2)

    @classmethod
    def token(cls):
        return TOKEN

    @classmethod
    def kill(cls, said):
        os.kill(said.pid, signal.SIGKILL)

    @classmethod
    def left(cls):
        return processes(cls.folder)

    @classmethod
    def clean_up(cls):
        shutil.rmtree(cls.folder)


@pytest.fixture
def folder():
    path = new_folder()
    yield path
    try:
        assert processes(path) == []
    finally:
        for line in processes(path):
            os.kill(int(line.split()[0]), signal.SIGKILL)
        shutil.rmtree(path)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(launching, "COMMAND", QUICK)


@asynccontextmanager
async def started(folder, nodes=1, slots=1, *, end=True, **settings):
    provider = LocalProvider(folder, folder / "token", nodes, slots, **settings)
    try:
        await provider.start(lambda: None)
        yield provider
    finally:
        await provider.close(end=end)


async def until(holds):
    end_s = time.monotonic() + PATIENT_S
    while not (result := holds()):
        assert time.monotonic() < end_s, "waited in vain"
        await asyncio.sleep(0.02)
    return result


async def answers(folder, node=N0, request=None):
    def answer():
        try:
            return ask(f"unix:{folder}/nodes/{node}/node.sock", TOKEN, request or DescribeNode(), 5.0)
        except Temporary:
            return None

    return await until(lambda: answer())


async def pid_of(folder, node=N0):
    return (await answers(folder, node)).pid


async def begin_replica(folder, node=N0, *, is_plain=False):
    """A replica that neither knows the agent nor listens; its pid."""
    script = folder / "sleep.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(1000)\n")
    launch = Launch(JobId("j"), str(script), directory=str(folder))
    if is_plain:
        launch = Launch(JobId("j"), "tail", ("-f", str(script)), str(folder), is_plain=True)
    await answers(folder, node)
    await answers(folder, node, Spawn(JobId("j"), 1, launch, (Seat("1-1", 0, 1, 1, False),), "127.0.0.1:1"))
    await until(lambda: (folder / "nodes" / node / "jobs/j/logs/1-1.log").exists())
    while not (pid := await replica_pid(folder, node)):
        await asyncio.sleep(0.02)
    return pid


async def replica_pid(folder, node=N0):
    here = (await answers(folder, node, ListReplicas(JobId("j")))).replicas[0]
    return here.pid if here.exit_code is None else None


def keeper_pid(folder, node=N0):
    lines = [line for line in processes(folder / "nodes" / node) if "pollux.node.keeper" in line]
    return min(int(line.split()[0]) for line in lines)


@pytest.mark.usefixtures("quick")
class TestReplicas:
    def test_train_on_without_a_provider_and_under_a_daemon_with_other_slots(self, folder):
        async def story():
            async with started(folder, end=False):
                replica, daemon = await begin_replica(folder), await pid_of(folder)
            async with started(folder, end=False):
                assert (await replica_pid(folder), await pid_of(folder)) == (replica, daemon)
            async with started(folder, slots=3) as provider:
                said = await answers(folder)
                assert said.pid != daemon
                assert said.slots == provider.nodes()[0].node.num_gpus == 3
                assert await replica_pid(folder) == replica

        asyncio.run(story())

    def test_train_on_when_slots_are_called_otherwise_and_newcomers_find_other_variables(self, folder):
        async def story():
            async with started(folder, gpu_type="x1", replica_env={"PACE": "2"}, end=False):
                replica, before = await begin_replica(folder), await answers(folder)
            async with started(folder, gpu_type="x1", replica_env={"PACE": "2"}, end=False):
                assert await pid_of(folder) == before.pid
            for named in ({"gpu_type": "x1", "replica_env": {"PACE": "3"}}, {"gpu_type": "x2"}, {}):
                async with started(folder, **named, end=False) as provider:
                    said = await until_other(folder, before.pid)
                    assert said.gpu_type == provider.nodes()[0].node.gpu_type == named.get("gpu_type", "cpu")
                    assert said.replica_env == named.get("replica_env", {})
                    assert await replica_pid(folder) == replica
                    before = said
            async with started(folder):
                pass

        async def until_other(folder, pid):
            while (said := await answers(folder)).pid == pid:
                await asyncio.sleep(0.02)
            return said

        asyncio.run(story())

    def test_of_a_node_that_is_not_wanted_any_more_are_ended_and_the_others_are_not(self, folder):
        async def story():
            async with started(folder, 2, end=False):
                await begin_replica(folder, N1)
                pid = await pid_of(folder)
                os.kill(await pid_of(folder, N1), signal.SIGKILL)  # the provider may die with a daemon
            async with started(folder, 1) as provider:
                assert [given.node.id for given in provider.nodes()] == [N0]
                assert processes(folder / "nodes/n1") == []
                assert await pid_of(folder) == pid

        asyncio.run(story())

    def test_of_a_daemon_that_hangs_are_ended_with_it(self, folder, monkeypatch):
        async def story():
            async with started(folder):
                await begin_replica(folder)
                os.kill(await pid_of(folder), signal.SIGSTOP)
                monkeypatch.setattr(supervised, "END_TIMEOUT_S", 0.5)

        asyncio.run(story())
        assert processes(folder) == []

    @pytest.mark.parametrize("is_plain", [False, True])
    def test_that_have_lost_daemon_and_keeper_are_ended_as_well(self, folder, monkeypatch, is_plain):
        async def story():
            monkeypatch.setattr(supervised, "END_TIMEOUT_S", 0.0)
            async with started(folder, end=False):
                await begin_replica(folder, is_plain=is_plain)
                os.kill(await pid_of(folder), signal.SIGKILL)
            assert len(processes(folder)) >= 2
            os.kill(keeper_pid(folder), signal.SIGKILL)
            async with started(folder):
                pass

        asyncio.run(story())
        assert processes(folder) == []


@pytest.mark.usefixtures("quick")
class TestDaemons:
    def test_one_that_never_stays_is_given_up_with_a_reason(self, folder, monkeypatch, caplog):
        monkeypatch.setattr(supervised, "MAX_PAUSE_S", 0.01)

        async def story():
            changes = []
            provider = LocalProvider(folder, folder / "token", 1, 1, options=["--breaks"])
            await provider.start(lambda: changes.append(len(provider.nodes())))
            assert len(provider.nodes()) == 1
            await until(lambda: not provider.nodes())
            await until(lambda: changes == [1, 0])
            await provider.close(end=True)

        with caplog.at_level(logging.WARNING):
            asyncio.run(story())
        (error,) = (record for record in caplog.records if record.levelno == logging.ERROR)
        assert "n0 is given up" in error.getMessage()
        assert "no such luck" in error.getMessage()
        assert len(caplog.records) == supervised.MAX_EARLY_DEATHS

    def test_one_that_is_silent_for_too_long_is_killed_and_started_again(self, folder, monkeypatch):
        async def story():
            async with started(folder, end=False):
                pid = await pid_of(folder)
            os.kill(pid, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(supervised, "ASK_TIMEOUT_S", 0.2)
                patch.setattr(supervised, "ANSWER_TIMEOUT_S", 0.2)
                provider = LocalProvider(folder, folder / "token", 1, 1)
                await provider.start(lambda: None)
                await until(lambda: f"{pid} " not in " ".join(processes(folder)))
            assert await pid_of(folder) != pid
            await provider.close(end=True)

        asyncio.run(story())

    def test_one_that_falls_silent_later_is_noticed_as_well(self, folder, monkeypatch):
        async def story():
            async with started(folder) as provider:
                pid = await pid_of(folder)
                await until(lambda: provider.reached_at(N0))
                os.kill(pid, signal.SIGSTOP)
                with monkeypatch.context() as patch:
                    for name in ("ASK_TIMEOUT_S", "ASK_EVERY_S", "ANSWER_TIMEOUT_S"):
                        patch.setattr(supervised, name, 0.2)
                    await until(lambda: f"{pid} " not in " ".join(processes(folder)))
                assert await pid_of(folder) != pid

        asyncio.run(story())

    def test_closing_again_does_nothing(self, folder):
        async def story():
            async with started(folder) as provider:
                await provider.close(end=True)
                assert provider.nodes() == ()

        asyncio.run(story())

    def test_there_are_no_more_on_this_machine(self, folder):
        provider = LocalProvider(folder, folder / "token")
        with pytest.raises(Permanent, match=r"This machine has no more nodes: .* start it again with more nodes"):
            asyncio.run(provider.request(2))

    def test_nodes_say_that_their_slots_are_cores(self, folder, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

        async def story():
            async with started(folder, slots=None) as provider:
                (given,) = provider.nodes()
                assert given.node.gpu_type == "cpu"
                assert given.node.num_gpus == len(os.sched_getaffinity(0))
                await answers(folder)

        asyncio.run(story())

    def test_slots_that_are_called_something_are_no_gpus(self, folder, monkeypatch):
        report = devices.DeviceReport(["0", "1"])
        monkeypatch.setattr("pollux.providers.local.provider.describe_devices", lambda environment: report)

        async def story():
            async with started(folder, slots=4, gpu_type="x1", labels={"rack": "r"}, replica_env={"A": "b=c"}) as given:
                (node,) = (one.node for one in given.nodes())
                assert (node.gpu_type, node.num_gpus, node.labels) == ("x1", 4, {"rack": "r"})
                said = await answers(folder)
                assert (said.gpu_type, said.devices, said.replica_env) == ("x1", (), {"A": "b=c"})
                environment = Path(f"/proc/{said.pid}/environ").read_bytes().split(b"\0")
                assert b"CUDA_VISIBLE_DEVICES=" in environment

        asyncio.run(story())

    def test_jobs_of_a_daemon_that_passes_on_other_variables_get_another_daemon(self, folder):
        async def story():
            async with started(folder, job_env=("A", "B"), environment={**os.environ, "A": "1", "C": "2"}, end=False):
                first = await answers(folder)
                assert (first.job_env, first.job_user) == (("A", "B"), "")
            async with started(folder, job_env=("A", "B"), end=False):
                assert (await answers(folder)).pid == first.pid
            async with started(folder, job_env=("C",)):
                while (second := await answers(folder)).job_env != ("C",):
                    await asyncio.sleep(0.02)
                assert second.pid != first.pid

        asyncio.run(story())

    @pytest.mark.parametrize(("field", "settings"), [("nodes", {"nodes": 0}), ("slots", {"slots": 0})])
    def test_a_cluster_of_nothing_is_refused(self, folder, field, settings):
        with pytest.raises(InvalidSpec, match=field):
            LocalProvider(folder, folder / "token", **settings)

    def test_a_token_file_that_is_not_there_is_named(self, folder):
        with pytest.raises(InvalidSpec, match="nowhere"):
            LocalProvider(folder, folder / "nowhere")


@pytest.mark.slow
def test_the_real_command_starts_and_ends_a_node(folder):
    async def story():
        async with started(folder) as provider:
            said = await answers(folder)
            assert (said.node, said.slots) == (N0, 1)
            await until(lambda: provider.reached_at(N0))
            await begin_replica(folder)

    asyncio.run(story())
    assert processes(folder) == []
