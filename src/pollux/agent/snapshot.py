"""Copies of training states that training can no longer change, made of nothing but what torch loads safely.

`torch.load(weights_only=True)` refuses more than one would guess: NumPy values, subclasses of dict, deques, empty
bytes, very large ints. It does so when the file is read, which is when it is too late. Here the same is refused when
the state is copied, with the path inside the state. What can be kept without loss is converted: NumPy arrays become
tensors, NumPy scalars Python numbers, parameters plain tensors.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pollux.errors import CheckpointError

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)
"""Kept as they are: nobody can change them."""

LONGEST_INT_BITS = 8 * 255 - 1
"""torch's safe reader knows only the short form of long ints: 255 bytes with the sign."""


def snapshot(state: Any, name: str = "") -> Any:
    """A deep copy of nested dicts, lists, tuples and sets in CPU memory, ready to be written while training goes on.

    Tensors of one type that share memory go on sharing it in the copy. Blocks until the copy is complete. Raises
    `CheckpointError` with the path (`user["ema"]["x"]`) and the type of what a checkpoint cannot hold; `name` is put
    before the path.
    """
    copies = _Copies()
    result = _Walk(copies.add).value(state, name)
    copies.make()
    return result


def checked(state: Any, name: str = "") -> Any:
    """The same state in the same memory, refused as `snapshot` refuses it: for writing it at once."""
    return _Walk(Tensor.detach).value(state, name)


class _Walk:
    """Rebuilds the containers of a state around what `tensor` makes of each tensor. What is shared stays shared."""

    def __init__(self, tensor: Callable[[Tensor], Tensor]) -> None:
        self._tensor = tensor
        # By id, with the original: while it is held here, no other object can get its id.
        self._seen: dict[int, tuple[object, Any]] = {}

    def value(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in PLAIN or isinstance(value, np.generic):
            value = self._plain(value, path)
            return bytearray() if value == b"" and type(value) is bytes else value  # torch refuses empty bytes only
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if isinstance(value, Tensor):
            return self._remember(value, self._tensor(_readable(value, path)))
        if kind is np.ndarray:
            return self._remember(value, _from_numpy(value, path))
        if kind is list:
            items: list[Any] = self._remember(value, [])
            items.extend(self.value(item, _at(path, index)) for index, item in enumerate(value))
            return items
        if kind in (dict, OrderedDict, Counter):
            mapping = self._remember(value, kind())
            for key, item in value.items():
                mapping[self._key(key, path)] = self.value(item, _at(path, key))
            if kind is not dict:
                # A module's state_dict carries the versions of its layers in the attribute _metadata.
                mapping.__dict__.update((k, self.value(v, f"{path}.{k}")) for k, v in vars(value).items())
            return mapping
        if kind is tuple:
            return self._remember(value, tuple(self.value(item, _at(path, i)) for i, item in enumerate(value)))
        if kind is set:
            return self._remember(value, {self._key(item, path) for item in value})
        if kind is bytearray:
            return self._remember(value, bytearray(value))
        _refuse(path, value)

    def _remember(self, original: object, copy: Any) -> Any:
        self._seen[id(original)] = (original, copy)
        return copy

    def _key(self, key: Any, path: str) -> Any:
        """A key of a dict or a member of a set."""
        if type(key) is tuple:
            return tuple(self._key(part, path) for part in key)
        plain = self._plain(key, path, " as a key")
        if plain == b"" and type(plain) is bytes:
            _refuse(path, key, " (empty) as a key")
        return plain

    def _plain(self, value: Any, path: str, place: str = "") -> Any:
        plain = value.item() if isinstance(value, np.generic) else value
        if type(plain) not in PLAIN:
            _refuse(path, value, place)
        if type(plain) is int and plain.bit_length() > LONGEST_INT_BITS:
            _refuse(path, value, f" of more than {LONGEST_INT_BITS} bits{place}")
        return plain


Key: TypeAlias = tuple[torch.device, torch.dtype, int, int]
"""Device, type, address and size of a storage.

With the type: torch.save refuses memory that is shown as two. With the size: two storages may begin at one address when
the memory belongs to somebody else (NumPy).
"""


@dataclass(slots=True)
class _Memory:
    """The part of one storage that tensors of the state show, in elements."""

    storage: torch.UntypedStorage
    start: int
    end: int
    views: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Each tensor with its copy, which is empty until the memory is copied."""


class _Copies:
    """Copies of tensors: memory is copied once, however many tensors show it, and only the part that they show."""

    def __init__(self) -> None:
        self._memories: dict[Key, _Memory] = {}

    def add(self, tensor: Tensor) -> Tensor:
        """A tensor that `make` fills."""
        tensor = tensor.detach()
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.to("cpu", copy=True)
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        start = int(tensor.storage_offset())
        end = start + 1 + sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
        key = (tensor.device, tensor.dtype, storage.data_ptr(), storage.nbytes())
        memory = self._memories.setdefault(key, _Memory(storage, start, end))
        memory.start, memory.end = min(memory.start, start), max(memory.end, end)
        copy = torch.empty(0, dtype=tensor.dtype)
        memory.views.append((tensor, copy))
        return copy

    def make(self) -> None:
        for (device, dtype, _, _), memory in self._memories.items():
            shown = torch.empty(0, dtype=dtype, device=device)
            shown.set_(memory.storage, memory.start, (memory.end - memory.start,))  # type: ignore[call-overload]
            storage = _to_cpu(shown).untyped_storage()
            for tensor, copy in memory.views:
                copy.set_(storage, int(tensor.storage_offset()) - memory.start, tensor.size(), tensor.stride())
        for device in {device for device, *_ in self._memories if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()


def _to_cpu(tensor: Tensor) -> Tensor:
    """A copy; from a CUDA device it is complete only after the stream is synchronised."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True)
    try:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # no more memory may be pinned: slower, and as good
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor, non_blocking=True)


def _readable(tensor: Tensor, path: str) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        _refuse(
            path, tensor, fix="Save a plain tensor: of a DTensor full_tensor(), of a lazy module after its first batch"
        )
    if tensor.device.type == "meta":
        _refuse(path, tensor, " on the device 'meta', which has no values", "Give the tensor values before it is saved")
    return tensor


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        # A copy in the byte order of this machine, which is the only one that torch knows.
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        _refuse(path, array, f" of {array.dtype}", "Save it as a tensor, a list or text")


def _at(path: str, key: object) -> str:
    if isinstance(key, str):
        return f"{path}[{json.dumps(key, ensure_ascii=False)}]" if path else key
    return f"{path or 'state'}[{key!r}]"


INSTEAD = {
    "defaultdict": "Save it as a dict",
    "deque": "Save it as a list",
    "frozenset": "Save it as a set",
    "range": "Save it as a list",
    "Generator": "Save its state (get_state() of torch, bit_generator.state of NumPy)",
}


def _refuse(path: str, value: object, detail: str = "", fix: str = "") -> NoReturn:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    fix = fix or INSTEAD.get(kind.__name__, "Save tensors, numbers, text, and dicts, lists, tuples or sets of them")
    raise CheckpointError(path or "state", f"{name}{detail} cannot be read by torch.load(weights_only=True)", fix)
