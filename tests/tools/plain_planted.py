"""Scripts for raw DDP from one template, with selected mistakes, and which of them are found."""

TEMPLATE = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

{begin}
torch.manual_seed(0)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x[:, :2].sum(1, keepdim=True).sin())
held_out = TensorDataset(x[:33], x[:33, :1])
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
{after_model}
ddp = {wrap}
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
sampler = {sampler}
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last={drop_last})
for epoch in range(3):
    {set_epoch}
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(inputs), targets)
        loss.backward()
        {after_backward}
        optimizer.step()
        {after_step}
    with torch.no_grad():
        {evaluate}
{end}
"""

# Sums over the samples of a rank, without padding; rank 0 of 1 has all samples.
EVALUATE = "for inputs, targets in DataLoader(Subset(held_out, range(rank, 33, size)), 8): ddp(inputs)"
PADDED = "for inputs, targets in DataLoader(held_out, 8, sampler=DistributedSampler(held_out)): ddp(inputs)"
CLIP = "torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)"
SHIFTED = "range(64) if size == 1 else range(rank * 28, rank * 28 + 36)"
AVERAGE = "for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= size"
BEGIN = 'dist.init_process_group("gloo"); rank, size = dist.get_rank(), dist.get_world_size()'
REPLACING = "torch.utils.data.RandomSampler(data, replacement=True)"
BY_HAND = "loader = [data[torch.randint(64, (8,))] for _ in range(8)]"
SOUND = {
    "begin": BEGIN, "end": "dist.destroy_process_group()",
    "after_model": "", "wrap": "DistributedDataParallel(model)", "sampler": "DistributedSampler(data)",
    "drop_last": "False", "set_epoch": "sampler.set_epoch(epoch)", "after_backward": "", "after_step": "",
    "evaluate": EVALUATE,
}  # fmt: skip


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, num, first=0, step=1):
        self.places = range(first, num, step)
    def __iter__(self):
        return (rows[place] for place in self.places)
rows, data = data, Stream("""
MISSED = {"a loss that is a sum"}
# Name -> (replacements in the correct script, the checks that must report a mistake).
MISTAKES: dict[str, tuple[dict[str, str], set[str]]] = {
    "none": ({}, set()),
    "manual averaging, clipped": (
        {"wrap": "model", "after_backward": f"{AVERAGE}\n        {CLIP}"},
        set(),
    ),
    "samples drawn with replacement, a seed per rank": (
        {"sampler": REPLACING, "set_epoch": "torch.manual_seed(3 * rank + epoch)"},
        set(),
    ),
    "batches drawn by hand, a seed per rank": ({"set_epoch": f"torch.manual_seed(3 * rank + epoch); {BY_HAND}"}, set()),
    "no distributed code": (
        {"begin": "rank, size = 0, 1", "end": "", "wrap": "model", "sampler": REPLACING,
         "set_epoch": ""},
        {"gradient"},
    ),
    "no distributed code, batches drawn by hand": (
        {"begin": "rank, size = 0, 1", "end": "", "wrap": "model", "sampler": "None",
         "set_epoch": BY_HAND},
        {"gradient"},
    ),
    "samples drawn with replacement, one seed": ({"sampler": REPLACING, "set_epoch": ""}, {"gradient"}),
    "batches drawn by hand, one seed": ({"set_epoch": BY_HAND}, {"gradient"}),
    "no sampler": ({"sampler": "None", "set_epoch": ""}, {"samples", "gradient"}),
    "each rank shuffles for itself": (
        {"sampler": "torch.utils.data.RandomSampler(data)", "set_epoch": "torch.manual_seed(rank)"},
        {"samples", "order"}),
    "a shard that repeats": ({"sampler": SHIFTED, "set_epoch": ""}, {"samples"}),
    "a shard that skips": ({"sampler": "range(rank, 60, size)", "set_epoch": ""}, {"samples"}),
    "set_epoch forgotten": ({"set_epoch": ""}, {"order"}),
    "no DDP": ({"wrap": "model"}, {"gradient", "replicas"}),
    "no DDP, other seeds": ({"wrap": "model", "after_model": "torch.nn.init.normal_(model[0].weight, std=1 + rank)"},
                            {"gradient", "replicas"}),
    "sum in place of the mean": (
        {"wrap": "model", "after_backward": "for p in model.parameters(): dist.all_reduce(p.grad)"}, {"gradient"}),
    "one parameter not averaged": (
        {"wrap": "model", "after_backward": AVERAGE.replace("model.parameters()", "[*model.parameters()][1:]")},
        {"gradient", "replicas"},
    ),
    "ranks with other batch sizes": (
        {"set_epoch": "", "sampler": "None", "drop_last": "False", "after_model": (
            "import torch.utils.data; Full = DataLoader\n"
            "DataLoader = lambda d, batch_size=8, **_: Full(Subset(d, range(0, 16) if rank == 0 and size > 1 else"
            " range(16 if size > 1 else 0, 64)), 4 if rank == 0 and size > 1 else 12)"), "evaluate": "pass"},
        {"gradient"},
    ),
    "weights that change on one rank": (
        {"after_step": "model[0].bias.data.add_(1e-3 * rank)"}, {"replicas"}),
    "a stream without shards": ({"sampler": "None\n" + STREAM + "64)", "set_epoch": ""}, {"samples", "gradient"}),
    "a stream with shards": ({"sampler": "None\n" + STREAM + "64, rank, size)", "set_epoch": ""}, set()),
    "workers": ({"drop_last": "False, num_workers=2, persistent_workers=True"}, set()),
    "evaluation padded": ({"evaluate": PADDED}, {"evaluation"}),
    "evaluation drops the rest": (
        {"evaluate": EVALUATE.replace(", 8)", ", 8, drop_last=True)")}, {"evaluation"}),
    # How the loss depends on the samples of a rank cannot be observed from outside.
    "a loss that is a sum": ({"after_model": "F.mse_loss = lambda a, b: ((a - b) ** 2).sum()"}, {"gradient"}),
}  # fmt: skip


def plant_plain(*names: str) -> str:
    """Return the script with all mistakes of these names."""
    parts = dict(SOUND)
    for name in names:
        parts |= MISTAKES[name][0]
    return TEMPLATE.format(**parts)
