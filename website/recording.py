"""Record docs/pictures/recording.svg from real commands: python website/recording.py. Takes about a minute.

The upper session trains the script of docs/start.md on 1 rank, on 3 ranks that are killed, and on 2 ranks that go on.
The lower one does the same with the tutorials' script for DDP (benchmarks/peers/with_ddp.py).
"""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "recording.svg"
COLUMNS = 96
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?!\n)")
SHOWN = re.compile("samestep: [0-9]+ micro-batches|epoch [0-9]+: loss|[0-9a-f]{64}$")  # the first and the last of these


@dataclass
class Session:
    """Commands in a pseudo-terminal, in one directory.

    Attributes:
        lines: each a kind (`command`, `output`, `note` or `digest`), its text, and the seconds since the first command.
    """

    title: str
    directory: Path
    lines: list[tuple[str, str, float]] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    def add(self, kind: str, text: str) -> None:
        self.lines.append((kind, text, time.monotonic() - self.begin))

    def run(self, command: str, kill_if: Callable[[], bool] | None = None, env: dict[str, str] | None = None) -> None:
        """Run a command, and kill its first process by SIGKILL as soon as `kill_if` returns true."""
        self.add("command", command)
        terminal, end = pty.openpty()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        size = {"COLUMNS": str(COLUMNS), "LINES": "40"}
        child = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.directory,
            stdin=end,
            stdout=end,
            stderr=end,
            env={**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **size, **(env or {})},
        )
        os.close(end)
        output = b""
        killed = False
        while True:
            if select.select([terminal], [], [], 0.05)[0]:
                try:
                    chunk = os.read(terminal, 65536)
                except OSError:  # EIO: no process has the terminal any more
                    break
                if not chunk:
                    break
                output += chunk
            if kill_if and not killed and kill_if():
                child.send_signal(signal.SIGKILL)
                killed = True
        os.close(terminal)
        code = child.wait()
        texts = [CONTROL.sub("", line).rstrip() for line in output.decode(errors="replace").splitlines()]
        texts = [text for text in texts if text]
        if killed:
            self.add("note", "kill -9")
        elif code == 0:
            shown = [text for text in texts if SHOWN.match(text)]
            for text in shown[:1] + shown[1:][-1:]:
                self.add("digest" if re.fullmatch("[0-9a-f]{64}", text) else "output", text.partition(" (for more")[0])
        elif not env:
            raise SystemExit(f"{command} failed:\n" + "\n".join(texts[-20:]))


def record_samestep(directory: Path) -> Session:
    page = (ROOT / "docs" / "start.md").read_text()
    (directory / "train.py").write_text(re.findall(r"^```python\n(# train.py.*?)^```", page, re.M | re.S)[0])
    session = Session("samestep", directory)
    session.run("python train.py")
    session.run("samestep inspect runs/one --digest")
    saved = directory / "runs" / "many" / "snapshots"
    session.run(
        "samestep launch --nproc-per-node 3 --run-dir runs/many train.py",
        lambda: any(saved.glob("step-*/")) if saved.exists() else False,
    )
    session.run("samestep launch --nproc-per-node 2 --run-dir runs/many train.py")
    session.run("samestep inspect runs/many --digest")
    return session


def record_ddp(directory: Path) -> Session:
    for name in ("task.py", "with_ddp.py"):
        shutil.copy(ROOT / "benchmarks" / "peers" / name, directory)
    (directory / "with_ddp.py").rename(directory / "ddp.py")
    session = Session("DistributedDataParallel and torchrun, the tutorials' script", directory)
    session.run("torchrun --nproc-per-node 1 ddp.py")
    session.run("cat digest")
    session.run("rm snapshot.pt")
    session.run("torchrun --nproc-per-node 3 ddp.py", env={"PEERS_KILLS": "26"})
    if not (directory / "kill-26").exists():
        raise SystemExit("No rank was killed.")
    session.add("note", "kill -9 of a rank after step 26")
    session.run("torchrun --nproc-per-node 2 ddp.py")
    session.run("cat digest")
    return session


def draw(sessions: list[Session]) -> str:
    """A picture of the sessions, whose lines appear in their order. Without animations, all are visible."""
    styles = {"command": "#f8f8f2", "output": "#9aa5b1", "note": "#ff7b72"}
    height, y, delay = 0, 0.0, 0.0
    parts = []
    for session in sessions:
        digests = {text for kind, text, _ in session.lines if kind == "digest"}
        same = "#7ee787" if len(digests) == 1 else "#ff7b72"
        y += 30
        parts.append(f'<text x="16" y="{y}" fill="#79c0ff" font-weight="bold">{escape(session.title)}</text>')
        previous = 0.0
        for kind, text, at in session.lines:
            y += 19
            delay += min(0.2 + (at - previous) / 10, 1.5)
            previous = at
            shown = {"command": f"$ {text}", "note": f"*** {text}"}.get(kind, text)
            parts.append(
                f'<text x="16" y="{y:g}" fill="{same if kind == "digest" else styles[kind]}" class="line" '
                f'style="animation-delay:{delay:.1f}s" xml:space="preserve">{escape(shown)}</text>'
            )
        y += 14
    width, height = 16 * 2 + round(COLUMNS * 7.9), round(y + 8)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13">',
            "<title>1, 3 and 2 ranks, with a kill between: samestep ends in one digest, DDP in two</title>",
            "<style>@media (prefers-reduced-motion: no-preference) { .line { opacity: 0; "
            "animation: appear 0.2s forwards; } } @keyframes appear { to { opacity: 1; } }</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    recorded = []
    for record in (record_samestep, record_ddp):
        with tempfile.TemporaryDirectory() as directory:
            recorded.append(record(Path(directory)))
    first, second = ({text for kind, text, _ in each.lines if kind == "digest"} for each in recorded)
    if len(first) != 1 or len(second) != 2:
        raise SystemExit(f"samestep ended in {len(first)} digests and DDP in {len(second)}; one and two were expected.")
    PICTURE.write_text(draw(recorded))
