"""Another account of nodes, for rounds in which the first one leaves a wide gap.

The first knows that a node has room for one job on several nodes, and for none beside a job that has the whole node.
It does not know that three of four GPUs are in the way as well: 7 GPUs on two nodes leave no room for 3 beside them.
Let L be the GPUs of the largest node, and T > L/2. A job with T or more on one node is *bulky*, and so is a piece of
more than L − T of a job on several. No node has room for two of these. So the nodes that jobs on several use, those
that are used up, and the bulky ones, are together at most twice the nodes; and K GPUs on n nodes have at least
(K − n·(L − T))/T bulky pieces. As with the first account, whatever is priced by this one bounds all plans.
"""

from __future__ import annotations

from pollux.goodput.compiled import compiled
from pollux.policies.pollux.solver.board import BULKY, FEWEST, FREE, WHOLE, offering
from pollux.policies.pollux.solver.round import Round


@compiled
def closer(around: Round) -> Round:
    """The round by that account; its `slots`, and what sizes take of them, are no longer nodes."""
    largest = around.empty.depth - 1
    bulky = largest // 2 + 1
    least, sizes, slots = largest - bulky + 1, around.empty.sizes.copy(), around.slots
    for node in range(len(around.empty.nodes)):
        slots += 1 if around.empty.nodes[node, FREE] >= least else 0
    for size in range(len(sizes)):
        nodes = max(sizes[size, FEWEST], 2)
        pieces = max(-((nodes * (least - 1) - size) // bulky), 0)
        sizes[size, FEWEST] = nodes + pieces
        sizes[size, WHOLE] += 1 if bulky <= size <= largest else 0
        sizes[size, BULKY] = 1 if least <= size <= largest else 0
    board = offering(around.empty, sizes)
    return Round(board, around.curves, around.num_gpus, slots, around.fixed, around.beyond)
