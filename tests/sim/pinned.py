"""Scenarios in which a promise was broken once, or which find a planted fault: what was wrong -> scenario."""

PINNED: dict[str, str] = {
    "a finished run loses a row that the body of its last, cut epoch has logged": "seed=1 script=mlp steps=3 | 1 | 1",
}
