"""The machine: warps, CTAs, clusters, memories, barriers, asynchronous agents, the scheduler and the checkers."""
