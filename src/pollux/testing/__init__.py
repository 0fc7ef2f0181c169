"""Contracts that every implementation of a seam must keep, shipped so that yours can be held to them as well.

Needs pytest and hypothesis. `policies`: subclass `PolicyContract`; `stores`: subclass `StoreContract`; `snapshots`:
builders and strategies for tests.
"""

import pytest

pytest.register_assert_rewrite("pollux.testing.policies", "pollux.testing.stores")
