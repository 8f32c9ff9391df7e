"""Scenarios in which a promise was broken once, or which find a planted fault: what was wrong -> scenario."""

PINNED: dict[str, str] = {
    "a snapshot that was put aside is back after a power cut, and the ledger has lost its steps": (
        "seed=3 script=batchnorm every=2 steps=10 | 1 flip@200/0 | 2 power@400 | 1"
    ),
    "a finished run loses a row that the body of its last, cut epoch has logged": "seed=1 script=mlp steps=3 | 1 | 1",
    "the directory of snapshots is lost: who created it was killed before the sync": (
        "seed=2 script=gan every=1 steps=5 | 1 kill_all@fsync#6 | 1 power@300 | 1"
    ),
    "a run of several loops is killed in each of them, and stopped": (
        "seed=1 script=phases | 3 kill_all@900 | 2 stop@800 | 1 power@200 | 3 kill_all@1200 | 2"
    ),
    "a batch that an earlier pass has changed in place is taken for a new one": (
        "seed=1 script=passes every=2 steps=5 | 3 heal kill@635/1 | 1"
    ),
}
