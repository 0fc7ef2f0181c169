"""The node daemon: starts, watches and ends the replicas of jobs on one machine, and runs the jobs at home there.

Knows core and wire; torch is loaded in the processes that it starts, never in its own. Importing it loads nothing.
"""
