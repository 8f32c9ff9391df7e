"""Trains at a URL, as `planted.py URL PART COUNT`: the rank that was rank 0 at the start dies in an upload."""

import os
import sys

from promises.test_object_store import train_planted

if __name__ == "__main__":
    url, part, count = sys.argv[1:]
    plan = [("kill", part, int(count))] if os.environ["RANK"] == "0" else []
    train_planted(url, plan, {"snapshot_every": 3, "settled": True})
