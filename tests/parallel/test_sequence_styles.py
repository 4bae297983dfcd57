"""Sequence parallelism: where the sequence is divided, gathered, and whole again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import divide, join_grads, parity, random


class Layer(nn.Module):
    """A layer between divided sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(4), nn.Module(), nn.Dropout(0.0)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Named(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(input=self.norm(x)))


def sequence_model(kind: type[Layer] = Layer) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(kind(), kind()), nn.LayerNorm(4), nn.Linear(4, 2)).double()


SEQUENCE_PLAN = {
    "1.0": "sequence_begin",
    "1.*.norm": "sequence",
    "1.*.drop": "sequence",
    "1.*.mlp": "region(input)",
    "1.*.mlp.0": "colwise",
    "1.*.mlp.2": "rowwise",
    "2": "sequence_end",
}


def sequence(rank: int, world_size: int) -> dict:
    found = {}
    for kind in (Layer, Named):
        found[kind.__name__] = parity(sequence_model(kind), lambda m: m(random(2, 6, 4)), SEQUENCE_PLAN, True)
    model = sequence_model()
    tensor = divide(model, SEQUENCE_PLAN, True)
    seen: list[int] = []
    for module in (model[0], model[1][0].norm, model[1][0].mlp[0], model[1][0].drop, model[1][1], model[2]):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model(random(2, 6, 4)).sum().backward()
    found["lengths"] = list(seen)
    found["partial"] = sorted(name for name, p in model.named_parameters() if p in tensor.partial)
    found["end"] = join_grads(model, tensor)["2.bias"].tolist()
    with pytest.raises(InputError) as error:
        model(random(2, 5, 4))
    found["message"] = str(error.value)
    found["closed"] = not tensor.axis.fork.is_open
    return found


@pytest.mark.distributed
def test_sequence_parallelism():
    for found in run_ranks(sequence, 2):
        for kind in ("Layer", "Named"):
            assert max(found[kind].output, found[kind].grads) < 1e-14
        assert found["lengths"] == [6, 3, 6, 3, 3, 3]  # the norm at the end, too, works on this rank's part
        assert found["partial"] == [
            *(f"1.{i}.{name}" for i in (0, 1) for name in ("mlp.2.bias", "norm.bias", "norm.weight")),
            "2.bias",
            "2.weight",
        ]
        assert found["message"] == (
            "a sequence of 5 cannot be divided by tensor=2, as sequence_parallel=True has to; pad it to 6, or set "
            "sequence_parallel=False"
        )
        assert found["closed"]
