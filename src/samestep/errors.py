"""What is raised when a person's input is wrong, or another rank is gone."""


class Error(Exception):
    """Bad input, or a mistake in the training loop: one sentence of what is wrong, what was found and what to do.

    Uncaught, it ends the program with that sentence and exit code 2 instead of a traceback.

    Args:
        message: the sentence.
        rank: the rank it concerns; None when every rank raises the same, so that rank 0 alone prints it.
    """

    exit_code = 2

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerFailed(RuntimeError):
    """This rank is well, but another one failed: that one's error is what a person needs to see."""


class Stuck(RuntimeError):
    """Nothing in the run has moved for too long: the whole sentence of who keeps it from moving."""
