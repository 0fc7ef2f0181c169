"""Real training for the benchmarks of the agent: scripts that run as replicas, and what starts and reads them."""
