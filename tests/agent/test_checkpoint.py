"""Checkpoints on disk: bit for bit, whole or not at all, and never in the way of training."""

from __future__ import annotations

import collections
import enum
import errno
import fractions
import hashlib
import io
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.checkpoint import Checkpoints, snapshot
from pollux.agent.checkpoint_writer import CheckpointWriter
from pollux.errors import CheckpointError, InvalidSpec

torch.set_num_threads(1)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def same(left: Any, right: Any) -> bool:
    """Equal in type, structure, order and every bit."""
    if type(left) is not type(right):
        return False
    match left:
        case torch.Tensor():
            is_alike = left.dtype == right.dtype and left.shape == right.shape and left.stride() == right.stride()
            return is_alike and bits(left) == bits(right)
        case dict():
            is_alike = list(left) == list(right) and all(same(left[key], right[key]) for key in left)
            return is_alike and same(getattr(left, "__dict__", None), getattr(right, "__dict__", None))
        case list() | tuple():
            return len(left) == len(right) and all(map(same, left, right))
        case _:
            return bool(left == right) or (left != left and right != right)


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- snapshots


def test_training_on_does_not_change_a_snapshot() -> None:
    weight, history = torch.nn.Parameter(torch.ones(3)), [1.0]
    state = {"model": {"weight": weight}, "history": history}
    copy = snapshot(state)
    with torch.no_grad():
        weight.zero_()
    history.append(2.0)
    assert same(copy, {"model": {"weight": torch.ones(3)}, "history": [1.0]})
    assert not copy["model"]["weight"].requires_grad


def test_tensors_that_share_memory_share_it_in_the_copy_and_on_the_disk(tmp_path: Path) -> None:
    memory = torch.arange(12.0)
    state = {"all": memory, "tied": memory, "row": memory.view(3, 4)[1], "column": memory.view(3, 4)[:, 2]}
    state["halves"] = memory.view(torch.bfloat16)[3:5]  # torch cannot save memory under two types: copied apart
    path = Checkpoints(tmp_path).save(1, {"user": snapshot(state)}, {})
    copy = torch.load(path / "user.pt", weights_only=True)
    assert same(copy, state)
    assert copy["tied"] is copy["all"]
    copy["all"].fill_(7)
    for name in ("row", "column"):
        assert bool((copy[name] == 7).all()), name


def test_only_the_memory_that_a_view_shows_is_copied() -> None:
    large = torch.zeros(100_000)
    copy = snapshot([large[50_000:50_010], large[50_020:50_030]])
    assert copy[0].untyped_storage().nbytes() < 200


FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64")


@pytest.mark.parametrize("dtype", [*FLOATS, "int64", "int8", "uint8", "uint16", "uint64", "bool"])
def test_every_bit_of_every_type_survives(dtype: str, tmp_path: Path) -> None:
    noise = torch.randint(0, 2 if dtype == "bool" else 256, (4 * 3 * 2 * 16,), dtype=torch.uint8)
    tensor = (
        noise.view(getattr(torch, dtype)).reshape(2, 3, -1).transpose(0, 2)
    )  # NaNs with payload, −0.0 and subnormals among them
    state = {"strided": tensor, "scalar": tensor[0, 0, 0], "empty": tensor[:0], "expanded": tensor[:1].expand(5, 3, 2)}
    Checkpoints(tmp_path).save(1, {"user": snapshot(state)}, {})
    loaded = Checkpoints(tmp_path).load_latest()
    assert loaded is not None
    assert same(loaded.parts["user"], state)


def test_unusual_tensors_keep_their_values() -> None:
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    sparse = torch.eye(3).to_sparse()
    copy = through_torch(snapshot({"conjugate": turned, "imaginary": turned.imag, "sparse": sparse}))
    assert torch.equal(copy["conjugate"], turned)
    assert torch.equal(copy["imaginary"], turned.imag)
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(3))


