"""The thin drivers of the simulated world: each runs the real machines of one kind of process, and decides nothing."""
