"""Nested structures keep their types, dense memory is told by strides, a tensor gets other memory and stays itself."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import MutableMapping

import pytest
import torch
from torch import nn

from halfmesh.utils.tensors import in_memory_order, is_dense, map_tensors, replace_data

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


def test_containers_keep_their_type():
    one = torch.ones(1)
    tree = {
        "list": [one, 1],
        "pair": Pair(one, None),
        "ordered": OrderedDict(a=one),
        "default": defaultdict(list, a=one),
        "user": UserDict(a=one),
        "record": Record(one),
        "output": Output(loss=one, logits=one),
    }
    mapped = map_tensors(lambda tensor: tensor * 2, tree)
    assert {key: type(value) for key, value in mapped.items()} == {key: type(value) for key, value in tree.items()}
    values = [mapped["list"][0], mapped["pair"].a, mapped["record"].value, mapped["output"].loss]
    assert [x.item() for x in (*values, *(mapped[name]["a"] for name in ("ordered", "user", "default")))] == [2] * 7
    assert mapped["default"]["new"] == []
    assert (mapped["record"].name, mapped["record"].derived) == ("n", 3)
    assert tree["list"][0].item() == 1


class Batch(MutableMapping):
    """Of a user, with a dict of its own."""

    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class AttrDict(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@pytest.mark.parametrize("kind", [Batch, AttrDict])
def test_mappings_of_users_are_not_written_into(kind):
    batch = kind({"x": torch.ones(1)})
    mapped = map_tensors(lambda tensor: tensor * 2, batch)
    assert (type(mapped), batch["x"].item(), mapped["x"].item()) == (kind, 1, 2)
    assert vars(mapped).get("x", mapped["x"]) is mapped["x"]


def test_what_does_not_change_is_returned_itself():
    tree = {"a": [torch.ones(1)], "b": Record(torch.ones(1))}
    assert map_tensors(lambda t: t, tree) is tree


def test_dense_memory_and_its_order():
    x = torch.arange(24.0).view(1, 2, 3, 4)
    for dense in (x, x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2), x[:, :1], x[0, 0, 0, :0]):
        assert is_dense(dense)
        assert in_memory_order(dense).data_ptr() == dense.data_ptr()
    for sparse in (x[..., ::2], x[..., :2], x.expand(2, 2, 3, 4)):
        assert not is_dense(sparse)
        assert torch.equal(in_memory_order(sparse), sparse.reshape(-1))


def test_data_to_and_from_the_meta_device():
    param, buffer = nn.Parameter(torch.empty(2, 3, device="meta"), requires_grad=False), torch.empty(2, device="meta")
    param.tag = "mine"
    holder = nn.Linear(3, 2)
    holder.weight = param
    replace_data(param, torch.ones(2, 3))
    assert (holder.weight is param, param.sum().item(), param.tag, param.requires_grad) == (True, 6, "mine", False)
    replace_data(param, torch.empty(1, 3, device="meta"))
    assert (param.is_meta, param.shape, param.tag) == (True, (1, 3), "mine")
    replace_data(buffer, torch.ones(2))
    assert (type(param), type(buffer), buffer.tolist()) == (nn.Parameter, torch.Tensor, [1, 1])
