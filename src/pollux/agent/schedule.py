"""Learning-rate schedules follow statistical progress: one step of the schedule for each iteration of M0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

ROUNDING = 1e-6


class Schedule(Protocol):
    """What every scheduler of torch has in common."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class ProgressSchedule:
    """The user's scheduler as the training loop holds it; what is not here is the scheduler's own.

    Called once an iteration, inside the loop over the loader, it takes as many steps as iterations of M0 have been
    completed: none on accumulation passes, several after a large batch, and one at most where the call brings a value
    (a metric, a position). Called once an epoch it is passed on: epochs are statistical already.
    """

    def __init__(self, inner: Schedule, progress: Callable[[], float | None]) -> None:
        self.inner = inner
        self._progress = progress
        self._steps_in_loop = 0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        done = self._progress()
        if done is None:
            return self.inner.step(*args, **kwargs)
        due = int(done + ROUNDING) - self._steps_in_loop
        for _ in range(min(due, 1) if args or kwargs else due):
            self.inner.step(*args, **kwargs)
        self._steps_in_loop += max(due, 0)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "steps_in_loop": self._steps_in_loop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self._steps_in_loop = state["steps_in_loop"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
