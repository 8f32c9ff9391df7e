"""Write the pictures of docs/concepts.md to docs/pictures: python website/pictures.py."""

from html import escape
from pathlib import Path

from samestep.plan.tree import build_layout, split

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
N = 6  # micro-batches of the step in the pictures
COLORS = ("#8ecae6", "#ffd166", "#95d5b2", "#f4a6b7")  # of the ranks
WIDTH, LEAF, GAP, LEFT = 480, 44, 12, 112


def box(x: float, y: float, width: float, height: float, color: str, text: str = "") -> str:
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{color}" stroke="#33415c"/>'
    return shape + (label(x + width / 2, y + height / 2 + 5, text, "middle") if text else "")


def label(x: float, y: float, text: str, anchor: str = "start", size: int = 15) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="#1b263b">{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#33415c" stroke-width="1.5"/>'


def picture(title: str, height: int, parts: list[str]) -> str:
    """An SVG with its own light background, so that it can be read on a light and on a dark page."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'font-family="system-ui, sans-serif" role="img"><title>{escape(title)}</title>',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f8f9fb"/>',
            *parts,
            "</svg>\n",
        ]
    )


def place(v: float) -> float:
    """The left edge of micro-batch v."""
    return LEFT + v * (LEAF + GAP)


def draw_step() -> str:
    parts = []
    for row, world_size in enumerate((1, 2, 3, 4)):
        y = 16 + row * 58
        parts.append(label(16, y + 27, f"{world_size} rank{'s' * (world_size > 1)}"))
        for rank, micro_batches in enumerate(build_layout(N, world_size).ranges):
            parts += [box(place(v), y, LEAF, LEAF - 4, COLORS[rank], str(v)) for v in micro_batches]
    return picture("A step of 6 micro-batches, divided among 1, 2, 3 and 4 ranks", 16 + 4 * 58, parts)


def draw_tree() -> str:
    layout = build_layout(N, 3)
    owner = {v: rank for rank, micro_batches in enumerate(layout.ranges) for v in micro_batches}
    leaves_y = 230
    lines, nodes = [], []

    def draw(lo: int, hi: int, depth: int) -> tuple[float, float]:
        """Draw the subtree of micro-batches lo..hi-1 and return the middle of its top node."""
        owners = {owner[v] for v in range(lo, hi)}
        color = COLORS[owners.pop()] if len(owners) == 1 else "#ffffff"
        if hi - lo == 1:
            nodes.append(box(place(lo), leaves_y, LEAF, LEAF - 4, color, f"g{lo}"))
            return place(lo) + LEAF / 2, leaves_y
        mid = split(lo, hi)
        left, right = draw(lo, mid, depth + 1), draw(mid, hi, depth + 1)
        x, y = (left[0] + right[0]) / 2, 24 + depth * 66
        lines.extend(line(x, y + 14, *child) for child in (left, right))
        nodes.append(
            f'<circle cx="{x}" cy="{y + 14}" r="15" fill="{color}" stroke="#33415c"/>' + label(x, y + 19, "+", "middle")
        )
        return x, y + 29

    x, _ = draw(0, N, 0)
    words = [label(x - 24, 43, "gradient of the step", "end"), label(16, leaves_y + 25, "gradients")]
    ranks = [
        label(place(micro_batches.start), leaves_y + 62, f"rank {rank}")
        for rank, micro_batches in enumerate(layout.ranges)
    ]
    return picture(
        "The tree along which the gradients of 6 micro-batches are added", 306, lines + nodes + words + ranks
    )


def draw_ledger() -> str:
    fields = ("step", "epoch", "samples", "loss", "gradient")
    rows = (
        ("40", "1", "c1 5e .. 9d", "0.2213", "7f 30"),
        ("41", "1", "08 b7 .. 4a", "0.2187", "e2 9c"),
        ("42", "1", "...", "", ""),
    )
    widths = (56, 64, 130, 90, 100)
    parts = []
    for row, values in enumerate((fields, *rows)):
        x, y = 20, 16 + row * 42
        for width, value in zip(widths, values, strict=True):
            parts.append(box(x, y, width, 36, "#dfe7f5" if row == 0 else "#ffffff", value))
            x += width
    return picture("The ledger: 40 bytes per step", 16 + 4 * 42 + 8, parts)


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, draw in {"step": draw_step, "tree": draw_tree, "ledger": draw_ledger}.items():
        (PICTURES / f"{name}.svg").write_text(draw())
