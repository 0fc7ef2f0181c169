"""The keeper and its client, with real processes. Most share one keeper that has loaded next to nothing."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pollux.core import FrozenMap, JobId
from pollux.errors import InvalidSpec, Permanent, Temporary
from pollux.node.keeper import _listen
from pollux.node.keeper_client import Child, KeeperClient
from pollux.node.processes import members_of, start_ticks
from pollux.node.templates import Wanted, leading_imports
from pollux.wire.nodes import Launch

LIGHT = ("json",)
PATIENCE_S = 60.0

Scenario = Callable[["Client"], Coroutine[Any, Any, None]]


class Client(KeeperClient):
    """Remembers who ended, and can wait for it."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place
        self.exits: dict[str, int] = {}
        self.news = asyncio.Event()
        self.on_exit = self._note

    def _note(self, tag: str, pid: int, exit_code: int) -> None:
        self.exits[tag] = exit_code
        self.news.set()

    async def ended(self, tag: str) -> int:
        async with asyncio.timeout(PATIENCE_S):
            while tag not in self.exits:
                self.news.clear()
                await self.news.wait()
        return self.exits[tag]

    def launch(self, source: str, script: str = "train.py", **more: Any) -> Launch:
        path = self.place / script
        path.write_text(textwrap.dedent(source))
        return Launch(JobId("job"), str(path), **{"directory": str(self.place), **more})

    def log_of(self, tag: str) -> Path:
        return self.place / "logs" / f"{tag.replace('/', '-')}.log"

    async def start(self, tag: str, launch: Launch, **environment: str) -> int:
        return await self.spawn(tag, launch, environment, self.log_of(tag))

    async def run(self, tag: str, launch: Launch, **environment: str) -> tuple[int, str]:
        """Exit code and output of a replica."""
        await self.start(tag, launch, **environment)
        return await self.ended(tag), self.log_of(tag).read_text()


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def make_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="keep"))  # the path of a socket must be short
    yield folder
    shutil.rmtree(folder)


async def end(folder: Path) -> None:
    client = KeeperClient()
    await client.connect(folder, preload=LIGHT)
    await client.close(end=True, grace_s=0.0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """The folder of a keeper for the whole file."""
    for folder in make_folder():
        yield folder
        asyncio.run(end(folder))


@pytest.fixture
def alone() -> Iterator[Path]:
    """A folder without a keeper; the test ends the one that it starts."""
    yield from make_folder()


@pytest.fixture
def with_keeper(shared: Path, tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with a client of the shared keeper; leaves no process of it."""

    async def do(scenario: Scenario) -> None:
        client = Client(tmp_path)
        await client.connect(shared, preload=LIGHT)
        try:
            await scenario(client)
        finally:
            for child in await client.children():
                client.exits.pop(child.tag, None)
                if await client.kill(child.tag, signal.SIGKILL):
                    await client.ended(child.tag)
                await client.forget(child.tag)
            await client.forget_job(JobId("job"))
            await client.close(end=False)

    return lambda scenario: asyncio.run(do(scenario))


# What a replica sees


@pytest.fixture
def own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the daemon has, and jobs have no use for."""
    monkeypatch.setenv("OWN", "mine")


@pytest.mark.usefixtures("own_variable")
def test_a_script_sees_what_it_would_see_under_python(with_keeper: Any, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "additional.py").write_text("word = 'found'")

    async def scenario(client: Client) -> None:
        source = """
        import json, os, signal, sys
        sys.path[0]; import additional
        print(json.dumps({
            "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "name": __name__, "file": __file__,
            "is_main": sys.modules["__main__"].__dict__ is globals(), "word": additional.word,
            "session": os.getsid(0) == os.getpid(), "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
            "stdin": os.readlink("/proc/self/fd/0"), "mask": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            "hangup": signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,
            "int": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "given": os.environ["GIVEN"], "launched": os.environ["LAUNCHED"],
            "own": os.environ.get("OWN"), "path_variable": os.environ["PATH"],
            "logs": __import__("logging").getLogger().handlers, "threads": len(os.listdir("/proc/self/task")),
        }))
        """
        launch = client.launch(
            source,
            arguments=("--lr", "0.1 é"),
            directory=str(tmp_path / "elsewhere"),
            environment=FrozenMap({"LAUNCHED": "yes", "GIVEN": "no", "PYTHONPATH": str(tmp_path / "extra")}),
        )
        code, said = await client.run("job/1", launch, GIVEN="yes")
        assert code == 0, said
        seen = json.loads(said)
        assert seen["argv"] == [launch.script, "--lr", "0.1 é"]
        assert (seen["path"], seen["cwd"]) == (str(tmp_path), str(tmp_path / "elsewhere"))
        assert (seen["name"], seen["file"], seen["is_main"]) == ("__main__", launch.script, True)
        assert (seen["given"], seen["launched"], seen["own"], seen["word"]) == ("yes", "yes", None, "found")
        assert seen["path_variable"] == os.environ["PATH"]
        assert seen["descriptors"] == [0, 1, 2, 3]  # 3: the folder that is listed
        assert seen["stdin"] == "/dev/null"
        assert all(seen[what] is True for what in ("session", "term", "child", "hangup", "int"))
        assert (seen["mask"], seen["logs"], seen["threads"]) == ([], [], 1)

    with_keeper(scenario)


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("print('well')", 0, "well\nbye\n"),
        ("import sys; sys.exit(3)", 3, "bye\n"),
        ("raise SystemExit('no data')", 1, "no data\nbye\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import threading; threading.Thread(target=print, args=('late',)).start()", 0, None),
    ],
)
def test_a_script_ends_as_it_would_under_python(with_keeper: Any, source: str, code: int, said: str | None) -> None:
    async def scenario(client: Client) -> None:
        launch = client.launch(f"import atexit; atexit.register(print, 'bye')\n{source}\n")
        ended_with, log = await client.run("job/1", launch)
        alike = subprocess.run([sys.executable, launch.script], capture_output=True, text=True)
        assert ended_with == code == alike.returncode
        assert said in (None, log)
        assert log == alike.stderr + alike.stdout or said is not None

    with_keeper(scenario)


