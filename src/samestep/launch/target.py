"""The code that ranks run, and the commands that start it."""

import sys
from dataclasses import dataclass, field

# Of samestep itself. -P: a file in the working directory, such as a run's, must not shadow a module of Python.
COMMAND = (sys.executable, "-P", "-m", "samestep")


@dataclass(frozen=True)
class Target:
    """The code that the ranks run.

    Attributes:
        kind: "script" (a file), "module", "recipe" (a module of samestep) or "call" (a pickled function call).
    """

    kind: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def to_words(self) -> list[str]:
        """Return the words after `samestep launch` and its options that start it. Not for a call."""
        name = self.name.rpartition(".")[2] if self.kind == "recipe" else self.name
        return [*(["-m"] if self.kind == "module" else []), name, *self.arguments]

    def to_full_command(self, num_ranks: int, *flags: str) -> list[str]:
        """Return the command that starts it on several ranks of this machine, from the interpreter on.

        `flags`: further options of the launcher.
        """
        return [*COMMAND, "launch", "--nproc-per-node", str(num_ranks), *flags, *self.to_words()]

    def to_plain_command(self) -> list[str]:
        """Return the command that runs it without a launcher, from the interpreter on. Not for a call."""
        flags = {"script": [], "module": ["-m"], "recipe": ["-P", "-m"]}[self.kind]
        return [sys.executable, *flags, self.name, *self.arguments]
