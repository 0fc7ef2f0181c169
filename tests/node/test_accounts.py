"""Real users: these need root, as `--job-user` does."""

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pollux.core import JobId
from pollux.errors import InvalidSpec
from pollux.node.accounts import account_of, give, unreachable
from pollux.node.keeper_client import KeeperClient
from pollux.wire.nodes import Launch

from .daemons import short_folder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")


@pytest.fixture
def folder():
    with short_folder() as path:
        yield path


@needs_root
@pytest.mark.parametrize(("name", "problem"), [("no-such-user", "no user"), ("root", "is root"), ("a\0b", "no user")])
def test_users_that_will_not_do(name, problem):
    with pytest.raises(InvalidSpec, match=problem) as told:
        account_of(name)
    assert told.value.field == "--job-user"


@needs_root
def test_who_is_not_root_is_told_so():
    script = (
        "import os\nfrom pollux.node.accounts import account_of, become\nbecome(account_of('nobody'))\n"
        "try:\n    account_of('nobody')\nexcept Exception as error:\n    print(error)\n"
        "print(os.getresuid(), os.getresgid(), os.getgroups())\n"
        "for path in ('/proc/self/environ', '/root/.bashrc'):\n"
        "    try:\n        open(path).close()\n    except PermissionError:\n        print('closed')\n"
        "try:\n    os.setuid(0)\nexcept PermissionError:\n    print('for good')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    user = account_of("nobody")
    told, ids, *rest = done.stdout.splitlines()
    assert "only root" in told
    assert ids == f"{(user.uid,) * 3} {(user.gid,) * 3} {list(user.groups)}"
    assert rest == ["closed", "closed", "for good"]


@needs_root
def test_a_folder_and_what_is_in_it_is_given_and_nothing_that_it_leads_to(folder):
    user = account_of("nobody")
    outside, given = folder / "outside", folder / "given"
    outside.mkdir()
    (outside / "file").write_text("ours")
    (outside / "linked").write_text("ours")
    (given / "deep").mkdir(parents=True)
    (given / "deep" / "saved").write_text("theirs")
    (given / "away").symlink_to(outside)
    os.link(outside / "linked", given / "linked")
    give(given, user)
    assert stat.S_IMODE(given.stat().st_mode) == 0o700
    assert {path.lstat().st_uid for path in (given, given / "deep", given / "deep" / "saved", given / "away")} == {
        user.uid
    }
    assert {path.stat().st_uid for path in (outside, outside / "file", outside / "linked")} == {0}
    (given / "deep" / "later").write_text("of root")
    give(given, user)
    assert (given / "deep" / "later").stat().st_uid == 0


@needs_root
def test_the_folder_that_bars_the_way_is_named(folder):
    user = account_of("nobody")
    folder.chmod(0o711)
    open_, closed = folder / "open", folder / "open" / "closed"
    (closed / "below").mkdir(parents=True)
    assert unreachable(closed / "below", user) is None
    closed.chmod(0o700)
    assert unreachable(closed / "below", user) == closed
    assert unreachable(open_ / "not there yet", user) is None
    assert unreachable(Path("/"), user) is None


@needs_root
def test_replicas_commands_and_what_imports_their_code_are_that_user_and_write_to_logs_that_it_cannot_find(folder):
    """One replica is forked from a template, which has become that user before, and cannot open a log any more."""
    user = account_of("nobody")
    folder.chmod(0o711)
    logs, script, module = folder / "logs", folder / "code" / "train.py", folder / "code" / "beside.py"
    logs.mkdir(mode=0o700)
    script.parent.mkdir()
    script.parent.chmod(0o755)
    module.write_text("import os\nloaded_by = os.getpid(), os.getuid()\n")
    script.write_text(
        "import beside\nimport os\n"
        "print(beside.loaded_by[0] == os.getpid(), beside.loaded_by[1], os.getresuid(), os.getgroups(), flush=True)\n"
        "open('/dev/stderr', 'a').write('anew\\n')\n"
        f"try:\n    open({str(logs / 'job-1.log')!r})\nexcept PermissionError:\n    print('closed')\n"
    )
    for path in (script, module):
        path.chmod(0o644)
    ended: dict[str, int] = {}

    async def story() -> None:
        client = KeeperClient(user="nobody")
        client.on_exit = lambda tag, pid, code: ended.__setitem__(tag, code)
        await client.connect(folder / "keeper", preload=("json",))
        try:
            launch = Launch(JobId("job"), str(script), directory=str(folder))
            await client.spawn("job/1", launch, {}, logs / "job-1.log")
            command = Launch(JobId("job"), "sh", ("-c", "id -u; id -g; id -G"), directory="/", is_plain=True)
            await client.spawn("job/2", command, {}, logs / "job-2.log")
            async with asyncio.timeout(60.0):
                while len(ended) < 2:
                    await asyncio.sleep(0.01)
        finally:
            await client.close(end=True)

    asyncio.run(story())
    uids = (user.uid,) * 3
    expected = [f"False {user.uid} {uids} {list(user.groups)}", "anew", "closed"]
    assert (logs / "job-1.log").read_text().splitlines() == expected
    groups = " ".join(map(str, user.groups))
    assert (logs / "job-2.log").read_text().splitlines() == [str(user.uid), str(user.gid), groups]
    assert ended == {"job/1": 0, "job/2": 0}
    assert {path.stat().st_uid for path in logs.iterdir()} == {user.uid}
