"""Agents that do not tell the truth."""

from __future__ import annotations

from pollux.testing.chaos.fault import Scene, fault


@fault("nonsense-agent")
def send_nonsense(scene: Scene) -> str:
    """A job talks nonsense to its daemon: noise, absurd figures, other generations, for other jobs, and orders."""
    ticket = scene.crew.add("nonsense")
    return f"submitted {ticket}, which trains and talks nonsense"