def test_numpy_values_become_tensors_and_numbers_without_loss() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)[::-1]
    state = {"array": array, "alias": array, "point": np.array(2.5), "loss": np.float32(0.1), np.int64(3): np.bool_(1)}
    copy = through_torch(snapshot(state))
    assert copy["array"].tolist() == [[3, 4, 5], [0, 1, 2]]
    assert copy["alias"] is copy["array"]
    assert copy["point"].shape == ()
    assert type(copy["loss"]) is float
    assert np.float32(copy["loss"]) == np.float32(0.1)
    assert copy[3] is True
    generator = np.random.RandomState(1)
    restored = np.random.RandomState(2)
    kind, keys, *rest = through_torch(snapshot(generator.get_state()))
    restored.set_state((kind, keys.numpy(), *rest))
    assert restored.randint(1 << 30) == generator.randint(1 << 30)


class Colour(enum.IntEnum):
    RED = 1


class Named(dict[str, int]):
    pass


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (collections.defaultdict(list), "collections.defaultdict"),
        (collections.deque([1]), "collections.deque"),
        (frozenset({1}), "frozenset"),
        (range(3), "range"),
        (Colour.RED, "test_checkpoint.Colour"),
        (Named(a=1), "test_checkpoint.Named"),
        (Pair(1, 2), "test_checkpoint.Pair"),
        (fractions.Fraction(1, 2), "fractions.Fraction"),
        (int, "type"),
        (print, "builtin_function_or_method"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (torch.Generator(), "Generator"),
        (torch.ones(2).untyped_storage(), "torch.storage.UntypedStorage"),
        (torch.empty(2, device="meta"), "torch.Tensor on the device 'meta'"),
        (torch.nn.UninitializedParameter(), "torch.nn.parameter.UninitializedParameter"),
        (np.array(["a"]), "numpy.ndarray of <U1"),
        (np.datetime64("2026-01-01"), "numpy.datetime64"),
        (np.longdouble(1), "numpy.longdouble"),
        (2**3000, "int of more than 2039 bits"),
        ({b"": 1}, "bytes (empty) as a key"),
        ({torch.ones(1): 1}, "torch.Tensor as a key"),
        ({(1, frozenset()): 1}, "frozenset as a key"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_torch_would_refuse_to_load_is_refused_with_its_path(value: object, kind: str, tmp_path: Path) -> None:
    state = {"user": {"ema": [0, {"x": value}]}}
    with pytest.raises(CheckpointError) as raised:
        snapshot(state)
    assert raised.value.path == 'user["ema"][1]["x"]'
    assert kind in raised.value.problem
    with pytest.raises(CheckpointError, match=r'user\["ema"\]\[1\]\["x"\]'):
        Checkpoints(tmp_path).save(1, state, {})
    with pytest.raises(CheckpointError) as raised:
        snapshot(value, "user")
    assert raised.value.path == "user"
    assert Checkpoints(tmp_path).load_latest() is None


plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
) | st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), torch.strided, 2**2038, -(2**2038)])
tensors = st.builds(
    lambda shape, dtype, value: torch.full(shape, value).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.integers(-9, 9),
)
keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=3)) | st.none()
states = st.recursive(
    plain | tensors | st.sets(keys),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict)
    ),
)


@given(states)
def test_whatever_a_snapshot_accepts_comes_back(state: Any) -> None:
    copy = snapshot(state)
    # Empty bytes, which torch refuses to load, come back as an empty bytearray, which is equal to them.
    assert same(through_torch(copy), copy)
    if b"" not in list(leaves(state)):
        assert same(copy, state)


def leaves(state: Any) -> Any:
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for item in state:
            yield from leaves(item)
    elif isinstance(state, bytes):
        yield state


def test_empty_bytes_come_back_as_an_empty_bytearray_which_is_equal() -> None:
    assert through_torch(snapshot({"x": b""})) == {"x": b""}


def test_a_list_that_contains_itself_does() -> None:
    ring: list[Any] = [1]
    ring.append((ring,))
    copy = through_torch(snapshot(ring))
    assert copy[1][0] is copy


def test_the_versions_inside_of_a_state_dict_are_kept() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert through_torch(snapshot(state))._metadata == state._metadata  # type: ignore[attr-defined]


