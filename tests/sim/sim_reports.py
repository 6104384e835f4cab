"""Reports of seeds, each simulated once in a test process, however many tests look at it."""

from functools import lru_cache

from farfill.sim.run import Report, simulate


@lru_cache(maxsize=2000)
def report(seed: int) -> Report:
    return simulate(seed)
