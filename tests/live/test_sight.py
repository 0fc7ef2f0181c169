"""What jobs see of their cluster: never its token, nor what belongs to another job. With real users, too."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.live.cluster import PATIENCE_S, QUICK, LiveCluster, until
from tests.live.course import Course
from tests.node.test_rights import REQUESTS

from pollux.errors import Permanent
from pollux.node.accounts import account_of, unreachable
from pollux.node.inherited import inherited
from pollux.service.routes import ROUTES
from pollux.wire.credentials import ReplicaIdentity, credential, holder, job_secret
from pollux.wire.frames import ask

pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent
SCRIPTS = ("probe.py", "probing_train.py", "train.py")
SHELL = {"HF_TOKEN": "shell-5ecret", "NVIDIA_API_KEY": "shell-5ecret", "MY_PASSWORD": "shell-5ecret"}
"""What somebody has in the shell in which `pollux up` is run."""
OF_OTHERS = "5ecret-of-another-job"
OF_THE_CLUSTER = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "POLLUX_JOB", "POLLUX_CHECKPOINT_DIR"}
OF_A_REPLICA = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "POLLUX_GENERATION"),
    *("POLLUX_REPLICA", "POLLUX_SOCKET", "POLLUX_STORE", "POLLUX_HEARTBEAT_S", "POLLUX_EXPERIENCE", "POLLUX_NEWCOMER"),
}
FROM_IMPORTS = re.compile(r"TORCH\w*|KMP_\w+")
"""Variables that torch sets when it is loaded."""


class Probed(LiveCluster):
    """A cluster with an elastic job and an ended command, both of which have secrets, and jobs that look for them."""

    def prepare(self) -> None:
        self.home.chmod(0o711)
        self.scripts, self.out = self.home / "scripts", self.home / "out"
        self.scripts.mkdir()
        self.scripts.chmod(0o755)
        self.out.mkdir()
        self.out.chmod(0o777)
        for name in SCRIPTS:
            shutil.copy(HERE / name, self.scripts / name)
            (self.scripts / name).chmod(0o644)
        (self.home / "foreign").write_text("foreign-t0ken-of-another-cluster")
        self.shell |= SHELL

    def start(self, *arguments: object) -> Probed:
        foreign = {"POLLUX_TOKEN_FILE": str(self.home / "foreign"), "POLLUX_URL": "http://127.0.0.1:1"}
        options = ("--nodes", 1, "--slots", 3, "--port", 0, "--dir", self.folder.path, *QUICK)
        self.pollux("up", *options, *arguments, env=foreign)
        secret = ("--env", f"MY_SECRET={OF_OTHERS}")
        ended = self.pollux("submit", "--gpus", 1, *secret, "--", "true").strip()
        self.wait(ended, "succeeded")
        self.other = self.train("other", options=("--max-gpus", 1, *secret), script=self.scripts / "train.py")
        self.wait_step(self.other, 2)
        return self

    def probe(self, name: str, *, is_elastic: bool, tries: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Course]:
        """What a job sees that looks around; a replica then trains on."""
        wrote, paths = self.out / f"{name}.json", self.home / f"{name}.paths"
        options: tuple[object, ...] = ("--env", f"PROBE_OUT={wrote}", "--env", "MY_SECRET=own-5ecret")
        if tries:
            paths.write_text("\n".join(map(str, tries)))
            paths.chmod(0o644)
            options += ("--env", f"PROBE_PATHS={paths}")
        if is_elastic:
            script = self.scripts / "probing_train.py"
            course = self.train(name, options=("--max-gpus", 1, *options), script=script)
            self.wait_step(course, 2)
        else:
            command = (self.python, self.scripts / "probe.py")
            job = self.pollux("submit", "--name", name, "--gpus", 1, *options, "--", *command).strip()
            assert self.wait(job, "succeeded", "failed").phase == "succeeded", self.story(job)
            course = Course(job, self.out / name)
        return json.loads(wrote.read_text()), course

    def all_files(self) -> tuple[Path, ...]:
        return tuple(sorted(path for path in self.folder.path.rglob("*") if path.is_file()))

    def foreign(self) -> set[str]:
        """What no job but its own, and no job at all, may find."""
        token, other = self.folder.token(), self.other.job
        replicas = [log.replica for log in self.client.logs(other).logs]
        assert replicas
        keys = {credential(token, ReplicaIdentity(other, replica)).rpartition(":")[2] for replica in replicas}  # type: ignore[arg-type]
        texts = {token, (self.home / "foreign").read_text(), OF_OTHERS, job_secret(token, other)}  # type: ignore[arg-type]
        return {*texts, *keys, *SHELL.values()}


def assert_sees_nothing_foreign(cluster: Probed, seen: dict[str, Any]) -> None:
    assert seen["environment"]["MY_SECRET"] == "own-5ecret"
    text = json.dumps(seen)
    assert [each for each in cluster.foreign() if each in text] == []


def assert_environment_is_documented(cluster: Probed, seen: dict[str, Any], more: set[str]) -> None:
    known = set(inherited(cluster.environment())) | OF_THE_CLUSTER | more | {"PROBE_OUT", "PROBE_PATHS", "MY_SECRET"}
    known |= {"HOME", "USER", "LOGNAME", "SHELL"}
    found = {name for name in seen["environment"] if not FROM_IMPORTS.fullmatch(name)}
    assert found <= known


def assert_own_credential_is_good_for_nothing_else(cluster: Probed, seen: dict[str, Any], course: Course) -> None:
    token, own = cluster.folder.token(), seen["credentials"]["POLLUX_CREDENTIAL"]
    identity = holder(token, own)
    assert identity is not None
    assert identity.job == course.job
    assert seen["credentials"].keys() == {"POLLUX_CREDENTIAL", "POLLUX_JOB_SECRET"}
    bearer = {"Authorization": f"Bearer {own}"}
    for route in ROUTES:
        path = route.path.format(job=course.job, node="n0", replica=identity.replica)
        answer = httpx.request(route.method, f"{cluster.client.url}{path}", headers=bearer, json={})
        assert answer.status_code == 403, route
    socket = seen["environment"]["POLLUX_SOCKET"]
    for request in REQUESTS:
        with pytest.raises(Permanent, match=type(request).__name__):
            ask(socket, own, request, PATIENCE_S)


def in_memory(pid: int, text: str) -> bool:
    """Whether a process of ours has this anywhere in its memory."""
    regions = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for where, rights, *rest in regions:
            if not rights.startswith("rw") or "[v" in "".join(rest):
                continue
            start, _, end = where.partition("-")
            memory.seek(int(start, 16))
            try:
                if text.encode() in memory.read(int(end, 16) - int(start, 16)):
                    return True
            except OSError:
                continue
    return False


def assert_neither_keeper_nor_replicas_know_the_token(cluster: Probed) -> None:
    forked = [pid for pid, command in cluster.processes().items() if "pollux.node.keeper" in command]
    assert len(forked) >= 3  # the keeper, a store, a replica
    assert [pid for pid in forked if in_memory(pid, cluster.folder.token())] == []
    daemons = [pid for pid, command in cluster.processes().items() if "pollux.cli.main node" in command]
    assert all(in_memory(pid, cluster.folder.token()) for pid in daemons)  # else we do not see well


@pytest.fixture(scope="module")
def cluster() -> Iterator[Probed]:
    made = Probed()
    try:
        made.prepare()
        yield made.start()
    finally:
        made.end()


def test_a_plain_command_finds_no_credential_at_all(cluster: Probed) -> None:
    seen, _ = cluster.probe("plain", is_elastic=False)
    assert_sees_nothing_foreign(cluster, seen)
    assert_environment_is_documented(cluster, seen, set())
    assert "pollux-replica:" not in json.dumps(seen)
    assert {name for name in seen["environment"] if name.startswith("POLLUX_")} == {
        *("POLLUX_JOB", "POLLUX_CHECKPOINT_DIR")
    }


def test_a_replica_finds_its_own_credential_which_is_good_for_its_reports_alone(cluster: Probed) -> None:
    seen, course = cluster.probe("elastic", is_elastic=True)
    assert_sees_nothing_foreign(cluster, seen)
    assert_environment_is_documented(cluster, seen, OF_A_REPLICA)
    assert_own_credential_is_good_for_nothing_else(cluster, seen, course)
    assert_neither_keeper_nor_replicas_know_the_token(cluster)
    until(lambda: cluster.job(course.job).step is not None, "its reports arrive")
    cluster.succeed(course)


# With a user for jobs


def readable_python(home: Path) -> tuple[str, dict[str, str]]:
    """A Python that anybody may run, and the variables that it needs: ours, or a copy if it is in a closed place."""
    user = account_of("nobody")
    if unreachable(Path(sys.executable).resolve().parent, user) is None:
        return sys.executable, {}
    base, copy = Path(sys.base_prefix), home / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    not_needed = shutil.ignore_patterns(
        "site-packages", "test", "tests", "idlelib", "config-*", "lib2to3", "__pycache__"
    )
    shutil.copytree(base / "lib" / version, copy / "lib" / version, ignore=not_needed)
    for library in (base / "lib").glob("libpython*"):
        shutil.copy(library, copy / "lib")
    (copy / "bin").mkdir()
    shutil.copy(Path(sys.executable).resolve(), copy / "bin" / version)
    packages = [sysconfig.get_path("purelib"), str(HERE.parents[1] / "src"), str(HERE.parents[1])]
    return str(copy / "bin" / version), {"LD_LIBRARY_PATH": str(copy / "lib"), "PYTHONPATH": os.pathsep.join(packages)}


@pytest.fixture(scope="module")
def separated() -> Iterator[Probed]:
    if os.geteuid() != 0:
        pytest.skip("only root can run jobs as another user")
    made = Probed()
    try:
        made.prepare()
        made.python, variables = readable_python(made.home)
        made.shell |= variables
        yield made.start("--job-user", "nobody")
    finally:
        made.end()


@pytest.mark.parametrize("is_elastic", [False, True], ids=["plain", "elastic"])
def test_a_job_of_another_user_finds_nothing_in_files_and_processes_either(separated: Probed, is_elastic: bool) -> None:
    cluster, user = separated, account_of("nobody")
    tries = cluster.all_files()
    assert {"token", "pollux.db", "cluster.json", "run.json", "node.log", "keeper.log"} <= {path.name for path in tries}
    seen, course = cluster.probe(f"user-{is_elastic}", is_elastic=is_elastic, tries=tries)
    assert (seen["uid"], seen["groups"]) == (user.uid, list(user.groups))
    assert {seen["environment"][name] for name in ("USER", "LOGNAME")} == {"nobody"}
    assert seen["environment"]["HOME"] == user.home
    assert_sees_nothing_foreign(cluster, seen)
    assert_environment_is_documented(cluster, seen, OF_A_REPLICA if is_elastic else set())
    # Jobs of one user can read each other's checkpoints, and experience if there is any: docs/operations.md says so.
    assert all("/checkpoints/" in path or path.endswith("experience.json") for path in seen["tried"])
    assert not {path for path in tries if path.name in ("token", "pollux.db")} & set(map(Path, seen["tried"]))
    assert not {f"/proc/{pid}/environ" for pid in cluster.processes()} & seen["processes"].keys()
    assert seen["memory"].keys() <= {"/proc/self/mem"}
    if is_elastic:
        assert_own_credential_is_good_for_nothing_else(cluster, seen, course)
        assert_neither_keeper_nor_replicas_know_the_token(cluster)
        until(lambda: cluster.job(course.job).step is not None, "its reports arrive")
        cluster.succeed(course)
        saved = cluster.folder.checkpoint_dir(course.job)
        assert (saved.stat().st_uid, saved.stat().st_mode & 0o777) == (user.uid, 0o700)
        assert any(saved.iterdir())


def test_jobs_of_another_user_save_when_the_cluster_ends_and_go_on(separated: Probed) -> None:
    job, step = separated.other.job, separated.other.last_step
    separated.down()
    assert any(separated.folder.checkpoint_dir(job).glob("checkpoint-*"))
    separated.up()
    separated.wait_step(separated.other, step + 2)
    until(lambda: "TrainingResumed" in separated.kinds(job), lambda: separated.story(job))
    separated.succeed(separated.other)