# --- what training needs


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW([{"params": list(p), "lr": 0.05}], 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "sgd": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "adam": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "adamw": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "rmsprop": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


class Training:
    """A small model with dropout and batch norm, so that every kind of state matters."""

    def __init__(self, name: str) -> None:
        layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        make = SCHEDULERS.get(name, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
        self.scheduler = make(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)  # type: ignore[attr-defined]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(6, 4)

            def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
                self.optimizer.zero_grad()
                result: torch.Tensor = self.model(inputs).square().mean()
                result.backward()  # type: ignore[no-untyped-call]
                return result

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(loss)
            else:
                loss()
                self.optimizer.step()
            self.scheduler.step()
            self.scaler.scale(torch.ones(()))
            self.scaler.update(new_scale=self.scaler.get_scale() * 2)

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "training": {
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
            },
        }

    def restore(self, parts: dict[str, Any]) -> None:
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.scheduler.load_state_dict(parts["training"]["scheduler"])
        self.scaler.load_state_dict(parts["training"]["scaler"])
        torch.set_rng_state(parts["training"]["torch"])
        random.setstate(parts["training"]["python"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    straight = Training(name)
    straight.run(5)
    Checkpoints(tmp_path).save(5, snapshot(straight.parts()), {"batch_size": 6})
    straight.run(5)
    torch.manual_seed(2)
    resumed = Training(name)
    loaded = Checkpoints(tmp_path).load_latest()
    assert loaded is not None
    assert (loaded.step, loaded.facts) == (5, {"batch_size": 6})
    resumed.restore(loaded.parts)
    resumed.run(5)
    assert same(snapshot(resumed.parts()), snapshot(straight.parts()))


# --- the format


def parts_of(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((50,), step)}, "user": {"step": step}}


def fill(folder: Path, steps: int, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for step in range(1, steps + 1):
        checkpoints.save(step, parts_of(step), {"step": step})
    return checkpoints


def loaded_step(checkpoints: Checkpoints) -> int:
    """The step of the newest good checkpoint, whose parts must all be of that step."""
    loaded = checkpoints.load_latest()
    assert loaded is not None
    assert loaded.facts == {"step": loaded.step}
    assert same(loaded.parts, parts_of(loaded.step))
    return loaded.step


READER = """
import sys, json, pathlib
sys.modules["pollux"] = None  # importing it now fails
import torch
folder = pathlib.Path(sys.argv[1])
manifest = json.loads((folder / "manifest.json").read_text())
parts = {name: torch.load(folder / name, weights_only=True) for name in manifest["files"]}
print(json.dumps([manifest["step"], sorted(parts), parts["model.pt"]["weight"].tolist(), parts["user.pt"]]))
"""


def test_every_part_can_be_read_without_pollux(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(7, {"model": {"weight": torch.ones(2)}, "user": {"name": "ema"}}, {})
    command = [sys.executable, "-c", READER, str(path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(answer.stdout) == [7, ["model.pt", "user.pt"], [1.0, 1.0], {"name": "ema"}]


def test_the_manifest_says_what_there_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, now=lambda: datetime(2026, 1, 2, tzinfo=UTC))
    path = checkpoints.save(7, parts_of(7), {"replicas": 2, "loss": 0.1, "limits": [1, None]})
    manifest = json.loads((path / "manifest.json").read_text())
    assert path.name == "checkpoint-000001-step-7"
    assert (manifest["format"], manifest["version"], manifest["step"]) == ("pollux-checkpoint", 1, 7)
    assert manifest["created"] == "2026-01-02T00:00:00+00:00"
    assert manifest["torch"] == torch.__version__
    assert manifest["facts"] == {"replicas": 2, "loss": 0.1, "limits": [1, None]}
    for name in ("model.pt", "user.pt"):
        content = (path / name).read_bytes()
        assert manifest["files"][name] == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "model.pt", "user.pt"]
    assert checkpoints.verify(path).facts == manifest["facts"]


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, 5, keep=2)
    assert [path.name for path in checkpoints.list()] == ["checkpoint-000004-step-4", "checkpoint-000005-step-5"]


def test_the_newest_is_the_one_written_last_whatever_its_step(tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, 3, keep=2)
    checkpoints.save(1, parts_of(1), {"step": 1})
    assert loaded_step(checkpoints) == 1


def test_there_is_none_in_a_folder_that_is_empty_or_missing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert Checkpoints(tmp_path).load_latest() is None
    assert Checkpoints(tmp_path / "missing").load_latest() is None
    assert Checkpoints(tmp_path / "missing").list() == ()
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda folder: Checkpoints(folder, keep=0), "keep"),
        (lambda folder: Checkpoints(folder).save(-1, {}, {}), "step"),
        (lambda folder: Checkpoints(folder).save(1, {"../model": {}}, {}), "part"),
    ],
    ids=["keep", "step", "part"],
)
def test_arguments_out_of_range_are_refused(call: Callable[[Path], object], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec) as raised:
        call(tmp_path)
    assert raised.value.field == field


