"""The first plan of a round, and how far it may be from the best: all that most rounds need, in one piece of machine
code. Between Python and it, tables cost more to hand over than to work on."""

from __future__ import annotations

from pollux.goodput.compiled import compiled, lean
from pollux.goodput.numerics import FloatArray
from pollux.policies.pollux.solver.board import GPUS, PINNED, WORTH, Board, copy_of, offering
from pollux.policies.pollux.solver.closer import closer
from pollux.policies.pollux.solver.construct import construct
from pollux.policies.pollux.solver.fill import fill, rescue
from pollux.policies.pollux.solver.improve import improve
from pollux.policies.pollux.solver.options import Prices
from pollux.policies.pollux.solver.pricing import Wishes, wishes_at_best_price
from pollux.policies.pollux.solver.round import Round, packed_sizes, rows_of, value_of
from pollux.policies.pollux.solver.search import search, settle_as_found

FILLING = (0.8, 0.5, 0.2, 0.0)
"""Shares of the price at which free GPUs are offered, one after the other: first to those who make most of them."""
POOR_GAP = 0.01
"""Rounds with so wide a gap are rare."""
FEW_STEPS_PER_JOB = 3
"""Below it improvement cannot mend what odd sizes do to a first plan."""
MANY_JOBS, FAIR_GAP = 2000, 1e-3
"""With so many jobs another plan takes long, and where the gap is no wider than this, improvement does as well."""
NEGLIGIBLE = 2e-7
"""Gap, as a share of the whole sum, that no fitness shows: `pricing.BELOW` alone may be the reason for one."""


@compiled
def opened(
    around: Round, node_price: float, gap_target: float, steps: int, visits: int
) -> tuple[Wishes, Board, float, float]:
    """What jobs wish at the price, a first plan, a bound, and what the plan is short of the target.

    steps: those of improvement that may follow; visits: what the search may look at.
    """
    wishes = wishes_at_best_price(around, around.empty)
    prices = Prices(wishes.price, wishes.slot_price, node_price)
    board = first_plan(around, wishes, prices, gap_target, steps)
    board, bound = searched(around, around.empty, wishes, board, wishes.bound, gap_target, visits)
    return wishes, board, bound, missing(bound, board, gap_target)


@compiled
def first_plan(around: Round, wishes: Wishes, prices: Prices, gap_target: float, steps: int) -> Board:
    """The best of some plans: at the price; if all stay that can; of sizes that pack well."""
    sizes = around.empty.sizes
    best = constructed(around, wishes, prices, False, sizes)
    if missing(wishes.bound, best, FAIR_GAP if len(best.jobs) > MANY_JOBS else gap_target) <= 0.0:
        return best
    stay = constructed(around, wishes, prices, True, sizes)
    if value_of(around, stay) > value_of(around, best):
        best = stay
    if steps < FEW_STEPS_PER_JOB * len(best.jobs) and missing(wishes.bound, best, POOR_GAP) > 0.0:
        sizes = packed_sizes(around.empty)
        packed = wishes_at_best_price(around, offering(around.empty, sizes))
        even = constructed(around, packed, Prices(packed.price, prices.slot, prices.apart), False, sizes)
        if value_of(around, even) > value_of(around, best):
            best = even
    return best


@compiled
def constructed(around: Round, wishes: Wishes, prices: Prices, all_stay: bool, sizes: FloatArray) -> Board:
    """A plan with nothing left undone. sizes: those that jobs are offered at first."""
    board = copy_of(around.empty)
    construct(offering(board, sizes), wishes.gain, wishes.wish, prices, all_stay)
    rescue(board)
    for share in FILLING:
        fill(board, share * wishes.price, False)
    return board


@lean
def missing(bound: float, board: Board, gap: float) -> float:
    """How much more the plan must be worth for its gap to be no wider than this."""
    value, served = 0.0, 0.0
    for job in range(len(board.jobs)):
        if board.jobs[job, PINNED] == 0:
            value += board.worths[job, WORTH]
        if board.jobs[job, GPUS] > 0:
            served += abs(board.worths[job, WORTH])
    return float(bound - value - gap * served - NEGLIGIBLE * abs(value))


@compiled
def searched(
    around: Round, empty: Board, wishes: Wishes, board: Board, bound: float, gap_target: float, visits: int
) -> tuple[Board, float]:
    """A plan that is no worse, on a copy of the empty board, and a bound that is no higher, if the gap is wider than
    the target.

    Not where jobs may have more than there are values for: a bound from what is searched would not hold for that.
    """
    if len(around.beyond) > 0 or missing(bound, board, gap_target) <= 0.0:
        return board, bound
    prices, supply = Prices(wishes.price, wishes.slot_price, 0.0), (around.num_gpus, around.slots)
    gap = missing(wishes.bound, board, 0.0)
    below, found = search(around.empty, around.curves, wishes.gain, prices, supply, gap, gap, visits)
    if found.num_rows[0] >= 0:
        other = copy_of(empty)
        settle_as_found(other, found)
        if value_of(around, other) > value_of(around, board):
            board = other
    return board, min(bound, wishes.bound - below)


@compiled
def searched_closer(around: Round, board: Board, bound: float, gap_target: float, visits: int) -> tuple[Board, float]:
    """As `searched`, by another account of nodes and at prices for that: see `closer`."""
    if not around.empty.avoids or len(around.beyond) > 0 or missing(bound, board, gap_target) <= 0.0:
        return board, bound
    other = closer(around)
    wishes = wishes_at_best_price(other, other.empty)
    return searched(other, around.empty, wishes, board, bound, gap_target, visits)


@compiled
def carried_on(board: Board, wishes: Wishes, node_price: float, random: FloatArray, steps: int, wanted: float) -> float:
    """So many steps of improvement, or until so much is gained; returns what is."""
    prices = Prices(wishes.price, wishes.slot_price, node_price)
    gained, _ = improve(board, prices, wishes.gain, random, steps, wanted)
    return gained + fill(board, 0.0, False)


@compiled
def closed(around: Round, board: Board) -> tuple[tuple[FloatArray, FloatArray, FloatArray], float]:
    """The plan as rows, with nobody left waiting beside GPUs that it could run on; and its value."""
    fill(board, 0.0, True)
    return rows_of(board), value_of(around, board)
