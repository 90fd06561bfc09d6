"""Programs that are recorded without a GPU: a recording carries the program out again."""

from __future__ import annotations


class Again:
    """A recorded program."""

    def __init__(self, program):
        self.replay = program


class Rerun:
    """Records programs by keeping them; every recording takes ``size`` bytes of the pool.

    ``fails`` are errors that the next recordings raise.
    """

    def __init__(self, most_bytes=10**9, size=10, fails=()):
        self.most_bytes, self.size, self.fails = most_bytes, size, list(fails)
        self.bytes = self.recorded = self.begun = 0

    def record(self, program):
        if self.fails:
            raise self.fails.pop(0)
        self.recorded += 1
        self.bytes += self.size
        return Again(program)

    def begin_anew(self):
        self.begun += 1
        self.bytes = 0

    def wait(self):
        """Nothing runs in the background."""
