"""masters="split": the training of fp32 masters, with 2 bytes less a parameter."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from halfmesh.amp.master_weights import MasterWeights
from halfmesh.amp.split_masters import split_
from halfmesh.engine.summary import state_bytes
from tests.support.models import MLP, adamw, full_weights, make_data, make_engine, said, sgd, step_on
from tests.support.optimizers import muon_and_adamw
from tests.support.ranks import here, run_ranks

X, Y = make_data(16)
NAIVE = {name: {"bf16": {"mode": "naive", "masters": name}} for name in ("float32", "split")}
SPLIT = NAIVE["split"]


@torch.no_grad()
def round_ties_away(self, shards):
    """As split masters are rounded; torch rounds ties to even."""
    for shard in shards:
        if shard.param in self.masters:
            value = self.masters[shard.param].detach().clone()
            split_(value)
            shard.param.copy_(value)


def same(found, other):
    return found.keys() == other.keys() and all(torch.equal(found[name], other[name]) for name in found)


class Whole(torch.optim.AdamW):
    """Which is not stepped in buckets, because nobody knows it."""


OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "whole": lambda params: Whole(params, lr=0.01)}


@pytest.mark.parametrize(("name", "bucket"), [("sgd", None), ("whole", None), ("adamw", 300)])
def test_it_trains_as_fp32_masters_do(name, bucket, monkeypatch):
    """Also a layer that is unfrozen later; and an average is that of the masters."""
    monkeypatch.setattr(MasterWeights, "publish", round_ties_away)
    if bucket:
        monkeypatch.setattr("halfmesh.amp.stepper.bucket_bytes", lambda *_: bucket)
    found = []
    for config in NAIVE.values():
        model = MLP()
        last = list(model.last.requires_grad_(False).parameters())
        others = [param for param in model.parameters() if param.requires_grad]
        engine = make_engine(config, model=model, optimizer=OPTIMIZERS[name](others))
        average = engine.averaged_model(0.5)
        for step in range(8):
            if step == 2:
                model.last.requires_grad_(True)
                engine.optimizer.add_param_group({"params": last})
            assert not step_on(engine, X, Y).skipped
        weights = full_weights(engine)
        with average.applied():
            applied = [param.detach().clone() for param in model.parameters()]
        assert same(full_weights(engine), weights)
        fused = engine.optimizer.param_groups[0].get("fused")
        found.append((weights, applied, [param.detach() for param in model.parameters()], fused))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert not torch.equal(found[0][0]["last.weight"], MLP().last.weight)


def test_bytes_between_updates():
    engine = make_engine(SPLIT, optimizer=adamw)
    numel = sum(param.numel() for param in engine.model.parameters())
    step_on(engine, X, Y)
    engine.zero_grad()
    engine._update.stepper.used = []
    state = [x for values in engine.optimizer.state.values() for x in values.values() if x.dim()]
    held = [param.data for group in engine.optimizer.param_groups for param in group["params"]]
    kept = [*engine.model.parameters(), *state, *held, *engine._update.master_weights.kept]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in kept)}
    assert sum(storages.values()) == 12 * numel + 4, "of the stand-ins"
    assert state_bytes(engine.model, engine._update).masters == (2 + 4) * numel  # a small model is one bucket
    assert "fp32 masters, of which 16 bits are in the parameters" in str(engine.plan)


def test_what_the_loop_writes_into_the_model_is_trained_on():
    engine = make_engine(SPLIT)
    step_on(engine, X, Y)
    before, kept = full_weights(engine), [param.detach().clone() for param in engine.model.parameters()]
    with torch.no_grad():  # swapped for an evaluation
        torch._foreach_zero_(list(engine.model.parameters()))
        engine.eval()(X)
        torch._foreach_copy_(list(engine.model.parameters()), kept)
        engine.train()(X)
    assert same(full_weights(engine), before)
    with torch.no_grad():
        engine.model.first.weight[0] = 0.0  # a mask
        engine.model.first.weight.data[1] *= 0  # through .data, too
    after = full_weights(engine)
    assert not after["first.weight"][:2].any()
    assert torch.equal(after["first.weight"][2:], before["first.weight"][2:]), "what was not written keeps all bits"


def test_masters_between_updates_are_no_numbers():
    engine = make_engine(SPLIT)
    assert "masters='split' has no fp32 masters between updates" in said(engine.master_params)
    param = engine.optimizer.param_groups[0]["params"][0]
    assert param.isnan().all()
    step_on(engine, X, Y)
    held = full_weights(engine)
    engine.close()  # gives the masters back
    assert same(dict(engine.model.state_dict()), held)
    assert {param.dtype for param in engine.model.parameters()} == {torch.float32}


CELLS = {
    "zero1": ({"data": "zero1"}, adamw),
    "fsdp": ({"data": "fsdp"}, adamw),
    "tensor": ({"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}, muon_and_adamw),
}


def in_layout(rank, world_size, layout, folder):
    """By masters: norms, whole weights, and those of another engine that has loaded the checkpoint of the other."""
    found, (parallel, optimizer) = {}, CELLS[layout]
    for masters, config in NAIVE.items():
        config = {**config, "parallel": parallel, "clip_grad_norm": 1.0, "debug": "sync"}
        engine = make_engine(config, optimizer=optimizer)
        x, y = (full.chunk(engine.context.dp_size)[engine.context.dp_rank] for full in (X, Y))
        update = partial(step_on, engine, *here((x, y)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MasterWeights, "publish", round_ties_away)
            norms = [update().grad_norm for _ in range(2)]
            engine.save(folder / masters)
            norms += [update().grad_norm for _ in range(2)]
            found[masters] = norms, engine.full_state_dict()
            engine.load(folder / "float32")
            found[f"{masters}, resumed"] = [update().grad_norm for _ in range(2)], engine.full_state_dict()
        if layout == "fsdp":  # its shards are the masters, which nothing splits
            assert engine.plan.values["bytes"]["masters"] == 0
            assert ("not split: they are fsdp's shards" in engine.plan.rows["precision"]) == (masters == "split")
        engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("layout", CELLS)
def test_layouts_train_as_with_fp32_masters(layout, tmp_path):
    found = run_ranks(in_layout, 2, layout, tmp_path)[0]
    norms, weights = found["float32"]
    assert found["split"][0] == norms
    assert same(found["split"][1], weights)
    for masters in NAIVE:
        resumed = found[f"{masters}, resumed"]
        assert resumed[0] == norms[2:]
        assert same(resumed[1], weights)
