"""At which step the members of a job change over to others."""

from __future__ import annotations

from typing import Any

from pollux.wire.replicas import Instruction


class StepAgreement:
    """The members agree on the step after which they switch, through the store, without holding up training.

    Each tells the store that it knows of the switch, and from then on looks after every step. Once all have, the first
    one names the step that it is about to take: nobody finishes that step without it, so that all see the name in time.
    """

    def __init__(self, store: Any, instruction: Instruction, rank: int, size: int) -> None:
        self.instruction = instruction
        self._store = store
        self._name = f"{instruction.generation}.{instruction.membership}/switch"
        self._rank = rank
        self._size = size
        self._step: int | None = None
        self._has_told = False

    def tell(self) -> None:
        """This member knows of the switch, and looks after every step."""
        self._store.set(f"{self._name}/told/{self._rank}", "")
        self._has_told = True

    def is_due(self, step: int) -> bool:
        """Asked after each step."""
        if not self._has_told:
            self.tell()
        if self._step is None:
            self._look(step)
        return self._step is not None and step >= self._step

    def _look(self, step: int) -> None:
        if self._rank == 0:
            if self._store.check([f"{self._name}/told/{rank}" for rank in range(self._size)]):
                self._store.set(f"{self._name}/step", str(step + 1))
                self._step = step + 1
        elif self._store.check([f"{self._name}/step"]):
            self._step = int(self._store.get(f"{self._name}/step"))
