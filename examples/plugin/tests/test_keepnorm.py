"""The mode: its recipe, its keys, what it rejects, and that it trains."""

from __future__ import annotations

import pytest
import torch
from halfmesh_plugin_example.keepnorm import KeepNormAMP, KeepNormOptions
from torch import nn

import halfmesh
from halfmesh.compat import check, composition_table


def test_the_recipe() -> None:
    assert halfmesh.AMP_PLUGINS.get("keepnorm") is KeepNormAMP
    fp16 = KeepNormAMP.recipe(KeepNormOptions(initial_scale=64.0), torch.float16)
    bf16 = KeepNormAMP.recipe(KeepNormOptions(), torch.bfloat16)
    assert fp16.loss_scale is not None
    assert (fp16.loss_scale.initial, fp16.master_weights, fp16.keep_batchnorm_fp32) == (64.0, True, True)
    assert (bf16.loss_scale, bf16.param_dtype) == (None, torch.bfloat16)


def test_what_is_rejected() -> None:
    with pytest.raises(halfmesh.ConfigError, match=r"initial_scal: unknown key; did you mean 'initial_scale'"):
        halfmesh.load_config({"fp16": {"mode": "keepnorm", "initial_scal": 64.0}})
    with pytest.raises(halfmesh.ConfigError, match=r"bf16.initial_scale: bf16 has the range of fp32"):
        halfmesh.load_config({"bf16": {"mode": "keepnorm", "initial_scale": 64.0}})
    config = {"fp16": {"mode": "keepnorm"}, "parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
    found = [str(finding) for finding in check(halfmesh.load_config(config), 2, "cpu")]
    assert found == ["keepnorm fp16 x pipeline: keepnorm has not been tried with a pipeline; use mode='naive'"]
    row = composition_table()["keepnorm bf16"]
    assert (row["tensor"], row["replicate"], row["pipeline"], row["fsdp"]) == ("yes", "yes", "rejected", "rejected")


def test_it_trains_with_batchnorm_in_fp32() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    with halfmesh.initialize(
        model, optimizer, nn.CrossEntropyLoss(), config={"fp16": {"mode": "keepnorm"}}, device="cpu"
    ) as engine:
        assert [param.dtype for param in engine.model.parameters()] == [torch.float16] * 2 + [torch.float32] * 2 + [
            torch.float16
        ] * 2
        for _ in range(20):
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
