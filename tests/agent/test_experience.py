"""What an agent makes of the measurements of others: read when they are new, left out when they are of no use."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from pollux.agent.experience import Experience
from pollux.core import Observation, ObservationKey, Profile, Shape, dumps
from pollux.goodput.pooled import Kind


def profile(*sizes: int, seconds: float = 1.0) -> Profile:
    found = Profile()
    for m in (16, 64):
        for size in sizes:
            seen = Observation(0.0, 0, seconds * (m + size), seconds * size, 1)
            found = found.add("t4", ObservationKey(Shape(size), m), seen)
    return found


def write(path: Path, text: str) -> None:
    """As daemons do: the file is replaced."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "experience.json"


def test_there_is_none_where_nobody_tells_any(path):
    assert Experience(None).on("t4") is None
    assert Experience(path).on("t4") is None


def test_a_model_is_made_once_for_each_gpu_type_and_again_when_there_is_more(path, monkeypatch):
    notes = []
    note = Kind.note
    monkeypatch.setattr(Kind, "note", lambda kind, measured: (notes.append(measured), note(kind, measured))[1])
    experience = Experience(path)
    write(path, dumps(profile(1, 2)))
    first = experience.on("t4")
    assert first is not None
    assert experience.on("t4") is first
    assert experience.on("v100") is None
    assert experience.on("v100") is None
    assert notes == [profile(1, 2).of_type("t4"), {}]
    write(path, dumps(profile(1, 2, 4)))
    assert experience.on("t4").max_gpus_observed == 4
    path.unlink()
    assert experience.on("t4") is None


@pytest.mark.parametrize("text", ["", "nonsense", '{"schema":1,"type":"Shape","body":{"num_gpus":1}}', "\udcff"])
def test_what_cannot_be_read_is_left_out_with_one_line(path, caplog, text):
    path.write_text(text, errors="surrogateescape")
    experience = Experience(path)
    with caplog.at_level(logging.INFO):
        assert [experience.on("t4") for _ in range(3)] == [None] * 3
    assert ["cannot be read" in record.message for record in caplog.records] == [True]
    write(path, dumps(profile(1)))
    assert experience.on("t4") is not None


def test_neither_is_what_may_not_be_looked_at(path, caplog, monkeypatch):
    write(path, dumps(profile(1)))

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert Experience(path).on("t4") is None
    assert len(caplog.records) == 1


def test_what_no_model_can_be_made_of_is_left_out_with_one_line(path, caplog, monkeypatch):
    def fail(_):
        raise ZeroDivisionError("of mine")

    monkeypatch.setattr(Kind, "model", fail)
    write(path, dumps(profile(1)))
    experience = Experience(path)
    assert [experience.on("t4") for _ in range(3)] == [None] * 3
    assert ["cannot be used" in record.message for record in caplog.records] == [True]


def test_what_is_forgotten_stays_so_until_there_is_another(path):
    write(path, dumps(profile(1)))
    experience = Experience(path)
    assert experience.on("t4") is not None
    experience.forget()
    assert experience.on("t4") is None
    write(path, dumps(profile(1, 2)))
    assert experience.on("t4") is not None
