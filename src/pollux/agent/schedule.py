"""Learning-rate schedules follow statistical progress: one step of the schedule for each iteration of M0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

ROUNDING = 1e-6


class Schedule(Protocol):
    """What every scheduler of torch has in common."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Turn(NamedTuple):
    """The loop over the loader that runs: the how-many-eth, the progress at its start, and by now."""

    number: int
    start: float
    progress: float


class ProgressSchedule:
    """The user's scheduler as the training loop holds it; what is not here is the scheduler's own.

    Called once an iteration, inside the loop over the loader, it takes as many steps as iterations of M0 have been
    completed: none on accumulation passes, several after a large batch, and one at most where the call brings a value
    (a metric, a position). Iterations count from the first such call on, and anew after a turn of the loop without
    one. Called once an epoch it is passed on: epochs are statistical already.
    """

    def __init__(self, inner: Schedule, turn: Callable[[], Turn | None]) -> None:
        self.inner = inner
        self._turn = turn
        self._last_turn = -1
        self._counted = 0
        """Whole iterations that the schedule has heard of."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        turn = self._turn()
        if turn is None:
            return self.inner.step(*args, **kwargs)
        if not self._last_turn <= turn.number <= self._last_turn + 1:
            self._counted = int(turn.start + ROUNDING)
        self._last_turn = turn.number
        due = int(turn.progress + ROUNDING) - self._counted
        for _ in range(min(due, 1) if args or kwargs else due):
            self.inner.step(*args, **kwargs)
        self._counted += max(due, 0)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "last_turn": self._last_turn, "counted": self._counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self._last_turn, self._counted = state["last_turn"], state["counted"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def is_scheduled(optimizer: Any) -> bool:
    """Whether a scheduler of torch was made for this optimizer: they mark its `step`."""
    return bool(getattr(optimizer.step, "_wrapped_by_lr_sched", False))