def test_an_uncaught_exception_is_in_the_log_and_begins_with_the_script(with_keeper: Any) -> None:
    async def scenario(client: Client) -> None:
        launch = client.launch("def learn():\n    return 1 / 0\nlearn()\n")
        code, said = await client.run("job/1", launch)
        alike = subprocess.run([sys.executable, launch.script], capture_output=True, text=True)
        assert (code, said) == (1, alike.stderr)
        code, said = await client.run("job/2", client.launch("1 +\n"))
        assert code == 1
        assert "SyntaxError" in said
        assert "pollux" not in said

    with_keeper(scenario)


def test_a_missing_directory_is_told_in_the_log_and_a_missing_script_at_once(with_keeper: Any) -> None:
    async def scenario(client: Client) -> None:
        launch = client.launch("", directory="/nowhere")
        code, said = await client.run("job/1", launch)
        assert code == 1
        assert "/nowhere" in said
        with pytest.raises(InvalidSpec, match="absent"):
            await client.start("job/2", Launch(JobId("job"), "/tmp/absent.py"))

    with_keeper(scenario)


def test_a_log_is_appended_to(with_keeper: Any) -> None:
    async def scenario(client: Client) -> None:
        client.log_of("job/1").parent.mkdir()
        client.log_of("job/1").write_text("before\n")
        _, said = await client.run("job/1", client.launch("print('after')"))
        assert said == "before\nafter\n"

    with_keeper(scenario)


# Children


def test_a_tag_is_started_once_until_it_is_forgotten(with_keeper: Any) -> None:
    async def scenario(client: Client) -> None:
        launch = client.launch("print('once'); input_never = __import__('signal').pause()")
        pids = await asyncio.gather(*(client.start("job/1", launch) for _ in range(3)))
        assert len({*pids, await client.start("job/1", launch)}) == 1
        await client.forget("job/1")
        assert await client.children() == [Child("job/1", pids[0], None)]
        assert await client.kill("job/1", signal.SIGKILL)
        assert await client.ended("job/1") == -9
        assert not await client.kill("job/1", signal.SIGKILL)
        assert await client.children() == [Child("job/1", pids[0], -9)]
        client.exits.clear()
        assert await client.start("job/1", launch) == pids[0]
        assert await client.ended("job/1") == -9
        await client.forget("job/1")
        assert await client.children() == []
        assert await client.start("job/1", launch) != pids[0]

    with_keeper(scenario)


