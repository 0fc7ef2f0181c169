"""`FrozenMap`: the only mapping that core data holds.

Equal content means equal hash, equal iteration order and equal bytes, however the map was built. Keys must be
hashable and comparable with one another (text, `Shape`, `ObservationKey`); values must be hashable to hash the map.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from itertools import compress
from typing import Generic, NoReturn, TypeVar, overload

K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)
W = TypeVar("W")


class FrozenMap(Mapping[K, V_co], Generic[K, V_co]):
    """An immutable mapping that iterates in ascending order of its keys.

    Building costs one sort (linear when the input is sorted already); looking up costs what a dict costs. The hash is
    computed once, on demand, and never pickled: text hashes differ from process to process.
    """

    __slots__ = ("_content", "_hash")

    _content: dict[K, V_co]
    _hash: int | None

    def __init__(self, content: Mapping[K, V_co] | Iterable[tuple[K, V_co]] = ()) -> None:
        if isinstance(content, FrozenMap):
            ordered = content._content
        else:
            given = dict(content)
            ordered = {key: given[key] for key in sorted(given)} if len(given) > 1 else given  # type: ignore[type-var]
        object.__setattr__(self, "_content", ordered)
        object.__setattr__(self, "_hash", None)

    def __getitem__(self, key: K) -> V_co:
        return self._content[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, key: object) -> bool:
        return key in self._content

    # What Mapping would supply calls back into this class for every item; the dict's own views are ten times as fast.
    def keys(self) -> KeysView[K]:
        return self._content.keys()

    def values(self) -> ValuesView[V_co]:
        return self._content.values()

    def items(self) -> ItemsView[K, V_co]:
        return self._content.items()

    @overload
    def get(self, key: K, /) -> V_co | None: ...
    @overload
    def get(self, key: K, /, default: V_co | W) -> V_co | W: ...
    def get(self, key: K, /, default: object = None) -> object:
        return self._content.get(key, default)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMap):
            return self is other or self._content == other._content
        return self._content == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            object.__setattr__(self, "_hash", hash(tuple(self._content.items())))
        assert self._hash is not None
        return self._hash

    def __repr__(self) -> str:
        return f"FrozenMap({self._content!r})"

    def __reduce__(self) -> tuple[type[FrozenMap[K, V_co]], tuple[dict[K, V_co]]]:
        return type(self), (self._content,)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a FrozenMap cannot change ({name!r}): build another one with `with_item` or `without`")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a FrozenMap cannot change ({name!r}): build another one with `with_item` or `without`")

    def with_item(self, key: K, value: W) -> FrozenMap[K, V_co | W]:
        """The same map with `key` set to `value`. Sorts nothing: a new key is put where it belongs."""
        content: dict[K, V_co | W] = dict(self._content)
        if key not in content:
            items = list(content.items())
            items.insert(bisect(list(content), key), (key, value))  # type: ignore[call-overload]
            return _in_order(dict(items))
        content[key] = value
        return _in_order(content)

    def with_values(self, values: Iterable[W], is_kept: Iterable[bool]) -> FrozenMap[K, W]:
        """Other values for the keys, in their order; only the keys that are to be kept. Sorts nothing."""
        return _in_order(dict(compress(zip(self._content, values, strict=True), is_kept)))

    def merged(self, other: FrozenMap[K, W], merge: Callable[[V_co, W], V_co | W]) -> FrozenMap[K, V_co | W]:
        """All that is in either; `merge(mine, theirs)` under a key that is in both. Cheap if few keys are new."""
        content: dict[K, V_co | W] = dict(self._content)
        new: list[K] = []
        for key, value in other._content.items():
            if key in content:
                content[key] = merge(self._content[key], value)
            else:
                content[key] = value
                new.append(key)
        if new:
            if 8 * len(new) > len(content):
                return FrozenMap(content)
            ordered = list(self._content)
            for key in new:
                insort(ordered, key)  # type: ignore[call-overload]
            content = {key: content[key] for key in ordered}
        return _in_order(content)

    def without(self, key: K) -> FrozenMap[K, V_co]:
        """The same map less `key`; the map itself if it has no such key."""
        if key not in self._content:
            return self
        return _in_order({other: value for other, value in self._content.items() if other != key})


def _in_order(content: dict[K, V_co]) -> FrozenMap[K, V_co]:
    """The map of a dict whose keys ascend, and which nobody else holds."""
    made: FrozenMap[K, V_co] = FrozenMap()
    object.__setattr__(made, "_content", content)
    return made
