"""Partitions of models with a row of blocks, written by users."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import InputError
from halfmesh.parallel.pipeline.block_partition import BlockPartition, children_of, has_name
from halfmesh.parallel.pipeline.pieces import Call, Piece
from halfmesh.parallel.registries import PARTITIONERS
from tests.support.pipeline_parts import check_pieces, compose

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Blocks within a container that holds other things, too; a mask for all blocks; a head that may be missing."""

    def __init__(self, head: bool = True, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Linear(4, 4)
        self.position = nn.Parameter(torch.randn(4))
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.body.scale = nn.Linear(4, 4)
        self.body.norm = nn.BatchNorm1d(4)
        self.body.register_buffer("table", torch.randn(4))
        self.head = nn.Linear(4, 2) if head else None
        self.shared = 0

    def make_mask(self, x: torch.Tensor) -> torch.Tensor:
        self.shared += 1
        return self.body.scale(x)

    def start(self, x: torch.Tensor) -> torch.Tensor:
        return self.begin(x) + self.position + self.body.table

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body.norm(x)
        return x if self.head is None else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, x = self.make_mask(x), self.start(x)
        for block in self.body.blocks:
            x = x + block(x) * mask
        return self.finish(x)


PARTITION = BlockPartition(
    layers=(Net,),
    methods=("finish",),
    blocks="body.blocks",
    begin=lambda model, x: model.start(x),
    end=lambda model, x: model.finish(x),
    end_uses=("body.norm", "head"),
    share=lambda model, x: model.make_mask(x),
    shared_uses=("body.scale",),
    block=lambda block, x, mask: x + block(x) * mask,
    find_problem=lambda model: "it has no blocks" if not len(model.body.blocks) else None,
)


@pytest.fixture
def registered():
    PARTITIONERS.register("net", PARTITION)
    yield
    del PARTITIONERS._objects["net"]


@pytest.mark.parametrize("head", [True, False])
def test_pieces(registered, head):
    pieces = check_pieces(Net(head), [X], partition="net")
    names = [f"body.blocks.{i}" for i in range(3)]
    assert [piece.name for piece in pieces] == ["the beginning", *names, "the end"]
    assert [set(piece.uses) for piece in pieces] == [
        {"begin", "position", "body.table"},
        *({name, "body.scale"} for name in names),
        {"body.norm", "head"} if head else {"body.norm"},
    ]
    assert check_pieces(Net(head), [], {"x": X}, "auto")[0].name == "the beginning"


def test_what_is_shared_is_made_once_in_each_stage():
    model = Net()
    pieces = PARTITION.pieces_of(model)
    call, carry = Call((X,)), None
    for stage in (pieces[:2], pieces[2:4], pieces[4:]):
        here = call.afresh()
        for piece in stage:
            carry = piece.run(model, here, carry)
    assert model.shared == 2, "the last stage has no blocks"
    assert torch.equal(carry, Net()(X))
    compose(model, pieces, X)
    assert model.shared == 2 + 3


def test_models_that_are_not_known():
    assert PARTITION.pieces_of(nn.Linear(2, 2)) is None

    class Forward(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Finish(Net):
        def finish(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Same(Net):
        def start(self, x: torch.Tensor) -> torch.Tensor:
            return super().start(x) * 2

    assert PARTITION.pieces_of(Forward()) is None
    assert PARTITION.pieces_of(Finish()) is None
    assert len(PARTITION.pieces_of(Same())) == 5


def test_parts_have_to_be_of_their_class():
    options: dict[str, Any] = {"blocks": "body.blocks", "begin": None, "end": None, "end_uses": ()}
    name = f"{Net.__module__}.Net"
    for kind, known in (("torch.nn.modules.linear.Linear", True), ("torch.nn.modules.linear.Bilinear", False)):
        partition = BlockPartition(layers=(name,), parts={"begin": kind}, **options)
        assert (partition.pieces_of(Net()) is not None) == known


def test_a_problem_of_the_model():
    with pytest.raises(InputError, match=r"^the model \(Net\): it has no blocks$"):
        PARTITION.pieces_of(Net(count=0))


def test_a_block_that_is_there_twice():
    model = Net()
    model.body.blocks[2] = model.body.blocks[0]
    assert [piece.name for piece in PARTITION.pieces_of(model)][1:-1] == [f"body.blocks.{i}" for i in range(3)]
    assert torch.equal(compose(model, PARTITION.pieces_of(model), X), model(X))


def test_names():
    model = Net(head=False)
    assert children_of(model) == ["begin", "body"]
    assert children_of(nn.Sequential(module := nn.ReLU(), module)) == ["0", "1"]
    for name in ("begin", "begin.weight", "position", "body.table", "body.blocks.1"):
        assert has_name(model, name)
    for name in ("head", "other", "body.other", "other.weight", "body.blocks.7"):
        assert not has_name(model, name)


# -- calls -----------------------------------------------------------------------------------------------------------


def test_calls_keep_what_was_made():
    made = []
    call = Call((X,), {"a": 1})
    for _ in range(2):
        assert call.once("key", lambda: made.append(1) or "value") == "value"
    assert call.once("other", lambda: None) is None
    assert made == [1]
    again = call.afresh()
    assert (again.args, again.kwargs) == (call.args, call.kwargs)
    assert again.once("key", lambda: "new") == "new"


def test_public_names():
    assert (halfmesh.BlockPartition, halfmesh.Call, halfmesh.Piece) == (BlockPartition, Call, Piece)
