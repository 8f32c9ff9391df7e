"""A LightningModule trained by samestep: each step equals that of Lightning's Trainer, at any number of ranks."""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.runs import digest, read_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep.adapters import lightning as adapter
from samestep.adapters.lightning import fit

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")  # imported by few workers

BATCH_SIZE, NUM_EPOCHS = 12, 2
INTERVALS = ("step", "epoch", "plateau")


def build_data(num: int, seed: int) -> TensorDataset:
    x = torch.randn(num, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def build_module(**options: Any) -> Any:
    """A module with the usual hooks. It keeps a list of the hooks that were called, and the losses of each step."""
    import lightning
    import torchmetrics

    class Regression(lightning.LightningModule):
        def __init__(self, dropout: float = 0.0, interval: str = "epoch") -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 1))
            self.train_error, self.val_error = torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()
            self.best_error = torchmetrics.MinMetric()
            self.num_validations = torchmetrics.SumMetric()
            ranks = {"spearman": torchmetrics.SpearmanCorrCoef(), "r2": torchmetrics.R2Score()}
            self.val_scores = torchmetrics.MetricCollection({**ranks, "more": torchmetrics.R2Score()}, prefix="val_")
            self.called: list[str] = []
            self.norms: list[float] = []  # of each step's gradient
            self.losses: dict[int, list[tuple[float, int]]] = {}  # step -> losses and sizes of its micro-batches

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            predicted = self.net(x)
            loss = F.mse_loss(predicted, y)
            self.train_error(predicted, y)
            self.log("train_error", self.train_error, on_step=True, on_epoch=True)
            self.losses.setdefault(self.global_step, []).append((float(loss.detach()), len(x)))
            self.log("train_loss", loss, prog_bar=True, on_epoch=True)
            self.log_dict({"size": float(len(x))})
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            predicted = self.net(x)
            self.log("val_loss", F.mse_loss(predicted, y), on_step=True, on_epoch=True)
            self.val_error.update(predicted, y)
            self.log("val_error", self.val_error)
            self.val_scores.update(predicted.flatten(), y.flatten())
            self.log_dict(self.val_scores)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("test_loss", F.mse_loss(self.net(x), y))
            self.train_error.update(self.net(x), y)

        def on_test_epoch_end(self) -> None:
            self.log("test_error", self.train_error)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            if self.hparams["interval"] == "plateau":
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
            steps = self.trainer.estimated_stepping_batches if self.hparams["interval"] == "step" else NUM_EPOCHS
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(steps))
            return [optimizer], [{"scheduler": schedule, "interval": self.hparams["interval"]}]

        def on_train_epoch_start(self) -> None:
            self.called.append(f"epoch {self.current_epoch}")

        def on_validation_epoch_start(self) -> None:
            self.num_validations.update(1)

        def on_validation_epoch_end(self) -> None:
            self.called.append("validated")
            self.log("num_validations", self.num_validations.compute())
            self.best_error.update(self.val_error.compute())
            self.log("best_error", self.best_error.compute())
            self.log("calls", float(len(self.called)))

        def on_train_epoch_end(self) -> None:
            self.called.append(f"{self.global_step} steps")

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norm = torch.stack([param.grad.norm() for param in self.parameters()]).norm()
            self.called.append("norm")
            self.norms.append(float(norm))

    return Regression(**options)


def train_with_both(interval: str) -> list[dict[str, Any]]:
    """Train copies of one module in one rank. Returns the results of Lightning, of samestep, and with micro-batches."""
    import lightning

    train, held_out = build_data(30, 0), build_data(14, 1)
    torch.manual_seed(0)
    module = build_module(interval=interval)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    loaders = [DataLoader(train, BATCH_SIZE), DataLoader(held_out, 8)]  # the first is divided into micro-batches

    trainer = lightning.Trainer(
        max_epochs=NUM_EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module, *loaders)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    results = [collect(module, values)]
    for size in (BATCH_SIZE, 4):
        run = samestep.Run(None, batch_size=BATCH_SIZE, micro_batch_size=size, device="cpu")
        module = build_module(interval=interval)
        module.load_state_dict(start)
        values = fit(run, module, *loaders, max_epochs=NUM_EPOCHS, gradient_clip_val=0.5)
        results.append(collect(module, values))
    return results


