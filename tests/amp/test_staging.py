"""The memory of masters' gradients: the same for each part of an update, laid out as the masters are."""

from __future__ import annotations

import torch
from torch import nn, optim
from updates import OPTIMIZERS, give, gradients, make_params, make_update

from halfmesh.amp import stepper
from halfmesh.amp.convert import convert
from halfmesh.amp.recipe import Recipe
from halfmesh.amp.staging import Staging
from halfmesh.shard import ParamShard

BF16 = Recipe(torch.bfloat16, torch.bfloat16, False, True)


def test_pieces_have_the_forms_of_their_targets():
    targets = [torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(3, 2).t(), torch.zeros(())]
    staging = Staging()
    pieces = staging.views(targets, 0)
    assert [p.shape for p in pieces] == [t.shape for t in targets]
    assert [p.stride() for p in pieces] == [t.stride() for t in targets]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert [p.unique().tolist() for p in pieces] == [[0.0], [1.0], [2.0]], "none lies in another"
    again = staging.views(targets, 0)
    assert all(a is b for a, b in zip(pieces, again, strict=True))


def test_parts_share_the_memory_of_the_largest():
    staging = Staging()
    small, large = [torch.zeros(3)], [torch.zeros(5), torch.zeros(2)]
    staging.views(small, 0)
    place = staging.views(large, 1)[0].data_ptr()
    assert staging.views(small, 0)[0].data_ptr() == place
    assert staging.views(large, 1)[0].data_ptr() == place


def test_targets_that_are_laid_out_anew_get_other_pieces():
    target = torch.zeros(2, 3, 4, 4)
    staging = Staging()
    assert staging.views([target], 0)[0].is_contiguous()
    target.data = target.data.to(memory_format=torch.channels_last)
    assert staging.views([target], 0)[0].stride() == target.stride()


def test_other_targets_get_other_pieces():
    staging = Staging()
    first = staging.views([torch.zeros(4)], 0)
    assert staging.views([kept := torch.zeros(2, 2)], 0)[0].shape == kept.shape
    assert first[0].shape == (4,)
    assert staging.views([torch.zeros(4, dtype=torch.float64)], 0)[0].dtype == torch.float64


def test_parameters_without_a_master_are_stepped_once(monkeypatch):
    """Of an update in several parts, each of which steps what has a gradient: O2 keeps BatchNorm in fp32."""
    recipe = Recipe(torch.float16, torch.float16, False, True, keep_batchnorm_fp32=True)
    results = []
    for limit in (1, 200, 25 * 2**20):
        monkeypatch.setattr(stepper, "STREAM_BYTES", limit)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
        shards = [ParamShard(name, param) for name, param in model.named_parameters()]
        update = convert(model, optim.AdamW(model.parameters(), lr=0.01), shards, recipe)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for shard in shards:
                shard.param.grad = torch.randn(shard.param.shape, generator=generator).to(shard.param.dtype)
            update.step()
        held = [update.holdings.target(shard) for shard in shards]
        assert {update.optimizer.state[target]["step"].item() for target in held} == {3.0}
        results.append([target.detach() for target in held])
    for ours in results[:2]:
        for a, b in zip(ours, results[2], strict=True):
            assert torch.equal(a, b)


def test_the_memory_stays_from_update_to_update(monkeypatch):
    """Of several parts, too."""
    for limit in (60, 25 * 2**20):
        monkeypatch.setattr(stepper, "STREAM_BYTES", limit)
        params = make_params()
        update = make_update(params, OPTIMIZERS["adamw"], BF16)
        places = []
        for step in range(4):
            give(params, gradients(step))
            update.step()
            places.append(update.stepper._staging._flat.data_ptr())
            assert all(master.grad is None for master in update.holdings.masters.values())
        assert len(set(places[1:])) == 1
        assert update.stepper._staging._flat.numel() * 4 <= max(limit, 35 * 4)
