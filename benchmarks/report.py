"""What a report of a run of a million rows costs: time to write it, and time to open it in a browser.

Needs chromium for the second. `--rows` sets the number of rows.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from common import build_parser, judge, print_json, print_machine, print_table

from samestep.tools.report import run_report

MAX_OPEN_S = 2.0
CLOCK = "<script>document.title = performance.now()</script></body>"  # at the end: everything is parsed and drawn


def write_run(run: Path, num_rows: int) -> None:
    """Write the files of a run without a ledger."""
    run.mkdir()
    numbers = {
        "seed": 0, "batch_size": 64, "micro_batch_size": 4, "data_length": 1 << 20, "mode": "steps", "shuffle": True,
        "drop_last": False, "sampler": "default",
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps({"format": 1, "samestep": "0", "numbers": numbers}))
    (run / "status.json").write_text(json.dumps({"status": "done", "reason": ""}))
    draw = random.Random(0).random
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, num_rows + 1):
            loss = 5 / math.sqrt(step) + 0.1 * draw()
            row = {"step": step, "train/loss": loss, "train/learning_rate": 1e-3 * (1 - step / num_rows)}
            file.write(f"{json.dumps(row)}\n")


def open_page(page: Path, profile: Path, browser: str) -> float:
    """Open a page in a headless browser. Returns seconds from the begin of the navigation to the end of its scripts."""
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    document = subprocess.run([*words, page.as_uri()], capture_output=True, text=True, check=True).stdout
    found = re.search(r"<title>([\d.]+)</title>", document)
    assert found is not None, "the page's scripts did not end"
    return float(found[1]) / 1000


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    num_rows = min(options.rows, 10_000) if options.quick else options.rows
    if not options.json:
        print_machine()
    with tempfile.TemporaryDirectory() as directory:
        run, page = Path(directory, "run"), Path(directory, "report.html")
        write_run(run, num_rows)
        began_s = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            run_report([str(run), "-o", str(page)])
        wrote_s = time.perf_counter() - began_s
        num_mb = page.stat().st_size / 1e6
        page.write_text(page.read_text().replace("</body>", CLOCK))
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        opened_s = None
        if browser is not None:
            opened_s = min(open_page(page, Path(directory, "profile"), browser) for _ in range(options.repeats))
    if options.json:
        print_json(rows=num_rows, write_s=wrote_s, size_mb=num_mb, open_s=opened_s)
        return
    opened = "no chromium here" if opened_s is None else f"{judge(opened_s, MAX_OPEN_S)} s"
    rows = [
        ("rows of metrics.jsonl", f"{num_rows:,}"),
        ("write the report", f"{wrote_s:.1f} s"),
        ("size", f"{num_mb:.2f} MB"),
        ("open it, smallest of the repeats", opened),
    ]
    print_table(("what", "measured"), rows)


if __name__ == "__main__":
    main()
