"""The hot loops of `envelope`: lower envelopes of candidates, and the search in many of them at once.

Machine code where numba is installed (see `compiled`). A *block* is what one slot of the arena holds, all in floats:

    low, high   a pair a class: the numbers of GPUs that it has cells for (none if low > high)
    heads       six numbers a cell, and the first of them once more: where its lines begin, counted from the block's
                first line; which of them was lowest last time, the noise from which on and up to which it is lowest,
                and that line itself
    lines       two numbers each: seconds of an iteration, and M0/M; those that are lowest for less noise come first

Cells are ordered by class, then by GPUs.
"""

from __future__ import annotations

import numpy as np

from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray

HEAD = 6
NEVER = 2.0
"""A noise share that no gradient has."""


@compiled
def fill_block(
    seconds: FloatArray, low: FloatArray, high: FloatArray, first: FloatArray, share: FloatArray, block: FloatArray
) -> int:
    """Write a block, and tell its length: at most 2·C + 6·cells + 1 + 2·candidates.

    seconds  [Σ candidates]  of an iteration with each candidate of each cell, in order
    low      [C]             GPUs of a class's first cell
    high     [C]             and of its last
    first    [K + 1]         where the candidates of low[0], low[0] + 1 … GPUs begin in `share`
    share    [candidates]    M0/M of each, descending
    """
    classes, cells, most = len(low), 0, 0
    for c in range(classes):
        block[2 * c], block[2 * c + 1] = low[c], high[c]
        cells += max(high[c] - low[c] + 1, 0)
        for K in range(low[c], high[c] + 1):
            most = max(most, first[K - low[0] + 1] - first[K - low[0]])
    heads = 2 * classes
    lines = heads + HEAD * cells + 1
    slope, since = np.empty(most), np.empty(most)
    order = np.empty(most, dtype=np.int64)
    cell, count, begin = 0, 0, 0
    for c in range(classes):
        for K in range(low[c], high[c] + 1):
            source = first[K - low[0]]
            candidates = first[K - low[0] + 1] - source
            head = heads + HEAD * cell
            block[head], block[head + 1], block[head + 2] = count, 0.0, NEVER
            for i in range(candidates):
                slope[i] = seconds[begin + i] * (share[source + i] - 1.0)
                # The steepest fall last, and of parallels the lowest first. They come nearly sorted.
                place = i
                while place > 0 and (
                    slope[order[place - 1]] < slope[i]
                    or (slope[order[place - 1]] == slope[i] and seconds[begin + order[place - 1]] > seconds[begin + i])
                ):
                    order[place] = order[place - 1]
                    place -= 1
                order[place] = i
            kept = 0  # order[:kept] are the lines of the envelope, since[:kept] the noise from which on each is lowest
            for place in range(candidates):
                i = order[place]
                since_here = 0.0
                while kept > 0:
                    last = order[kept - 1]
                    fall = slope[last] - slope[i]
                    rise = seconds[begin + i] - seconds[begin + last]
                    since_here = max(rise / fall, 0.0) if fall > 0.0 else np.inf  # parallel to a lower one
                    if since_here > since[kept - 1]:
                        break
                    kept -= 1  # never lowest
                    since_here = 0.0
                if since_here <= 1.0:
                    order[kept], since[kept] = i, since_here
                    kept += 1
            for place in range(kept):
                at = lines + 2 * (count + place)
                block[at], block[at + 1] = seconds[begin + order[place]], share[source + order[place]]
            count += kept
            begin += candidates
            cell += 1
    block[heads + HEAD * cell] = count
    return lines + 2 * count


@compiled
def fill_blocks(
    seconds: FloatArray,
    low: FloatArray,
    high: FloatArray,
    first: FloatArray,
    share: FloatArray,
    blocks: FloatArray,
    lengths: FloatArray,
) -> None:
    """`fill_block` for seconds [J, Σ candidates] of as many jobs; blocks [J, …] and lengths [J] are filled."""
    for j in range(len(seconds)):
        lengths[j] = fill_block(seconds[j], low, high, first, share, blocks[j])


