"""Who decides does not know whether GPUs are emulated: labels, types and variables pass through, and that is all."""

from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "pollux"


@pytest.mark.parametrize("room", ["policies", "scheduler", "service"])
def test_the_word_does_not_occur(room):
    files = sorted((SRC / room).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(SRC)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if "emulat" in line.lower()
    ]
    assert not found