@pytest.mark.parametrize("fact", [float("nan"), torch.ones(1)], ids=["nan", "tensor"])
def test_facts_that_are_no_json_are_refused_and_leave_nothing(fact: object, tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, 1)
    with pytest.raises(CheckpointError, match="facts: not JSON"):
        checkpoints.save(2, parts_of(2), {"loss": fact})
    assert loaded_step(checkpoints) == 1
    assert not left_over(tmp_path)


def test_facts_that_json_writes_in_another_way_are_no_damage(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, {}, {"by_batch_size": {9: (1, 2), 10: 1e-300, 128: "φ"}})
    loaded = Checkpoints(tmp_path).load_latest()
    assert loaded is not None
    assert loaded.facts == {"by_batch_size": {"9": [1, 2], "10": 1e-300, "128": "φ"}}


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith((".writing", ".removing"))]


# --- damage


def flip(path: Path, position: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda path: flip(path / "model.pt", 700), "model.pt: SHA-256 is"),
    "a short file": (lambda path: os.truncate(path / "user.pt", 100), "user.pt: has 100 bytes instead of"),
    "an empty file": (lambda path: os.truncate(path / "user.pt", 0), "user.pt: has 0 bytes instead of"),
    "a missing file": (lambda path: (path / "model.pt").unlink(), "model.pt: missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: missing"),
    "a garbled manifest": (lambda path: (path / "manifest.json").write_bytes(b"\xff\x00"), "manifest.json: unreadable"),
    "another manifest": (lambda path: (path / "manifest.json").write_text("[1]"), "manifest.json: unreadable"),
    "an edited manifest": (lambda path: edit(path / "manifest.json", step=9), "does not match its checksum"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_one_before_is_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harm, problem = DAMAGE[damage]
    checkpoints = fill(tmp_path, 3)
    newest = checkpoints.list()[-1]
    harm(newest)
    loaded = checkpoints.load_latest()
    assert loaded is not None
    assert loaded.step == 2
    (skipped,) = loaded.skipped
    assert problem in str(skipped)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(newest) in record.getMessage()
    assert problem in record.getMessage()
    assert newest.with_name(newest.name + ".damaged").is_dir()
    assert newest not in checkpoints.list()
    # Training goes on from step 2, and its next checkpoint is the newest, although the damaged one had a number.
    checkpoints.save(3, parts_of(3), {"step": 3})
    assert loaded_step(checkpoints) == 3
    assert checkpoints.list()[-1].name == "checkpoint-000004-step-3"


def test_a_checkpoint_of_a_newer_pollux_is_skipped_and_left_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = fill(tmp_path, 2)
    newest = checkpoints.list()[-1]
    edit(newest / "manifest.json", version=2)
    assert loaded_step(checkpoints) == 1
    assert "version 2; this Pollux" in caplog.text
    assert newest in checkpoints.list()


def test_a_checkpoint_that_cannot_be_read_is_skipped_and_left_in_place(tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, 2)
    newest = checkpoints.list()[-1]
    (newest / "user.pt").unlink()
    (newest / "user.pt").mkdir()
    assert loaded_step(checkpoints) == 1
    assert newest in checkpoints.list()


def test_a_part_that_torch_cannot_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = fill(tmp_path, 1)

    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory\nstack")

    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(CheckpointError, match=r"model.pt: torch .* cannot read it .*: not enough memory\)"):
        checkpoints.load_latest()
    assert len(checkpoints.list()) == 1


def test_damage_in_a_folder_that_cannot_be_written_is_skipped_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = fill(tmp_path, 2)
    newest = checkpoints.list()[-1]
    flip(newest / "model.pt", 700)

    def read_only(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", read_only)
    assert loaded_step(checkpoints) == 1
    assert newest in checkpoints.list()


def test_if_all_are_damaged_training_does_not_begin_anew_unasked(tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, 2)
    for path in checkpoints.list():
        flip(path / "model.pt", 700)
    for _ in range(2):  # also when they were set aside before
        with pytest.raises(CheckpointError, match="none of the 2 checkpoints can be used") as raised:
            checkpoints.load_latest()
        for name in ("checkpoint-000001-step-1", "checkpoint-000002-step-2"):
            assert name in str(raised.value)
        assert "remove the folder" in raised.value.fix
        assert raised.value.is_lasting


def test_damaged_ones_do_not_pile_up(tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, 1, keep=2)
    for step in range(2, 7):
        checkpoints.save(step, parts_of(step), {"step": step})
        flip(checkpoints.list()[-1] / "model.pt", 700)
        loaded_step(checkpoints)
    checkpoints.save(9, parts_of(9), {"step": 9})
    assert len(list(tmp_path.glob("*.damaged"))) == 2
    assert loaded_step(checkpoints) == 9


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    checkpoints = fill(tmp_path, 1)
    (path,) = checkpoints.list()
    generator = random.Random(1)
    for name in ("manifest.json", "user.pt"):
        content = (path / name).read_bytes()
        for position in range(0, len(content), 1 if name == "manifest.json" else 31):
            flip(path / name, position, 1 << generator.randrange(8))
            with pytest.raises(CheckpointError):
                checkpoints.verify(path)
            (path / name).write_bytes(content)
    assert loaded_step(checkpoints) == 1


# --- crashes


def forked(work: Callable[[], object]) -> int:
    """A child process that does the work and nothing else."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def all_whole(folder: Path) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=2)
    for path in checkpoints.list():
        checkpoints.verify(path)
    return checkpoints


def kill_at_random(rank: int, replicas: int, folder: Path) -> int:
    generator = random.Random(5)
    newest = 0
    for _ in range(15):
        ready, tell = os.pipe()

        def save_for_ever(first: int = newest + 1, tell: int = tell) -> None:
            checkpoints = Checkpoints(folder, keep=2)
            for step in range(first, first + 100_000):
                checkpoints.save(step, parts_of(step), {"step": step})
                os.write(tell, b".")

        child = forked(save_for_ever)
        os.close(tell)
        assert os.read(ready, 1) == b"."
        time.sleep(generator.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert status_of(child) == -signal.SIGKILL
        os.close(ready)
        step = loaded_step(all_whole(folder))
        assert step > newest
        assert not list(folder.glob("*.damaged"))
        newest = step
    return newest


def test_a_writer_killed_at_any_moment_leaves_whole_checkpoints(tmp_path: Path, spawn: Callable[..., Any]) -> None:
    assert spawn(kill_at_random, 1, tmp_path)[0] >= 15


def kill_at_every_step(rank: int, replicas: int, parent: Path) -> tuple[int, set[int]]:
    """How many deaths there were, and which steps were the newest after them."""
    steps = set()
    for at in range(1, 1000):
        folder = parent / str(at)
        fill(folder, 2, keep=2)

        def save_and_die(folder: Path = folder, at: int = at) -> None:
            calls = 0

            def count(event: str, _: object) -> None:
                nonlocal calls
                if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"):
                    calls += 1
                    if calls == at:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            Checkpoints(folder, keep=2).save(50, parts_of(50), {"step": 50})

        status = status_of(forked(save_and_die))
        survivor = all_whole(folder)
        steps.add(loaded_step(survivor))
        survivor.save(60, parts_of(60), {"step": 60})
        assert loaded_step(survivor) == 60
        assert not list(folder.glob("*.damaged"))
        assert not left_over(folder)
        assert len(survivor.list()) == 2
        if status == 0:
            return at, steps
    raise AssertionError("the writer never came to its end")


def test_a_writer_killed_before_any_of_its_file_operations_leaves_whole_checkpoints(
    tmp_path: Path, spawn: Callable[..., Any]
) -> None:
    ((deaths, steps),) = spawn(kill_at_every_step, 1, tmp_path)
    assert deaths > 10
    assert steps == {2, 50}


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        story.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2])
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        story.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    path = Checkpoints(tmp_path).save(1, parts_of(1), {})
    draft = story.pop(3)
    assert draft.startswith(".writing-")
    assert story == ["model.pt", "user.pt", "manifest.json", f"rename to {path.name}", tmp_path.name]


def test_what_dead_writers_left_is_cleared(tmp_path: Path) -> None:
    for name in (".writing-checkpoint-000001-step-1-abcd", ".removing-checkpoint-000001-step-1-abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_bytes(b"half")
    (tmp_path / ".writing-probe-abcd").touch()
    fill(tmp_path, 1)
    assert not left_over(tmp_path)


# --- disks that fail


class Disk:
    """Opens files as the store does, until it is told to fail."""

    def __init__(self) -> None:
        self.error: str | None = None

    def open(self, path: Path) -> BinaryIO:
        match self.error:
            case None:
                return path.open("wb")
            case "full":
                return Path("/dev/full").open("wb")  # every write gives ENOSPC
            case _:
                raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_full_disk_is_named_and_leaves_the_earlier_ones(size: int, tmp_path: Path) -> None:
    disk = Disk()
    checkpoints = Checkpoints(tmp_path, open_file=disk.open)
    checkpoints.save(1, parts_of(1), {"step": 1})
    disk.error = "full"
    with pytest.raises(CheckpointError, match=r"No space left on device\. Free space there") as raised:
        checkpoints.save(2, {"model": torch.zeros(size)}, {})
    assert raised.value.path == str(tmp_path)
    assert loaded_step(checkpoints) == 1
    assert not left_over(tmp_path)


@pytest.mark.parametrize("call", ["save", "check_writable"])
def test_a_folder_that_cannot_be_written_is_named(call: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    disk = Disk()
    disk.error = "read-only"
    for checkpoints in (
        Checkpoints(tmp_path / "file"),
        Checkpoints(tmp_path / "file" / "folder"),
        Checkpoints(tmp_path / "folder", open_file=disk.open),
    ):
        with pytest.raises(CheckpointError, match="Give a folder that this process may write") as raised:
            checkpoints.save(1, {}, {}) if call == "save" else checkpoints.check_writable()
        assert raised.value.path == str(checkpoints.folder)


def test_a_folder_can_be_tried_before_training_begins(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "new" / "folder").check_writable()
    assert not left_over(tmp_path / "new" / "folder")
    assert Checkpoints(tmp_path / "new" / "folder").load_latest() is None


def test_a_folder_that_is_a_file_cannot_be_loaded_from(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be listed: Not a directory"):
        Checkpoints(tmp_path / "file").load_latest()


def test_an_old_one_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = fill(tmp_path, 2, keep=2)
    rename = Path.rename

    def stubborn(path: Path, target: Path) -> Path:
        if path.name.startswith("checkpoint-"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stubborn)
    checkpoints.save(3, parts_of(3), {"step": 3})
    assert "could not be removed" in caplog.text
    assert loaded_step(checkpoints) == 3


# --- the writer


class Gate:
    """A disk on which nothing moves until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_reached = threading.Event()

    def open(self, path: Path) -> BinaryIO:
        self.is_reached.set()
        assert self.is_open.wait(60)
        return path.open("wb")


def test_training_never_waits_for_a_slow_disk_and_the_newest_waiting_one_is_written(tmp_path: Path) -> None:
    gate = Gate()
    writer = CheckpointWriter(Checkpoints(tmp_path, open_file=gate.open))
    assert writer.submit(1, parts_of(1), {"step": 1})
    assert gate.is_reached.wait(60)
    for step in (2, 3, 4):  # all return although nothing was written yet
        assert writer.submit(step, parts_of(step), {"step": step})
    assert not writer.flush(0.0)
    assert writer.checkpoints.list() == ()
    gate.is_open.set()
    assert writer.flush(60)
    assert [path.name for path in writer.checkpoints.list()] == ["checkpoint-000001-step-1", "checkpoint-000002-step-4"]
    assert writer.last_path == writer.checkpoints.list()[-1]
    assert loaded_step(writer.checkpoints) == 4
    assert writer.close()


def test_a_failed_write_is_said_once_and_the_next_is_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    writer = CheckpointWriter(Checkpoints(tmp_path, open_file=disk.open))

    def write(step: int) -> bool:
        assert writer.submit(step, parts_of(step), {"step": step})
        return writer.flush(60)

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]

    disk.error = "full"
    assert not write(1)
    assert not write(2)
    assert writer.last_error is not None
    assert len(errors()) == 1
    assert "Free space there" in errors()[0]
    disk.error = "read-only"
    assert not write(3)
    assert "Give a folder" in errors()[1]
    disk.error = None
    assert write(4)
    assert writer.last_error is None
    assert loaded_step(writer.checkpoints) == 4
    disk.error = "full"
    assert not write(5)
    assert len(errors()) == 3
    assert loaded_step(writer.checkpoints) == 4


def test_a_failure_that_nobody_foresaw_does_not_end_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(Checkpoints(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", lambda *_: 1 / 0)
        writer.submit(1, parts_of(1), {})
        assert not writer.flush(60)
    assert "ZeroDivisionError" in caplog.text
    writer.submit(2, parts_of(2), {"step": 2})
    assert writer.flush(60)
    assert loaded_step(writer.checkpoints) == 2
    assert not left_over(tmp_path)


def test_no_thread_to_be_had_is_a_failed_write_and_no_failed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(Checkpoints(tmp_path))

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        assert not writer.submit(1, parts_of(1), {"step": 1})
    assert not writer.flush(60)
    assert "can't start new thread" in str(writer.last_error)
    assert writer.submit(2, parts_of(2), {"step": 2})
    assert writer.close(60)


def test_a_closed_writer_takes_nothing_more_and_has_written_all(tmp_path: Path) -> None:
    writer = CheckpointWriter(Checkpoints(tmp_path))
    writer.submit(1, parts_of(1), {"step": 1})
    assert writer.close(60)
    assert loaded_step(writer.checkpoints) == 1
    assert not writer.submit(2, parts_of(2), {"step": 2})
    assert writer.close()
    assert loaded_step(writer.checkpoints) == 1


def submit_and_leave(folder: Path) -> None:
    CheckpointWriter(Checkpoints(folder)).submit(1, parts_of(1), {"step": 1})


@pytest.mark.usefixtures("spawn")
def test_a_process_that_ends_without_closing_still_finishes_its_checkpoint(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=submit_and_leave, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert loaded_step(Checkpoints(tmp_path)) == 1


def test_jobs_in_sibling_folders_do_not_disturb_each_other(tmp_path: Path) -> None:
    gate = Gate()
    stuck = CheckpointWriter(Checkpoints(tmp_path / "a", open_file=gate.open))
    free = CheckpointWriter(Checkpoints(tmp_path / "b", keep=2))
    stuck.submit(1, parts_of(1), {"step": 1})
    assert gate.is_reached.wait(60)
    for step in range(1, 6):
        free.submit(step, parts_of(step), {"step": step})
        assert free.flush(60)
    assert loaded_step(free.checkpoints) == 5
    assert Checkpoints(tmp_path / "a").load_latest() is None
    gate.is_open.set()
    assert stuck.flush(60)
    assert loaded_step(stuck.checkpoints) == 1


def test_two_jobs_in_one_folder_are_told_apart_instead_of_mixed(tmp_path: Path) -> None:
    gate = Gate()
    first = CheckpointWriter(Checkpoints(tmp_path, open_file=gate.open))
    first.submit(1, parts_of(1), {"step": 1})
    assert gate.is_reached.wait(60)
    with pytest.raises(CheckpointError, match="another process is writing a checkpoint here"):
        Checkpoints(tmp_path).save(2, parts_of(2), {"step": 2})
    gate.is_open.set()
    assert first.flush(60)
    assert loaded_step(Checkpoints(tmp_path)) == 1
