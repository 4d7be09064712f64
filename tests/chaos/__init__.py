"""Real processes, real faults: every action of the library while every fault happens. ``python -m tests.chaos``."""
