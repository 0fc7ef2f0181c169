"""Contracts that every implementation of a seam must keep, shipped so that yours can be held to them as well.

Needs pytest and hypothesis, not torch. Subclass `PolicyContract`, `StoreContract` or `ScalingRuleContract`; `snapshots`
has builders and strategies for tests.
"""

import pytest

# Before the imports: pytest can explain the failed assertions of a module only if it is told before Python loads it.
pytest.register_assert_rewrite("pollux.testing.policies", "pollux.testing.rules", "pollux.testing.stores")

from pollux.testing.policies import PolicyContract, WorkConservingContract  # noqa: E402
from pollux.testing.rules import ScalingRuleContract  # noqa: E402
from pollux.testing.stores import StoreContract  # noqa: E402

__all__ = ["PolicyContract", "ScalingRuleContract", "StoreContract", "WorkConservingContract"]
