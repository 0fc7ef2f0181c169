"""Pollux: co-adaptive cluster scheduling for deep learning.

Importing this package loads nothing heavy; import the room that you need (`pollux.core`, `pollux.goodput` …).
"""

__version__ = "0.1.0.dev0"
