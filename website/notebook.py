"""Write docs/start.ipynb, the page docs/start.md for a hosted notebook: python website/notebook.py."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "docs" / "start.ipynb"

# A text is a Markdown cell, a list of lines a code cell.
CELLS: list[str | list[str]] = [
    "# Five minutes with samestep\n\nA training run on 1 and on 2 ranks, in the CPU of this notebook, with the same "
    "bits. Install samestep first, from a copy of its repository: `%pip install .`",
    [
        "import samestep, torch, torch.nn.functional as F",
        "from torch.utils.data import TensorDataset",
        "",
        "x = torch.rand(960, 20, generator=torch.Generator().manual_seed(0))",
        "data = TensorDataset(x, x[:, :4].sum(1, keepdim=True).sin())",
    ],
    "The training is plain PyTorch, except for `samestep.Run` and three nested loops. `batch_size` is the number of "
    "samples per update, over all ranks; each rank computes its share in micro-batches of 8. In a notebook, the "
    "training is a function.",
    [
        "def train(num_epochs=3, run_dir=None):",
        "    run = samestep.Run(run_dir, batch_size=48, micro_batch_size=8)",
        "    model = torch.nn.Sequential(",
        "        torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)",
        "    )",
        "    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)",
        "    run.prepare(model=model, optimizer=optimizer)",
        "    for epoch in run.epochs(data, num_epochs):",
        "        for step in epoch:",
        "            for inputs, targets in step:",
        "                step.backward(F.mse_loss(model(inputs), targets))",
        "            optimizer.step()",
        "        run.print(f\"epoch {epoch.number}: loss {epoch.metrics['loss']:.4f}\")",
        "    return model.state_dict()",
    ],
    "Train in this process, and then on 2 ranks. `samestep.spawn` starts them, and returns what rank 0 returns.",
    ["one = train()"],
    ["two = samestep.spawn(train, nprocs=2)"],
    "Are all bits the same?",
    ["same = all(torch.equal(one[name], two[name]) for name in one)", "assert same", "same"],
    "A run with a directory writes snapshots. Train 2 epochs on 2 ranks, then continue for a third one here:",
    [
        "import tempfile",
        "",
        "run_dir = tempfile.mkdtemp()",
        "samestep.spawn(train, nprocs=2, args=(2, run_dir))",
        "resumed = train(3, run_dir)",
        "assert all(torch.equal(one[name], resumed[name]) for name in one)",
    ],
]


def build_notebook() -> str:
    cells = []
    for number, cell in enumerate(CELLS):
        lines = cell if isinstance(cell, list) else cell.split("\n")
        common = {"id": f"cell-{number}", "metadata": {}, "source": [line + "\n" for line in lines[:-1]] + [lines[-1]]}
        code = {"cell_type": "code", "execution_count": None, "outputs": []}
        cells.append({**common, **(code if isinstance(cell, list) else {"cell_type": "markdown"})})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(build_notebook())
