"""Nested structures keep their types."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import torch

from halfmesh.tree import map_tensors

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    name: str = "n"
    derived: int = dataclasses.field(init=False, default=3)


class ModelOutput(OrderedDict):
    """Like those of model libraries: a mapping and a dataclass at once."""


@dataclasses.dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def test_containers_keep_their_type():
    one = torch.ones(1)
    tree = {
        "list": [one, 1],
        "tuple": (one, "x"),
        "pair": Pair(one, None),
        "ordered": OrderedDict(a=one),
        "default": defaultdict(list, a=one),
        "user": UserDict(a=one),
        "record": Record(one),
        "output": Output(loss=one, logits=one),
        "set": {1, 2},
    }
    mapped = map_tensors(double, tree)
    assert {key: type(value) for key, value in mapped.items()} == {key: type(value) for key, value in tree.items()}
    assert mapped["list"][0].item() == mapped["tuple"][0].item() == mapped["pair"].a.item() == 2
    assert mapped["ordered"]["a"].item() == mapped["user"]["a"].item() == mapped["default"]["a"].item() == 2
    assert mapped["default"]["new"] == []
    assert mapped["record"].value.item() == 2
    assert (mapped["record"].name, mapped["record"].derived) == ("n", 3)
    assert mapped["output"].loss.item() == mapped["output"]["logits"].item() == 2
    assert tree["list"][0].item() == 1


def test_what_does_not_change_is_returned_itself():
    tree = {"a": [torch.ones(1)], "b": Record(torch.ones(1))}
    assert map_tensors(lambda t: t, tree) is tree
