"""A model is cut: each rank keeps its stages, or it is rejected before anything runs, and left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils._pytree import tree_map

import halfmesh
from halfmesh.errors import IncompatibleConfigError, InputError
from halfmesh.parallel.pipeline.partition import Call, Piece
from halfmesh.parallel.pipeline.stage import ForwardContext, StageModule, pack, restore
from halfmesh.utils.torch_private import shapes_only
from tests.support.models import CLASSES, FEATURES, make_loader, sgd
from tests.support.pipeline_parts import pipe
from tests.support.ranks import here, rank_device, run_ranks


def entries_of(model: nn.Module) -> dict[str, torch.Tensor]:
    kinds = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for kind in kinds for name, tensor in kind}


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Of what is trained: fused kernels make some for what is not, too."""
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    return {names[p]: dict(values) for p, values in optimizer.state.items() if p in names}


def cut(rank: int, world_size: int) -> None:
    """The weights of the first and the last layer are tied; the second group has nothing of the first rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[4].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    model = here(model)
    begin = {"params": list(model[:3].parameters())[::-1]}
    optimizer = optim.Adam([begin, {"params": list(model[3].parameters())}, {"params": model[4].bias}])
    model(here(torch.randn(8, 4))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    entries, before = entries_of(model), {name: value.clone().cpu() for name, value in model.state_dict().items()}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    state = tree_map(torch.clone, state_of(model, optimizer))
    config = pipe(schedule="gpipe", partition=("2",))
    halfmesh.initialize(model, optimizer, nn.MSELoss(), config=config, device=rank_device())

    layers = {"0", "1"} if rank == 0 else {"2", "3", "4"}
    held = {id(tensor) for name, tensor in entries.items() if name.partition(".")[0] in layers}
    now = entries_of(model)
    for name, tensor in entries.items():
        if id(tensor) in held:
            assert now[name] is tensor, "the parameters that stay are the same objects"
            assert torch.equal(tensor.cpu(), before[name])
        else:
            assert name not in now
            assert tensor.untyped_storage().nbytes() == 0, "memory is freed"
    mine = [[p for p in group if id(p) in held] for group in groups]
    assert [list(map(id, g["params"])) for g in optimizer.param_groups] == [list(map(id, g)) for g in mine]
    own = {name: values for name, values in state.items() if name in dict(model.named_parameters())}
    torch.testing.assert_close(state_of(model, optimizer), own, rtol=0, atol=0, check_device=False)


@pytest.mark.distributed
@pytest.mark.sends
def test_ranks_hold_their_stages():
    run_ranks(cut, 2)


NAN32, NAN64 = 0x7F800001, 0x7FF0000000000001  # as floats signalling NaNs, which arithmetic would change


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool], ids=str)
def test_integers_arrive_as_they_were_sent(dtype):
    numbers = torch.tensor([True, False])
    if dtype != torch.bool:
        limits, nan = torch.iinfo(dtype), {4: NAN32, 8: NAN64}.get(dtype.itemsize, 0)
        numbers = torch.tensor([limits.min, limits.max, 0, 1, nan, -nan], dtype=dtype)
    tree = {"numbers": numbers.to("meta")}
    found = restore(pack({"numbers": numbers}, tree), tree)["numbers"]
    assert found.dtype == dtype
    assert torch.equal(found, numbers)


def deep(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), *more, nn.Linear(16, CLASSES))


class Unknown(nn.Sequential):
    """No partitioner knows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class NormTwice(Unknown):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[3](self[2](self[1](self[2](self[0](x)))))


class Lamb(optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["max_grad_norm"] = 1.0


def changed(change: Callable[[Any], Any]) -> nn.Module:
    model = deep()
    change(model)
    return model


COMPILED = partial(changed, lambda model: model[0].compile())
HOOKED = partial(changed, lambda model: model.register_forward_hook(lambda *_: None))
HOOKED_BEFORE = partial(changed, lambda model: model.register_forward_pre_hook(lambda *_: None))
WITH_LOSS = partial(changed, lambda model: model.add_module("loss", nn.Linear(4, 4)))
REJECTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batch": (deep, pipe(microbatches=3), "microbatches=3 does not divide the dataloader's batch_size=8"),
    "too few blocks": (deep, pipe(4, 4), "pipeline.size=4 needs 4 stages, but Sequential has only the pieces 0, 1, 2"),
    "no partitioner": (
        lambda: Unknown(*deep()),
        pipe(),
        "knows Unknown; name the modules that start a stage, as in partition=('1',)",
    ),
    "too many points": (deep, pipe(partition=("1", "2")), "partition: 2 split points, but pipeline.size=2 needs 1"),
    "non_split": (deep, pipe(non_split=("inputs",)), "has an argument 'inputs'; did you mean 'input'?"),
    "sparse": (lambda: deep(nn.Embedding(8, 16, sparse=True)), pipe(), "2: sparse=True and scale_grad_by_freq=True do"),
    "SyncBatchNorm": (lambda: deep(nn.SyncBatchNorm(16)), pipe(), "2: SyncBatchNorm needs all ranks"),
    "statistics of two stages": (
        lambda: NormTwice(*deep(nn.BatchNorm1d(16))),
        pipe(partition=("1",)),
        "2.running_mean, 2.running_var: stages that share a norm would each keep running statistics",
    ),
    "compiled": (COMPILED, pipe(), "a compiled model cannot be split into stages; pass it uncompiled"),
    "hooks": (HOOKED, pipe(), "the model itself: it has hooks, but stages do not call it"),
    "hooks before": (HOOKED_BEFORE, pipe(), "the model itself: it has hooks, but stages do not call it"),
    "criterion": (WITH_LOSS, pipe(), "criterion: no stage would have loss.weight, loss.bias, weights of the model"),
    "optimizer": (deep, pipe(), "optimizer: max_grad_norm=1.0 uses all parameters; set it to None, and clip_grad_norm"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_rejection_leaves_the_model_alone(case, monkeypatch):
    """As under torchrun, whose rendezvous would never be answered."""
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}
    for name, value in (variables | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))
    make_model, config, message = REJECTED[case]
    model = make_model()
    optimizer = (Lamb if case == "optimizer" else sgd)(model.parameters())
    criterion = getattr(model, "loss", nn.functional.cross_entropy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(IncompatibleConfigError, match=re.escape(message)):
        halfmesh.initialize(model, optimizer, criterion, make_loader(), config, device="cpu")
    assert not dist.is_initialized()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


KEPT: dict[int, torch.Tensor] = {}


def test_a_tensor_without_data_that_is_kept_in_a_global_is_rejected():
    def keep(x: torch.Tensor) -> torch.Tensor:
        return x + KEPT.setdefault(len(x), torch.ones(len(x), 1))

    piece = Piece("all", (), lambda model, call, x: keep(call.args[0]))
    stage = StageModule(nn.Linear(1, 1), [piece], 0, 1, ForwardContext(nullcontext, (), nullcontext))
    with shapes_only():
        keep(torch.ones(2, 1))
    with pytest.raises(InputError, match="keeps a tensor outside the model"):
        stage.compute(Call((torch.ones(2, 1),), {}), None)
    assert stage.compute(Call((torch.ones(3, 1),), {}), None).sum() == 6
