"""A virtual world for the scheduler that is also deployed: workloads, ground truth, policies side by side.

from pollux.simulator.scenario import Scenario, simulate

simulate(Scenario("demo", policy="tiresias")).figures()
"""
