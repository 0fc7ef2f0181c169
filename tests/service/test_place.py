"""The folder of a cluster: who may read it, who may run in it, and what it says of both."""

import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from pollux.core import FrozenMap
from pollux.errors import InvalidSpec, Permanent
from pollux.node.accounts import account_of
from pollux.service.place import ClusterConfig, ClusterFolder, ServiceFile, read_token

FILE = ServiceFile(pid=4242, url="http://127.0.0.1:7333", version="0.1", started_at_s=1.5)


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="place-", dir="/tmp"))
    yield ClusterFolder(path / "cluster")
    shutil.rmtree(path)


@pytest.fixture
def made(folder):
    """As after `pollux down`: a service ran here once."""
    folder.make()
    folder.lock()
    folder.unlock()
    return folder


def copy_of(folder, text, node="n0"):
    """Of the token, as a daemon leaves it."""
    copy = folder.nodes / node / "token"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text)
    return copy


def test_it_is_in_the_users_own_folder_of_pollux(monkeypatch):
    monkeypatch.setenv("POLLUX_HOME", "/somewhere")
    assert ClusterFolder().path == Path("/somewhere/cluster")


def test_nobody_else_may_read_it_or_its_token(made):
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(made.token_file.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_jobs_of_another_user_pass_through_to_their_checkpoints_and_read_nothing_else(made):
    def mode(path):
        return stat.S_IMODE(path.stat().st_mode), path.stat().st_uid

    user, ours, theirs = account_of("nobody"), made.checkpoint_dir("j-1"), made.checkpoint_dir("j-2")
    ours.mkdir(parents=True)
    (ours / "saved").touch()
    made.make_checkpoints("j-1", str(ours))
    assert mode(ours)[1] == 0  # there is no other user yet
    made.admit(user)
    for job, folder in (("j-1", ours), ("j-2", theirs)):
        made.make_checkpoints(job, str(folder))
        assert mode(folder) == (0o700, user.uid)
        assert mode(folder.parent) == (0o711, 0)
    assert mode(ours / "saved")[1] == user.uid
    elsewhere = made.path.parent / "elsewhere"
    made.make_checkpoints("j-3", str(elsewhere))
    assert not elsewhere.exists()
    assert {mode(path) for path in (made.path, made.nodes, made.jobs)} == {(0o711, 0)}
    made.make()  # by somebody who tries to start another one
    assert mode(made.path) == (0o711, 0)
    made.admit(None)
    assert {mode(path) for path in (made.path, made.nodes, made.jobs)} == {(0o700, 0)}


class TestTheToken:
    def test_stays(self, made):
        token = made.token()
        made.make()
        made.lock()
        assert made.token() == token
        assert len(token) == 64
        made.unlock()

    def test_is_made_by_nobody_but_the_one_that_holds_the_lock(self, folder):
        folder.make()
        assert not folder.token_file.exists()
        folder.lock()
        token = folder.token()
        folder.token_file.unlink()
        other = ClusterFolder(folder.path)
        other.make()
        with pytest.raises(Permanent, match="runs already"):
            other.lock()
        assert not folder.token_file.exists()
        assert folder.token() == token, "who holds the lock knows it"
        folder.unlock()

    @pytest.mark.parametrize("left", [None, "", "\n"])
    def test_that_is_lost_is_taken_from_a_daemon_that_may_live(self, made, left):
        token = made.token()
        os.utime(copy_of(made, "1" * 64, "n1"), (1, 1))  # of a node that was ended long ago
        copy_of(made, token)
        made.token_file.unlink()
        if left is not None:
            made.token_file.write_text(left)
        made.lock()
        assert made.token() == made.token_file.read_text() == token
        assert stat.S_IMODE(made.token_file.stat().st_mode) == 0o600
        made.unlock()

    def test_is_another_one_if_nobody_is_left_who_knows_it(self, made):
        token = made.token()
        copy_of(made, token)
        made.forget_token_copies()
        made.token_file.unlink()
        made.lock()
        assert made.token() != token
        made.unlock()

    def test_that_is_too_short_is_told_and_left_alone(self, made):
        made.token_file.write_text("hunter2")
        with pytest.raises(Permanent, match="shorter than 16") as caught:
            made.lock()
        assert "hunter2" not in str(caught.value)
        assert made.token_file.read_text() == "hunter2"
        assert not made.is_locked


class TestStayingFound:
    """What a service that runs does once a second."""

    CONFIG = ClusterConfig(nodes=2)

    @pytest.fixture
    def running(self, made):
        made.lock()
        made.write_config(self.CONFIG)
        made.write_service_file(FILE)
        yield made
        made.unlock()

    def test_nothing_is_written_that_is_there(self, running):
        before = {path: path.stat().st_ino for path in running.path.iterdir()}
        assert running.keep(FILE, self.CONFIG) == []
        assert {path: path.stat().st_ino for path in running.path.iterdir()} == before

    @pytest.mark.parametrize("name", ["token", "service.json", "cluster.json", "lock"])
    def test_what_is_gone_is_written_again(self, running, name):
        path = running.path / name
        text = path.read_text()
        path.unlink()
        assert running.keep(FILE, self.CONFIG) == [name]
        assert path.read_text() == text
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ClusterFolder(running.path).running() == FILE

    @pytest.mark.parametrize("name", ["token", "service.json", "cluster.json"])
    @pytest.mark.parametrize("damage", ["", "{", "\0\xff", "another-token-of-somebody"])
    def test_what_is_damaged_is_written_again(self, running, name, damage):
        path = running.path / name
        text = path.read_text()
        path.write_text(damage)
        assert running.keep(FILE, self.CONFIG) == [name]
        assert path.read_text() == text

    def test_what_the_next_service_is_told_may_be_changed(self, running):
        running.write_config(ClusterConfig(nodes=3))
        assert running.keep(FILE, self.CONFIG) == []
        assert running.config() == ClusterConfig(nodes=3)

    def test_a_folder_that_was_removed_is_not_made_again(self, running):
        shutil.rmtree(running.path)
        with pytest.raises(FileNotFoundError):
            running.keep(FILE, self.CONFIG)
        assert not running.path.exists()


def test_a_folder_that_cannot_be_made_names_what_to_set(folder):
    folder.path.parent.joinpath("file").touch()
    with pytest.raises(InvalidSpec, match="POLLUX_HOME") as caught:
        ClusterFolder(folder.path.parent / "file" / "cluster").make()
    assert caught.value.field == "--dir"


def test_a_folder_that_is_read_only_is_refused():
    with pytest.raises(InvalidSpec, match="cannot be used as a folder"):
        ClusterFolder(Path("/proc/pollux")).make()  # where not even root may write


def test_a_path_that_is_too_long_for_sockets_is_refused_before_anything_is_made(folder):
    deep = ClusterFolder(folder.path / ("x" * 100))
    with pytest.raises(InvalidSpec, match="too long"):
        deep.make()
    assert not folder.path.exists()


def test_only_one_service_runs_in_it(made):
    made.lock()
    other = ClusterFolder(made.path)
    assert other.is_locked
    made.write_service_file(FILE)
    with pytest.raises(Permanent, match=r"pid 4242, http://127.0.0.1:7333"):
        other.lock()
    made.unlock()
    made.unlock()
    assert not other.is_locked
    other.lock()
    other.unlock()


def test_a_service_that_is_just_starting_has_no_address(made):
    made.lock()
    with pytest.raises(Permanent, match="just starting"):
        ClusterFolder(made.path).lock()
    made.unlock()


def test_a_service_file_without_its_lock_is_stale(made):
    made.write_service_file(FILE)
    assert made.service_file() == FILE
    assert made.running() is None
    made.lock()
    assert made.running() == FILE
    made.unlock()
    made.remove_service_file()
    made.remove_service_file()
    assert made.service_file() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"other": 1}'])