DAEMON = """
import asyncio, sys
from pathlib import Path
from pollux.node.keeper_client import KeeperClient
from pollux.wire.nodes import Launch

async def main():
    client = KeeperClient()
    await client.connect(Path(sys.argv[1]))
    for number in "01":
        print(await client.spawn(f"job/{number}", Launch("job", sys.argv[2]), {"NUMBER": number}, Path(sys.argv[3])))
    sys.stdout.flush()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_replicas_and_exit_codes_survive_a_killed_daemon(with_keeper: Any, shared: Path, tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        go = tmp_path / "go"
        launch = client.launch(f"""
        import os, sys, time
        while os.environ["NUMBER"] == "1" or not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        sys.exit(7)
        """)
        command = [sys.executable, "-c", DAEMON, str(shared), launch.script, str(tmp_path / "log")]
        await client.close(end=False)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            pids = [int(daemon.stdout.readline()) for _ in range(2)]
            daemon.kill()
        go.touch()
        await until(lambda: not lives(pids[0]))
        await client.connect(shared)
        assert await client.children() == [Child("job/0", pids[0], 7), Child("job/1", pids[1], None)]
        assert await client.kill("job/1", signal.SIGTERM)
        assert await client.ended("job/1") == -15

    with_keeper(scenario)


def test_a_newer_daemon_takes_the_place_of_an_older_one(with_keeper: Any, shared: Path) -> None:
    async def scenario(client: Client) -> None:
        older, lost = KeeperClient(), []
        await older.connect(shared)
        older.on_lost = lambda: lost.append(older)
        await client.connect(shared)
        assert await client.children() == []
        with pytest.raises(Permanent, match="Another daemon"):
            await older.children()
        assert not lost
        await older.close(end=False)

    with_keeper(scenario)


def test_who_only_looks_whether_it_serves_takes_nobodys_place(with_keeper: Any, shared: Path) -> None:
    """As a second keeper does that was started at nearly the same time."""

    async def scenario(client: Client) -> None:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(shared / "keeper.sock"))
            assert json.loads(probe.recv(1000))["event"] == "hello"  # it has seen the probe
            assert await client.children() == []
        assert await client.children() == []

    with_keeper(scenario)


def test_of_keepers_that_start_at_once_one_serves(alone: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            listeners = [sock for sock in pool.map(_listen, [alone / "keeper.sock"] * 4) if sock is not None]
            assert len(listeners) == 1
            listeners[0].close()


# Templates


def test_the_imports_of_a_script_are_done_once_for_all_its_replicas(with_keeper: Any, tmp_path: Path) -> None:
    local = tmp_path / "local.py"

    async def scenario(client: Client) -> None:
        local.write_text("import os\nloaded_by = os.getpid()\nos.environ.setdefault('SET_BY_LOCAL', 'yes')\nrate = 1\n")
        source = """
        import os
        from local import loaded_by, rate
        print(loaded_by, os.getppid(), rate, os.environ["SET_BY_LOCAL"], os.environ["RANK"])
        """
        launch = client.launch(source)
        lines = [(await client.run(f"job/{n}", launch, RANK=str(n)))[1].split() for n in range(3)]
        loaders = {line[0] for line in lines}
        assert len(loaders) == 1
        assert [line[1:] for line in lines] == [[str(client.pid), "1", "yes", str(n)] for n in range(3)]
        template = int(loaders.pop())
        assert lives(template)

        local.write_text(local.read_text().replace("rate = 1", "rate = 22"))
        code, said = await client.run("job/4", launch, RANK="4")
        assert code == 0
        assert said.split()[2] == "22"
        await until(lambda: not lives(template))
        newer = int(said.split()[0])
        assert lives(newer)
        await client.forget_job(JobId("job"))
        await until(lambda: not lives(newer))

    with_keeper(scenario)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
        ("import random\nrandom.seed(1)", "random"),
        ("import os\nrank = os.environ.get('RANK')", "depend on RANK"),
    ],
)
def test_a_template_that_no_new_process_would_equal_is_not_used(
    with_keeper: Any, shared: Path, tmp_path: Path, source: str, reason: str
) -> None:
    async def scenario(client: Client) -> None:
        (tmp_path / "local.py").write_text(f"{source}\nimport os\nloaded_by = os.getpid()\n")
        launch = client.launch("import local, os, random\nprint(local.loaded_by == os.getpid(), random.random())")
        said = [(await client.run(f"job/{n}", launch, RANK=str(n)))[1].split() for n in range(2)]
        assert [line[0] for line in said] == ["True", "True"]
        assert (said[0][1] == said[1][1]) is (reason == "random")
        assert reason in (shared / "keeper.log").read_text()

    with_keeper(scenario)


def test_an_import_that_fails_is_told_by_the_replica(with_keeper: Any, tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        (tmp_path / "local.py").write_text("raise RuntimeError('no such weather')")
        code, said = await client.run("job/1", client.launch("import local"))
        assert code == 1
        assert said.count("RuntimeError: no such weather") == 1

    with_keeper(scenario)


def test_replicas_of_a_killed_template_are_still_watched(with_keeper: Any, tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        (tmp_path / "local.py").write_text("import os\nloaded_by = os.getpid()\n")
        launch = client.launch("import local, signal\nprint(local.loaded_by, flush=True)\nsignal.pause()")
        await client.start("job/1", launch)
        await until(lambda: client.log_of("job/1").read_text().endswith("\n"))
        template = int(client.log_of("job/1").read_text())
        os.kill(template, signal.SIGKILL)
        await until(lambda: not lives(template))
        await client.start("job/2", launch)
        await until(lambda: client.log_of("job/2").exists() and client.log_of("job/2").read_text().endswith("\n"))
        assert int(client.log_of("job/2").read_text()) != template
        for tag in ("job/1", "job/2"):
            assert await client.kill(tag, signal.SIGTERM)
            assert await client.ended(tag) == -15

    with_keeper(scenario)


def test_only_imports_above_the_first_act_of_a_script_are_its_leading_ones(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        '"""Words."""\n'
        "from __future__ import annotations\n"
        "import a.b as c, d\n"
        "from e import f, g\n"
        "from . import beside\n"
        "RATE = 0.1\n"
        "def learn(): import later\n"
        "try:\n    import h\nexcept ImportError:\n    h = None\n"
        "if TYPE_CHECKING:\n    import types_only\n"
        "import i\n"
        "os.environ['X'] = '1'\n"
        "import after\n"
    )
    assert leading_imports(str(script)) == [
        Wanted("a.b"),
        Wanted("d"),
        Wanted("e", ("f", "g")),
        Wanted("h", may_fail=True),
        Wanted("i"),
    ]
    assert leading_imports(str(tmp_path / "absent.py")) == []


# The keeper itself


def test_nothing_is_left_behind_when_the_keeper_ends(alone: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        client = Client(tmp_path)
        await client.connect(alone, preload=LIGHT)
        assert stat.S_IMODE((alone / "keeper.sock").stat().st_mode) == 0o600
        (tmp_path / "local.py").write_text("import os\nloaded_by = os.getpid()\n")
        launch = client.launch("""
        import local, os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            time.sleep(600)
        print(local.loaded_by, os.getpid(), flush=True)
        time.sleep(600)
        """)
        await client.start("job/1", launch)
        await client.start("job/2", client.launch("import time; time.sleep(600)", "other.py"))
        await until(lambda: client.log_of("job/1").exists() and client.log_of("job/1").read_text().endswith("\n"))
        pids = [client.pid, *map(int, client.log_of("job/1").read_text().split())]
        await client.close(end=True, grace_s=0.2)
        assert client.exits == {"job/1": -9, "job/2": -15}
        assert not any(map(lives, pids))
        assert not any(str(alone) in command for command in _commands())
        assert sorted(os.listdir(alone)) == ["exits", "keeper.log"]
        assert sorted(os.readlink(path) for path in (alone / "exits").iterdir()) == ["-15", "-9"]  # nobody forgot them
        with pytest.raises(Permanent, match="closed"):
            await client.children()

    asyncio.run(scenario())


def _commands() -> list[str]:
    """The command lines of all processes; forks of a keeper have the keeper's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def test_a_killed_keeper_is_noticed_and_another_one_started_while_replicas_live_on(alone: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        client, lost = Client(tmp_path), asyncio.Event()
        client.on_lost = lost.set
        await client.connect(alone, preload=LIGHT)
        launch = client.launch("import signal; signal.pause()")
        pid = await client.start("job/1", launch)
        first = client.pid
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await lost.wait()
        with pytest.raises(Temporary, match="is gone"):
            await client.children()
        await client.connect(alone, preload=LIGHT)
        assert client.pid != first
        assert await client.children() == []
        assert lives(pid)
        os.kill(pid, signal.SIGKILL)
        await client.close(end=True)

    asyncio.run(scenario())


