"""`farfill demo`: two sites on one machine, as the real processes over real sockets, and what to believe of them.

Not a test kit and not a benchmark: one machine's cores are shared by all sides, so the times show the order of things.
"""