def test_a_damaged_service_file_is_none(made, text):
    (made.path / "service.json").write_text(text)
    assert made.service_file() is None


def test_what_up_was_told_comes_back(made):
    assert made.config() is None
    told = ClusterConfig(2, 4, "pollux", FrozenMap({"p": -1.0, "solver": "genetic"}), 5.0, "0.0.0.0", 0, "t4", 7.5, 3.0)
    made.write_config(told)
    assert made.config() == told


def test_fields_of_another_version_are_passed_over(made):
    (made.path / "cluster.json").write_text(json.dumps({"nodes": 3, "colour": "red"}))
    assert made.config() == ClusterConfig(nodes=3)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"policy_options": 3}'])
def test_a_damaged_configuration_is_told(made, text):
    (made.path / "cluster.json").write_text(text)
    with pytest.raises(Permanent, match=r"cluster\.json cannot be read"):
        made.config()


def test_node_folders_come_in_the_order_of_their_numbers(made):
    for name in ("n10", "n2", "n0", "notes"):
        (made.nodes / name).mkdir(parents=True)
    assert [path.name for path in made.node_folders()] == ["n0", "n2", "n10"]


def test_a_token_that_cannot_be_read_is_told(made):
    made.token_file.write_text("")
    with pytest.raises(Permanent, match="is empty"):
        made.token()
    with pytest.raises(Permanent, match="No such file"):
        read_token(made.path / "absent")


def test_a_job_saves_in_the_folder_unless_it_names_another(made):
    assert made.checkpoint_dir("j7") == made.path / "jobs" / "j7" / "checkpoints"