def collect(module: Any, values: dict[str, float]) -> dict[str, Any]:
    losses = [
        sum(loss * size for loss, size in step) / sum(size for _, size in step) for step in module.losses.values()
    ]
    return {
        "called": module.called, "norms": module.norms, "losses": losses, "values": values,
        "weights": module.state_dict(),
    }  # fmt: skip


def merge_means() -> float:
    """The mean of 1, 2, 3 and 4, of which one micro-batch has three."""
    import torchmetrics

    from samestep.adapters.lightning_metrics import Metrics

    class Mean(torchmetrics.Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("mean", torch.tensor(0.0), "mean")

        def update(self, value: float) -> None:
            self.mean = self.mean + (value - self.mean) / self.update_count

        def compute(self) -> Tensor:
            return self.mean

    module, parts = nn.Module(), []
    module.mean = Mean()
    metrics = Metrics(module)
    metrics.set_aside()
    for values in ([1.0, 2.0, 3.0], [4.0]):
        for value in values:
            module.mean.update(value)
        parts.append(metrics.take())
    metrics.fold(parts[::-1])
    return float(module.mean.compute())


def train_all() -> dict[str, Any]:
    """Everything that needs Lightning in one rank, because importing it takes seconds."""
    return {
        **{interval: train_with_both(interval) for interval in INTERVALS},
        "refused": refuse_all(),
        "mean": merge_means(),
    }


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return samestep.spawn(train_all, 1)


@pytest.mark.parametrize("interval", INTERVALS)
def test_as_lightning_itself(results: dict[str, Any], interval: str) -> None:
    wanted, *ours = results[interval]
    for found, rel in zip(ours, (1e-6, 1e-5), strict=True):
        assert found["called"] == wanted["called"], "the same hooks and steps"
        assert len(found["norms"]) == NUM_EPOCHS * 3
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        assert len(found["losses"]) == NUM_EPOCHS * 3
        assert found["losses"] == pytest.approx(wanted["losses"], rel=rel)
        assert {*wanted["values"]} <= {*found["values"]}
        for name in wanted["values"]:
            if name != "size" or found is ours[0]:  # the average weighted by micro-batch sizes differs
                assert found["values"][name] == pytest.approx(wanted["values"][name], rel=rel), name
        for name, weight in wanted["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-5, atol=1e-6)


def test_a_mean_of_several_updates(results: dict[str, Any]) -> None:
    assert results["mean"] == 2.5


def build_data_module() -> Any:
    """A data module with whole batches."""
    import lightning

    class Data(lightning.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.called: list[str] = []

        def prepare_data(self) -> None:
            self.called.append("prepare_data")

        def setup(self, stage: str) -> None:
            self.called.append(stage)
            self.held_out = build_data(14, 1)

        def train_dataloader(self) -> Any:
            return DataLoader(build_data(30, 0), BATCH_SIZE, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.held_out, 4)

        test_dataloader = val_dataloader

        def teardown(self, stage: str) -> None:
            self.called.append(f"end of {stage}")

    return Data()


def train(run_dir: Path, max_steps: int | None = None) -> dict[str, Any]:
    run = samestep.Run(run_dir, batch_size=BATCH_SIZE, micro_batch_size=4, device="cpu", max_steps=max_steps)
    module, data = build_module(dropout=0.2), build_data_module()
    values: dict[str, Any] = fit(run, module, data, max_epochs=4, monitor="val_error", patience=3)
    del values["calls"]  # of this start only
    if max_steps is None:
        values["test"] = adapter.test(run, module)
        values["validated"] = adapter.validate(run, module, DataLoader(data.held_out, 4))
        del values["validated"]["calls"]
        values["lr"] = module.optimizers().param_groups[0]["lr"]
        prepared = ["prepare_data"] * (run.local_rank == 0)
        stages = ("fit", "test", "validate")
        assert data.called == [call for stage in stages for call in (*prepared, stage, f"end of {stage}")]
    return values


@pytest.mark.soak
def test_the_same_bits_at_any_number_of_ranks(tmp_path: Path) -> None:
    values = [samestep.spawn(train, size, (tmp_path / f"{size}",)) for size in (1, 2, 3)]
    samestep.spawn(train, 2, (tmp_path / "parts", 5))
    values.append(samestep.spawn(train, 3, (tmp_path / "parts",)))
    assert values == [values[0]] * 4
    assert values[0]["test"]["test_error"] == pytest.approx(values[0]["test"]["test_loss"])
    assert values[0]["validated"]["val_error"] == values[0]["val_error"]
    directories = [tmp_path / name for name in ("1", "2", "3", "parts")]
    assert len({digest(directory) for directory in directories}) == 1
    assert len({digest(directory, "best") for directory in directories}) == 1
    rows = read_rows(directories[-1])
    assert [row["val_error"] for row in rows if "val_error" in row][-2] == values[0]["val_error"]


def change(**members: Any) -> Any:
    """A module with these members replaced."""
    module = build_module()
    for name, member in members.items():
        setattr(type(module), name, member)
    return module


def refuse(call: Any, build: Any, *arguments: Any, **options: Any) -> str:
    """Call a function of the adapter wrongly, with a module that is built after the run. Returns the error."""
    run = samestep.Run(None, batch_size=4, micro_batch_size=2, device="cpu")
    with pytest.raises(samestep.Error) as caught:
        call(run, build(), *arguments, **options)
    return str(caught.value)


def log_elsewhere(module: Any, batch: Any, _: int) -> Tensor:
    import torchmetrics

    metric = torchmetrics.MeanMetric()
    metric.update(1)
    module.log("mean", metric)
    return F.mse_loss(module.net(batch[0]), batch[1])


def add_correlation(module: Any) -> None:
    import torchmetrics

    module.correlation = torchmetrics.PearsonCorrCoef()


def correlate(module: Any, batch: Any, _: int) -> Tensor:
    predicted: Tensor = module.net(batch[0])
    module.correlation.update(predicted.flatten(), batch[1].flatten())
    return F.mse_loss(predicted, batch[1])


def refuse_all() -> list[str]:
    data, once = build_data(8, 0), {"max_epochs": 1}
    modules: list[dict[str, Any]] = [
        {"automatic_optimization": False},
        {"optimizer_step": lambda self, *_: None},
        {"configure_optimizers": lambda self: [torch.optim.SGD(self.parameters(), 0.1)] * 2},
        {"training_step": lambda self, batch, _: self.log("loss", "high")},
        {"training_step": log_elsewhere},
        {"training_step": correlate, "configure_model": add_correlation},
    ]
    return [
        refuse(fit, lambda: nn.Linear(1, 1), data, **once),
        refuse(fit, build_module, data, mode="x", **once),
        refuse(fit, build_module, data, patience=1, **once),
        *(refuse(fit, functools.partial(change, **members), data, **once) for members in modules),
        refuse(fit, build_module, None, **once),
        refuse(fit, build_module, [DataLoader(data, 4)] * 2, **once),
        refuse(adapter.test, build_module, data),
    ]


def test_what_it_refuses(results: dict[str, Any]) -> None:
    words = (
        "fit needs a LightningModule, not a Linear", "mode must be min or max", "patience needs monitor",
        "Regression sets automatic_optimization = False, and fit updates once per step",
        "Regression replaces optimizer_step of Lightning's loop",
        "must return one optimizer, with its schedulers, not 2 optimizers", "self.log got loss, a str",
        "self.log got mean, a MeanMetric that is no submodule of the LightningModule",
        "merge_state of PearsonCorrCoef does not combine the states of several micro-batches",
        "fit got no training data", "several loaders were given", "call fit before test",
    )  # fmt: skip
    for error, start in zip(results["refused"], words, strict=True):
        assert start in error
