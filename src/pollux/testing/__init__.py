"""Contracts that every implementation of a seam must keep, shipped so that yours can be held to them as well.

Needs pytest and hypothesis, not torch. Subclass `PolicyContract`, `StoreContract`, `ScalingRuleContract` or
`ProviderContract`; `snapshots` has builders and strategies for tests.
"""

import pytest

# Before the imports: pytest can explain the failed assertions of a module only if it is told before Python loads it.
pytest.register_assert_rewrite(*(f"pollux.testing.{name}" for name in ("policies", "providers", "rules", "stores")))

from pollux.testing.policies import PolicyContract, WorkConservingContract  # noqa: E402
from pollux.testing.providers import ProviderContract  # noqa: E402
from pollux.testing.rules import ScalingRuleContract  # noqa: E402
from pollux.testing.stores import StoreContract  # noqa: E402

__all__ = ["PolicyContract", "ProviderContract", "ScalingRuleContract", "StoreContract", "WorkConservingContract"]
