"""Decisions: a snapshot in, a plan out. One file a policy, made by name through `registry`.

No mechanism, no clock, no input or output. How to add one: docs/adding-a-policy.md.
"""

from pollux.policies.base import Policy
from pollux.policies.registry import make, names, policy_class

__all__ = ["Policy", "make", "names", "policy_class"]
