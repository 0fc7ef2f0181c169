"""Chance for the genetic solver's compiled loops: a small generator whose state is an argument.

It counts in 32 bits, so that machine code and plain Python draw the same. Compiled code of other files has this one's
built in and is kept on disk: after a change here, touch `operators` and `repair`.
"""

from __future__ import annotations

import math

import numpy as np

from pollux.goodput.compiled import compiled
from pollux.goodput.numerics import FloatArray

BITS = 0xFFFFFFFF


def begin(rng: np.random.Generator) -> FloatArray:
    """A state [4]: int64 that hold 32 bits each."""
    return rng.integers(0, 1 << 32, size=4, dtype=np.int64)


@compiled
def draw(state: FloatArray) -> int:
    """The next 32 random bits, by a small fast counting generator."""
    a, b, c, count = state[0], state[1], state[2], state[3]
    bits: int = (a + b + count) & BITS
    state[0] = b ^ (b >> 9)
    state[1] = (c + (c << 3)) & BITS
    state[2] = (((c << 21) | (c >> 11)) + bits) & BITS
    state[3] = (count + 1) & BITS
    return bits


@compiled
def chance(state: FloatArray) -> float:
    """Uniform between 0 and 1, without either."""
    return (draw(state) + 0.5) * 2.0**-32


@compiled
def below(state: FloatArray, n: int) -> int:
    """A random integer 0 … n − 1."""
    return (draw(state) * n) >> 32


@compiled
def misses(state: FloatArray, log_miss: float) -> int:
    """How many trials fail before one succeeds, if each fails with probability exp(log_miss)."""
    return int(math.log(chance(state)) / log_miss)
