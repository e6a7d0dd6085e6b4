"""Demo: one job launched twice on one machine, with real parts and a simulated slow network.

Public: `job` (the two launches and their figures), `limited` (the network, which tests use, too).
`bootseer.cli` calls it; it may import every other package.
"""
