"""What simulated agents are told of their kind when they get their GPUs: all that the profile registry has by then."""

from __future__ import annotations

from pollux.core import FrozenMap, KindProfile
from pollux.goodput.pooled import Corrected, Kind
from pollux.simulator.run import Training


class Lore:
    """Of one world. Jobs of a kind share its model, which deployed agents make each for itself."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, str], tuple[KindProfile, Kind]] = {}  # by kind and GPU type; what was noted last

    def tell(self, training: Training, gpu_type: str, kinds: FrozenMap[str, KindProfile]) -> None:
        """It is about to be put on such GPUs; `kinds` is the registry."""
        kind = training.spec.application
        known = None if kind is None else kinds.get(kind)
        training.agent.told = None if kind is None or known is None else self._model(kind, gpu_type, known)

    def _model(self, kind: str, gpu_type: str, known: KindProfile) -> Corrected | None:
        noted, pool = self._pools.get((kind, gpu_type), (None, Kind()))
        if noted is not known:
            pool.note(known.profile.of_type(gpu_type))
            self._pools[kind, gpu_type] = known, pool
        return pool.model()
