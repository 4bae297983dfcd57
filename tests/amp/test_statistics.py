"""BatchNorm under NAIVE, where running statistics are in half precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.models import make_engine


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(x))


def trained(config, spread):
    engine = make_engine(config, model=Net())
    x = torch.linspace(-spread, spread, 8)[:, None].expand(8, 4)
    for _ in range(2):
        engine.train()
        engine.backward(engine.criterion(engine(x), torch.arange(8) % 2))
        engine.step()
    return engine


@pytest.mark.parametrize("tells", ["eval", "save", "save_weights"])
def test_an_overflow_of_statistics_is_told_once_with_the_name_and_the_way_out(tells, tmp_path, caplog):
    """Of unnormalised values, whose variance is beyond 65504: the loss and the weights are fine."""
    engine = trained({"fp16": {"mode": "naive"}}, 4000.0)
    assert engine.model.norm.running_var.isinf().all()
    assert all(parameter.isfinite().all() for parameter in engine.model.parameters())
    getattr(engine, tells)(*([] if tells == "eval" else [tmp_path / "w.safetensors"]))
    for _ in range(2):
        engine.train()
        engine.eval()
    (record,) = [record for record in caplog.records if "hold inf or nan" in record.message]
    assert record.levelname == "WARNING"
    assert record.message.startswith("norm.running_var hold inf or nan: fp16 ends at 65504")
    assert "Normalize the model's inputs (images to mean 0" in record.message
    assert "or use bf16, mode='torch', or mode='apex' with opt_level='O2'" in record.message


@pytest.mark.parametrize(
    ("config", "spread"),
    [
        ({"fp16": {"mode": "naive"}}, 1.0),
        ({"bf16": {"mode": "naive"}}, 4000.0),
        ({"fp16": {"mode": "torch"}}, 4000.0),
        ({"fp16": {"mode": "apex", "opt_level": "O2"}}, 4000.0),
    ],
)
def test_statistics_that_fit_are_not_told_of(config, spread, caplog):
    engine = trained(config, spread)
    engine.eval()
    assert engine.model.norm.running_var.isfinite().all()
    assert "hold inf or nan" not in caplog.text
