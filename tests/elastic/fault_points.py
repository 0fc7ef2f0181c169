"""train.py, with replicas that die by kill -9 at named points of their work.

FAULTS is a list of point:replica:count, separated by blanks: the replica dies when it comes to the point for the
count-th time. point:replica:count:other lets another replica die at that moment, point:replica:count:sleep lets
this one sleep for ever, and point:replica:count:pause until the file paused-point, which it makes, is taken away. At
the point `behind`, the replica itself goes on as the survivor that misses the gradients
that the others have got.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import runpy
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pollux.agent.adapting import Adapter
from pollux.agent.checkpoint import Checkpoints
from pollux.agent.membership import Membership
from pollux.agent.model import ReplicatedModel
from pollux.agent.rendezvous import Rendezvous
from pollux.agent.saving import Saver
from pollux.agent.state import TrainingState
from pollux.agent.stepping import Stepper
from pollux.agent.training import Training

NAME = os.environ["POLLUX_REPLICA"]
PIDS = Path("pids")


class Fault:
    """Strikes once."""

    def __init__(self, text: str) -> None:
        self.point, self.replica, count, *other = text.split(":")
        self._victim = other[0] if other else self.replica
        self._left = int(count)

    def come_by(self) -> None:
        self._left -= 1
        if self._left:
            return
        if self._victim == "sleep":
            time.sleep(3600)
        if self._victim == "pause":
            self._pause(Path(f"paused-{self.point}"))
            return
        if self._victim == NAME:
            os.kill(os.getpid(), signal.SIGKILL)
        pid = int((PIDS / self._victim).read_text())
        os.kill(pid, signal.SIGKILL)
        while is_running(pid):
            time.sleep(0.001)
        if self.point == "behind":
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer: said by the test")

    @staticmethod
    def _pause(mark: Path) -> None:
        mark.touch()
        while mark.exists():
            time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def before(owner: type, name: str, come_by: Callable[[], None]) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def called(*args: Any, **kwargs: Any) -> Any:
        come_by()
        return inner(*args, **kwargs)

    setattr(owner, name, called)


def after(owner: type, name: str, come_by: Callable[[], None]) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        come_by()
        return result

    setattr(owner, name, called)


def in_evaluation(come_by: Callable[[], None]) -> None:
    before(ReplicatedModel, "forward", lambda: None if torch.is_grad_enabled() else come_by())


def behind(come_by: Callable[[], None]) -> None:
    """As if the all-reduce had failed here alone."""
    inner = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        come_by()

    torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]


POINTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "start": functools.partial(before, Membership, "_try_join"),
    "forward": functools.partial(before, ReplicatedModel, "_replicated"),
    "reduce": functools.partial(before, Stepper, "_gradients_ready"),
    "careful": functools.partial(before, Stepper, "_agree_and_average"),
    "reduced": functools.partial(before, Stepper, "_before_optimizer"),
    "stepped": functools.partial(after, Stepper, "_after_optimizer"),
    "behind": behind,
    "beat": functools.partial(before, Adapter, "_beat"),
    "beaten": functools.partial(after, Adapter, "_beat"),
    "evaluate": in_evaluation,
    "compute": functools.partial(before, Membership, "sum"),
    "computed": functools.partial(after, Membership, "sum"),
    "between": functools.partial(before, Training, "_agree_to_go_on"),
    "went-on": functools.partial(after, Training, "_agree_to_go_on"),
    "save": functools.partial(before, Saver, "save"),
    "write": functools.partial(before, Checkpoints, "save"),
    "written": functools.partial(after, Checkpoints, "save"),
    "ready": functools.partial(before, Membership, "wait_to_join"),
    "switch": functools.partial(before, Membership, "regroup"),
    "join": functools.partial(before, Membership, "_try_join"),
    "gathered": functools.partial(after, Rendezvous, "gather"),
    "give": functools.partial(after, TrainingState, "full"),
    "take": functools.partial(before, Membership, "_take"),
    "taken": functools.partial(after, Membership, "_take"),
    "group": functools.partial(before, Rendezvous, "_connect"),
    "grouped": functools.partial(after, Rendezvous, "make_group"),
    "settle": functools.partial(before, Training, "_settle_in"),
    "settled": functools.partial(after, Training, "_settle_in"),
    "go": functools.partial(before, Membership, "_go"),
    "offered": functools.partial(after, Rendezvous, "offer"),
    "finish": functools.partial(before, Training, "_finish_loop"),
}

faulthandler.register(signal.SIGUSR1, all_threads=True)  # says where a replica hangs
PIDS.mkdir(exist_ok=True)
(PIDS / NAME).write_text(str(os.getpid()))
for text in os.environ.get("FAULTS", "").split():
    fault = Fault(text)
    if fault.replica == NAME:
        POINTS[fault.point](fault.come_by)
runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
