"""Files that are damaged, lost, or replaced by older ones, a disk without room, and a port that somebody else has."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

from pollux.testing.chaos.fault import NotNow, Scene, fault
from pollux.testing.chaos.processes import Process, Role
from pollux.testing.chaos.replay import check_before_damage
from pollux.testing.chaos.violations import Kind, Violation

MANIFEST = "manifest.json"
FULL_S = (1.0, 5.0)
MOST_TAIL_BYTES = 6000
FEW_BYTES = 600


# The log


@fault("damaged-log-tail", ends_service=True)
def damage_log_tail(scene: Scene) -> str:
    """kill -9 of the service, and the end of its write-ahead log is lost or overwritten."""
    killed = _kill_service_with_good_log(scene)
    database = scene.bed.folder.database
    wal = database.with_name(f"{database.name}-wal")
    path = wal if wal.exists() and wal.stat().st_size else database
    scene.may_refuse_log = path is database
    return f"{killed}; {_damage_end(scene, path, MOST_TAIL_BYTES if path is wal else FEW_BYTES)}"


@fault("damaged-log-file", ends_service=True)
def damage_log_file(scene: Scene) -> str:
    """The service ends in good order, and the end of its database is lost or overwritten."""
    told = scene.bed.pollux("down", "--leave-jobs")
    if not told.is_good:
        raise NotNow(f"pollux down --leave-jobs {told}")
    scene.violations += check_before_damage(scene.bed)
    scene.may_refuse_log = True
    return f"ended the service; {_damage_end(scene, scene.bed.folder.database, FEW_BYTES)}"


@fault("emptied-log", ends_service=True)
def empty_log(scene: Scene) -> str:
    """kill -9 of the service, and its log is gone."""
    killed = _kill_service_with_good_log(scene)
    return f"{killed}; {move_log_away(scene)}"


@fault("restored-log", ends_service=True)
def restore_log(scene: Scene) -> str:
    """kill -9 of the service, and a backup takes the place of its log."""
    if not scene.backups:
        raise NotNow("there is no backup yet")
    backup = scene.draw.choice(scene.backups)
    killed = _kill_service_with_good_log(scene)
    moved = move_log_away(scene)
    shutil.copy(backup, scene.bed.folder.database)
    return f"{killed}; {moved}; restored {backup.name}, {len(scene.backups) - scene.backups.index(backup)} backups old"


def _kill_service_with_good_log(scene: Scene) -> str:
    """What it leaves must lead to one state, too: once the fault has fallen, nobody can tell any more."""
    killed = scene.kill_service()
    scene.violations += check_before_damage(scene.bed)
    return killed


def move_log_away(scene: Scene) -> str:
    """As the service advises where it cannot read its log."""
    database = scene.bed.folder.database
    found = sorted(path for path in database.parent.glob(f"{database.name}*") if path.suffix != ".lock")
    aside = scene.bed.home / "aside" / str(len(list((scene.bed.home / "aside").glob("*"))))
    aside.mkdir(parents=True)
    for path in found:
        shutil.move(path, aside / path.name)
    return f"moved {', '.join(path.name for path in found)} away"


# Checkpoints


@fault("damaged-checkpoint")
def damage_checkpoint(scene: Scene) -> str:
    """The newest checkpoint of a job is damaged, and all of its replicas are killed."""

    def fit() -> list[Process]:
        return [one for one in scene.bed.find(Role.REPLICA) if len(_checkpoints(scene, one.job)) > 1]

    found = scene.wait(fit, "no job that runs has two checkpoints")
    job = scene.draw.choice(sorted({one.job for one in found}))
    replicas = [one for one in found if one.job == job]
    for one in replicas:
        scene.bed.send(one, signal.SIGSTOP)  # it must not save another one in between
    *_, newest = _checkpoints(scene, job)
    files = sorted(path for path in newest.iterdir() if path.name != MANIFEST)
    damaged = _damage_end(scene, scene.draw.choice([*files, newest / MANIFEST]), FEW_BYTES)
    return f"{job}: {damaged} of {newest.name}; {scene.kill(replicas)}"


def _checkpoints(scene: Scene, job: str) -> list[Path]:
    """Oldest first; those that were found damaged before are not among them."""
    found = scene.bed.folder.checkpoint_dir(job).glob("checkpoint-*")
    return sorted(path for path in found if path.suffix != ".damaged")


# Room


@fault("full-disk")
def fill_disk(scene: Scene) -> str:
    """The disk with the folder of the cluster is full for some seconds."""
    seconds = scene.draw.uniform(*FULL_S)
    if (problem := scene.bed.fill_disk()) is not None:
        raise NotNow(problem)
    scene.later(seconds, scene.bed.free_disk)
    return f"filled the disk for {seconds:.1f} s"


# What people and commands find the service by


@fault("lost-token")
def lose_token(scene: Scene) -> str:
    """The token is removed while everything runs."""
    scene.bed.folder.token_file.unlink(missing_ok=True)
    return "removed the token"


@fault("lost-token-and-service", ends_service=True)
def lose_token_and_service(scene: Scene) -> str:
    """The token is removed, and the service killed: the next one finds daemons that know the old one."""
    return f"{lose_token(scene)}; {scene.kill_service()}"


@fault("lost-service-file")
def lose_service_file(scene: Scene) -> str:
    """service.json is removed while the service runs."""
    (scene.bed.folder.path / "service.json").unlink(missing_ok=True)
    return "removed service.json"


@fault("taken-port", ends_service=True)
def take_port(scene: Scene) -> str:
    """The service is killed, and another program listens on its port when it is to be started again."""
    file = scene.bed.folder.service_file()
    port = urlsplit(file.url).port if file is not None else None
    if port is None:
        raise NotNow("nobody knows the port of the service")
    killed = scene.kill_service()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", port))
            other.listen()
        except OSError:
            return f"{killed}; somebody else was faster to take port {port}"
        told = scene.bed.up("--port", str(port))
    if told.is_good or str(port) not in told.err or "taken" not in told.err:
        scene.violations.append(
            Violation(Kind.NO_RECOVERY, f"pollux up does not say that port {port} is taken: it {told}")
        )
    if scene.draw.random() < 0.5 and not told.is_good:
        again = scene.bed.up("--port", str(port))
        if not again.is_good:
            sentence = f"pollux up does not start on port {port}, which is free again: it {again}"
            scene.violations.append(Violation(Kind.NO_RECOVERY, sentence))
    return f"{killed}; took port {port}, and gave it back"


def _damage_end(scene: Scene, path: Path, most_bytes: int) -> str:
    """Cut off, or overwritten with something else."""
    size = path.stat().st_size
    count = min(size, scene.draw.randint(1, most_bytes))
    if scene.draw.random() < 0.5:
        os.truncate(path, size - count)
        return f"cut the last {count} of {size} bytes off {path.name}"
    with path.open("r+b") as file:
        file.seek(size - count)
        was = file.read()
        file.seek(size - count)
        file.write(bytes(byte ^ 0xA5 for byte in was))
    return f"overwrote the last {count} of {size} bytes of {path.name}"
