"""What jobs are told of their kind when they are put on GPUs: the registry's measurements, as a document for agents."""

from __future__ import annotations

from pollux.core import FrozenMap, Job, KindProfile, dumps, kind_of
from pollux.core.kinds import MAX_KINDS


class Experience:
    """Documents by kind, each written once until the registry has more of it: one may have 100 kB."""

    def __init__(self, is_shared: bool) -> None:
        """`is_shared`: whether the policy wants it told."""
        self._is_shared = is_shared
        self._written: dict[str, tuple[KindProfile, str]] = {}

    def of(self, job: Job, kinds: FrozenMap[str, KindProfile]) -> str:
        """A `Profile`; empty if there is nothing to tell."""
        kind = kind_of(job) if self._is_shared else None
        known = None if kind is None else kinds.get(kind)
        if kind is None or known is None:
            return ""
        if kind not in self._written or self._written[kind][0] is not known:
            if len(self._written) >= MAX_KINDS:
                self._written.clear()
            self._written[kind] = known, dumps(known.profile)
        return self._written[kind][1]