@compiled
def join_blocks(narrow: FloatArray, rest: FloatArray, classes: int, block: FloatArray) -> None:
    """Write the block with the cells of both; those of `rest` follow those of `narrow` in each class."""
    heads = 2 * classes
    cells = np.zeros(2, dtype=np.int64)
    for c in range(classes):
        cells[0] += max(int(narrow[2 * c + 1] - narrow[2 * c]) + 1, 0)
        cells[1] += max(int(rest[2 * c + 1] - rest[2 * c]) + 1, 0)
        block[2 * c], block[2 * c + 1] = narrow[2 * c], rest[2 * c + 1]
    lines = heads + HEAD * (cells[0] + cells[1]) + 1
    head, count = heads, 0
    done = np.zeros(2, dtype=np.int64)
    for c in range(classes):
        for part, source in enumerate((narrow, rest)):
            begin = heads + HEAD * done[part]
            here = max(int(source[2 * c + 1] - source[2 * c]) + 1, 0)
            last = int(source[begin + HEAD * here])
            first = int(source[begin])
            for cell in range(here):
                block[head] = source[begin + HEAD * cell] - first + count
                block[head + 1], block[head + 2] = 0.0, NEVER
                head += HEAD
            origin = heads + HEAD * cells[part] + 1
            copy(source[origin + 2 * first : origin + 2 * last], block[lines + 2 * count :])
            count += last - first
            done[part] += here
    block[head] = count


@lean
def copy(source: FloatArray, target: FloatArray) -> None:
    """Into the beginning of another. Counted from nought, several numbers are copied at a time."""
    for i in range(len(source)):
        target[i] = source[i]


@compiled
def search_blocks(
    store: FloatArray,
    begin: int,
    chosen: FloatArray,
    at: FloatArray,
    noise: FloatArray,
    initial: FloatArray,
    most: FloatArray,
    classes: int,
    first: FloatArray,
    goodput: FloatArray,
) -> None:
    """Best goodput of every chosen job, class and number of GPUs, written to goodput[first[j] + c·(most[j] + 1) + K].

    store    [S]  blocks, from the address `begin` on
    chosen   [I]  the jobs whose blocks are there
    at       [J]  address of the job's block
    noise    [J]  its noise share b
    initial  [J]  its M0
    most     [J]  up to how many GPUs are asked for; what a block does not have is left alone

    Most gradients hardly change: then the same line is lowest, and the head has it.
    """
    for j in chosen:
        block = at[j] - begin
        cells, b, a = 0, noise[j], 1.0 - noise[j]
        for c in range(classes):
            cells += max(int(store[block + 2 * c + 1] - store[block + 2 * c]) + 1, 0)
        cell = block + 2 * classes
        lines = cell + HEAD * cells + 1
        for c in range(classes):
            low, high = int(store[block + 2 * c]), int(store[block + 2 * c + 1])
            row = first[j] + c * (most[j] + 1)
            for K in range(low, min(high, most[j]) + 1):
                head = cell + HEAD * (K - low)
                if store[head] == store[head + HEAD]:
                    continue
                if b < store[head + 2] or b > store[head + 3]:
                    walk(store, head, lines, a, b)
                goodput[row + K] = initial[j] / (store[head + 4] * (a + b * store[head + 5]))
            cell += HEAD * max(high - low + 1, 0)


@lean
def walk(store: FloatArray, head: int, lines: int, a: float, b: float) -> None:
    """Renew a head for a noise share b = 1 − a. Costs fall to the lowest line and rise again, so walking finds it."""
    first, last = lines + 2 * int(store[head]), lines + 2 * (int(store[head + HEAD]) - 1)
    line = first + 2 * int(store[head + 1])
    cost = store[line] * (a + b * store[line + 1])
    while line < last:
        other = store[line + 2] * (a + b * store[line + 3])
        if other > cost:
            break
        line, cost = line + 2, other
    while line > first:
        other = store[line - 2] * (a + b * store[line - 1])
        if other > cost:
            break
        line, cost = line - 2, other
    store[head + 1] = (line - first) // 2
    store[head + 2] = crossing(store, line - 2) if line > first else -NEVER
    store[head + 3] = crossing(store, line) if line < last else NEVER
    store[head + 4], store[head + 5] = store[line], store[line + 1]


@lean
def crossing(store: FloatArray, line: int) -> float:
    """The noise share from which on the next line is lower."""
    seconds, other = store[line], store[line + 2]
    return float((other - seconds) / (seconds * (store[line + 1] - 1.0) - other * (store[line + 3] - 1.0)))
