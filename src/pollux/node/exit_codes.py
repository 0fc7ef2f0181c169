"""Exit codes with a meaning of their own between replicas, their node and whoever runs the job."""

from __future__ import annotations

LEFT_AS_ASKED = 128 + 15
"""Of a replica that was asked by signal 15 to save and leave, and has done so."""
HOPELESS = 78
"""Of a process that would fail in the same way if it were run again (EX_CONFIG of sysexits.h)."""
