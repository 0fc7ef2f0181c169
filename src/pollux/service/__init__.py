"""The live service: one process that drives the scheduler, keeps its event log and answers REST."""