def test_a_keeper_that_is_not_ready_yet_ends_with_its_client(alone: Path) -> None:
    async def scenario() -> None:
        client = KeeperClient()
        connecting = asyncio.create_task(client.connect(alone))
        await until(lambda: client._starting is not None)
        group = client._starting._process.pid
        connecting.cancel()
        await client.close(end=False)
        assert not any(map(lives, members_of(group)))
        assert not (alone / "keeper.sock").exists()

    asyncio.run(scenario())


def test_a_keeper_that_is_not_ready_in_time_ends(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    caplog.set_level("INFO", logger="pollux.node")
    with pytest.raises(Permanent, match="did not answer within 1 s"):
        asyncio.run(KeeperClient().connect(alone, preload=("endless",), timeout_s=1.0))
    started = [int(pid) for pid in re.findall(r"A keeper is started: process (\d+)", caplog.text)]
    assert len(started) == 1
    assert not any(map(lives, members_of(started[0])))
    assert not (alone / "keeper.sock").exists()


def test_of_two_keepers_that_start_at_once_the_one_too_many_ends_with_its_witness(alone: Path) -> None:
    async def scenario() -> None:
        first, second = KeeperClient(), KeeperClient()
        place = os.open(alone, os.O_RDONLY)
        fcntl.flock(place, fcntl.LOCK_EX)  # neither of them listens yet
        connecting = [asyncio.create_task(client.connect(alone, preload=LIGHT)) for client in (first, second)]
        await until(lambda: first._starting is not None and second._starting is not None)
        groups = [client._starting._process.pid for client in (first, second)]
        os.close(place)
        await asyncio.gather(*connecting)
        pids = {first.pid, second.pid}
        lives_on = [any(map(lives, members_of(group))) for group in groups]
        # Whoever asked last is its daemon, and ends it.
        await asyncio.gather(first.close(end=True), second.close(end=True))
        assert not any(map(lives, pids))
        assert len(pids) == 1
        assert sorted(lives_on) == [False, True]

    asyncio.run(scenario())


def test_a_keeper_whose_starter_was_killed_meanwhile_does_not_serve(alone: Path) -> None:
    """Nobody would know of it, and who ends the keepers of a folder would have passed it by."""
    starter = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    words = ("--dir", alone, "--preload", "", "--starter", starter.pid, start_ticks(starter.pid))
    starter.kill()
    starter.communicate()
    keeper = [sys.executable, "-P", "-m", "pollux.node.keeper", *map(str, words)]
    done = subprocess.run(keeper, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert f"Process {starter.pid}, which has started this keeper, is gone" in done.stderr
    assert os.listdir(alone) == []


def test_a_module_that_cannot_be_loaded_is_skipped(alone: Path) -> None:
    async def scenario() -> None:
        client = KeeperClient()
        await client.connect(alone, preload=("no_such_module", "json"))
        await client.close(end=True)

    asyncio.run(scenario())
    assert "without no_such_module" in (alone / "keeper.log").read_text()


def test_a_keeper_that_dies_at_its_start_is_reported_with_its_last_words(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text("import os, sys\nsys.stderr.write('out of luck\\n')\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(Permanent, match="out of luck"):
        asyncio.run(KeeperClient().connect(alone, preload=("deadly",)))


def test_what_is_no_request_is_refused_and_harms_nobody(with_keeper: Any, shared: Path) -> None:
    async def scenario(client: Client) -> None:
        for garbage in (b"\xff\n", b"[1]\n", b"{}\n", b'{"id":1,"do":"spawn","tag":"job/1"}\n', b'{"do":'):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
                raw.connect(str(shared / "keeper.sock"))
                raw.settimeout(PATIENCE_S)
                raw.sendall(garbage)
                raw.shutdown(socket.SHUT_WR)
                said = b"".join(iter(lambda: raw.recv(4096), b""))
            assert (b"error" in said) is (garbage == b"{}\n" or garbage.startswith(b'{"id'))
        await client.connect(shared)
        assert await client.children() == []

    with_keeper(scenario)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_another_user_is_refused(with_keeper: Any, shared: Path) -> None:
    async def scenario(client: Client) -> None:
        path = shared / "keeper.sock"
        shared.chmod(0o711)
        path.chmod(0o666)
        ask = f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})"
        ask += "; print(s.recv(100))"
        try:
            done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
        finally:
            path.chmod(0o600)
            shared.chmod(0o700)
        assert done.stdout == "b''\n" or "ConnectionReset" in done.stderr, done.stderr
        assert await client.children() == []
        assert "user 65534 is refused" in (shared / "keeper.log").read_text()

    with_keeper(scenario)


def test_a_keeper_that_nobody_needs_ends_by_itself(alone: Path) -> None:
    command = [sys.executable, "-P", "-m", "pollux.node.keeper", "--dir", str(alone), "--preload", "", "--idle-s", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert "nothing to tell" in done.stderr
    assert os.listdir(alone) == ["exits"]  # children of a keeper before may still end
    assert os.listdir(alone / "exits") == []


def test_replicas_find_torch_loaded_and_the_store_of_their_job(alone: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        client = Client(tmp_path)
        await client.connect(alone, preload=("torch",))
        log = (alone / "keeper.log").read_text()
        assert "WARNING" not in log
        pid, port = await client.host_store(JobId("job"))
        assert await client.host_store(JobId("job")) == (pid, port)
        assert (await client.host_store(JobId("other")))[1] != port
        (tmp_path / "local.py").write_text("import os, torch\nloaded_by = os.getpid()\nlayer = torch.nn.Linear(8, 8)\n")
        launch = client.launch(f"""
        import os
        import numpy
        import torch
        from local import layer, loaded_by
        from torch.distributed import TCPStore
        assert loaded_by != os.getpid()
        store = TCPStore("127.0.0.1", {port}, is_master=False)
        wide = torch.ones(600, 600)
        store.set(os.environ["RANK"], str(numpy.random.random()))
        assert store.get("0") and (wide @ wide).sum() == 600**3
        layer(torch.ones(8, 8)).sum().backward()
        print(torch.get_num_threads(), numpy.random.random())
        """)
        # Weights that a module draws when it is imported: its template is of no use, and said to be so.
        code, said = await client.run("job/0", launch, RANK="0", OMP_NUM_THREADS="2")
        assert code == 1
        assert "random numbers of torch" in (alone / "keeper.log").read_text()
        (tmp_path / "local.py").write_text(
            "import os, torch\nloaded_by = os.getpid()\nlayer = torch.nn.Softmax(dim=0)\n"
        )
        source = Path(launch.script).read_text().replace("layer(torch.ones(8, 8)).sum().backward()", "")
        Path(launch.script).write_text(source)
        draws = set()
        for rank in (1, 2):
            code, said = await client.run(f"job/{rank}", launch, RANK="0", OMP_NUM_THREADS=str(rank))
            assert code == 0, said
            threads, draw = said.split()
            assert int(threads) == rank
            draws.add(draw)
        assert len(draws) == 2
        assert lives(pid)
        await client.forget_job(JobId("job"))
        await until(lambda: not lives(pid))
        assert await client.children() == []
        await client.close(end=True)

    asyncio.run(scenario())
