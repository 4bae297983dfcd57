"""What crosses between stages, found without computing anything, is what a real run shows; and it leaves no trace."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from halfmesh.errors import InputError
from halfmesh.parallel.pipeline.boundary import tensors_of
from halfmesh.parallel.pipeline.partition import Partition, resolve
from halfmesh.parallel.pipeline.pieces import Call
from halfmesh.parallel.pipeline.skeleton import Skeleton, signature_of
from halfmesh.parallel.pipeline.stage import Surroundings

CPU = torch.device("cpu")
PLAIN = Surroundings(contextlib.nullcontext, contextlib.nullcontext)


def autocast(dtype: torch.dtype, widened: torch.dtype | None = None) -> Surroundings:
    return Surroundings(lambda: torch.autocast("cpu", dtype), contextlib.nullcontext, widened)


def partition_of(model: nn.Module, points: Any = "auto") -> Partition:
    count = len(model) if points == "auto" else len(points) + 1
    partition, problems = resolve(model, count, 1, points)
    assert partition is not None
    assert problems == []
    return partition


def find(model: nn.Module, *args: Any, around: Surroundings = PLAIN, points: Any = "auto", **kwargs: Any) -> list[Any]:
    skeleton = Skeleton(model)
    return skeleton.crossings(partition_of(model, points), Call(args, kwargs), model, CPU, around)


def facts(tree: Any) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_of(tree)]


def run(model: nn.Module, partition: Partition, call: Call, around: Surroundings) -> list[Any]:
    """What each stage of a copy really returns; frozen parameters count as trained, for they may be later."""
    model, found, carry = copy.deepcopy(model).requires_grad_(), [], None
    for stage in partition.stages:
        for piece in stage:
            if piece.prepare is not None:
                piece.prepare(model, call)
            with around.scope():
                carry = piece.run(model, call.afresh(), carry)
        found.append(carry)
    return found


def make(*modules: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *modules, nn.Linear(4, 4))


class Second(nn.Module):
    def forward(self, pair: Any) -> torch.Tensor:
        return pair[0]


class Branches(nn.Module):
    """Tensors of several dtypes in a tree, one of them without a gradient."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": x, "more": [x > 0, (x.argmax(-1), x.detach().double()), "word", None, x.sum()]}


class Join(nn.Module):
    def forward(self, tree: dict[str, Any]) -> torch.Tensor:
        return tree["x"] + tree["more"][0] * tree["more"][4]


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


MODELS = {
    "batch_norm": make(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True)),
    "embedding": nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9)),
    "encoder": make(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Tanh()),
    "evaluated_encoder": make(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval(),
    "in_place": nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "gru": make(nn.GRU(4, 4, batch_first=True), Second()),
    "lstm": make(nn.LSTM(4, 4, 2, bidirectional=False), Second()),
    "tree": make(Branches(), Join()),
    "frozen_first": nn.Sequential(frozen(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 4)),
    "frozen_last": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), frozen(nn.Linear(4, 4))),
    "frozen": frozen(make(nn.ReLU())),
    "parametrized": make(
        parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4))
    ),
    "conv": nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    ),
}


def inputs_of(name: str) -> torch.Tensor:
    if name == "embedding":
        return torch.arange(6).view(2, 3)
    if name == "conv":
        return torch.randn(2, 4, 5, 6).to(memory_format=torch.channels_last)
    return torch.randn(3, 4) if name == "batch_norm" else torch.randn(3, 2, 4)


@pytest.mark.parametrize(
    "around", [PLAIN, autocast(torch.bfloat16), autocast(torch.float16)], ids=["plain", "bf16", "fp16"]
)
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_a_real_run(name, around):
    model, call = MODELS[name], Call((inputs_of(name),))
    partition = partition_of(model)
    expected = run(model, partition, call, around)
    found = Skeleton(model).crossings(partition, call, model, CPU, around)
    assert [facts(crossing.tree) for crossing in found] == [facts(tree) for tree in expected]
    assert all(tensor.is_meta for crossing in found for tensor in crossing.tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_in_other_dtypes(dtype):
    model = make(nn.LayerNorm(4), nn.GELU()).to(dtype)
    assert [facts(crossing.tree) for crossing in find(model, torch.randn(2, 4, dtype=dtype))] == [
        [((2, 4), dtype, True)]
    ] * 4


def test_half_precision_is_widened_between_stages_and_stays_at_the_end():
    found = find(make(nn.Tanh()), torch.randn(2, 4), around=autocast(torch.bfloat16, torch.float32))
    assert [crossing.tensors[0].dtype for crossing in found] == [torch.float32, torch.float32, torch.bfloat16]


def test_what_is_not_a_tensor_comes_along():
    tree = find(MODELS["tree"], inputs_of("tree"))[1].tree
    assert list(tree) == ["x", "more"]
    assert (tree["more"][2], tree["more"][3]) == ("word", None)
    assert type(tree["more"][1]) is tuple


def test_traced_models():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("table", torch.randn(9, 4))

        def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
            x = self.a(x) + self.table[: x.size(0)] * torch.arange(4)
            return self.b(x if mask is None else x * mask).view(x.shape[0], 2, -1)

    for given in ({}, {"mask": torch.ones(3, 1)}):
        found = find(Net(), torch.randn(3, 4), points=("b",), **given)
        assert facts(found[-1].tree) == [((3, 2, 2), torch.float32, True)]


# -- nothing is touched ----------------------------------------------------------------------------------------------


def test_the_model_is_left_alone():
    model = MODELS["batch_norm"]
    model(torch.randn(3, 4)).sum().backward()
    state = copy.deepcopy(model.state_dict())
    grads = {name: p.grad for name, p in model.named_parameters()}
    pointers = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    random = torch.get_rng_state()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    find(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert all(p.grad is grads[name] for name, p in model.named_parameters())
    assert [t.data_ptr() for t in (*model.parameters(), *model.buffers())] == pointers
    assert not x.requires_grad
    model.zero_grad()


def test_the_copy_has_no_memory():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].again = model[0].weight
    skeleton = Skeleton(model)
    assert all(tensor.is_meta for tensor in (*skeleton.model.parameters(), *skeleton.model.buffers()))
    assert skeleton.model[0].again is skeleton.model[0].weight
    assert [name for name, _ in skeleton.model.named_parameters()] == [name for name, _ in model.named_parameters()]
    big = nn.Sequential(nn.Linear(2**20, 2**20, device="meta"), nn.Linear(2**20, 4, device="meta"))
    assert facts(find(big, torch.randn(1, 1).expand(2, 2**20))[0].tree) == [((2, 2**20), torch.float32, True)]


def test_what_a_forward_keeps_on_modules():
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.cache = 0, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.cache is None or self.cache.shape[0] < x.shape[0]:
                self.cache = torch.arange(x.shape[0])[:, None] * 1.0
            return x + self.cache[: x.shape[0]]

    model = make(Caches())
    skeleton, partition = Skeleton(model), partition_of(model)
    for rows in (3, 2, 5):
        found = skeleton.crossings(partition, Call((torch.randn(rows, 4),)), model, CPU, PLAIN)
        assert facts(found[1].tree) == [((rows, 4), torch.float32, True)]
    assert (model[1].calls, model[1].cache) == (0, None)
    assert (skeleton.model[1].calls, skeleton.model[1].cache) == (0, None)


@pytest.mark.parametrize("within", [torch.no_grad, torch.inference_mode])
def test_gradients_that_training_needs_are_known_from_an_evaluation(within):
    with within():
        found = find(make(nn.ReLU()), torch.randn(2, 4))
    assert [facts(crossing.tree)[0][2] for crossing in found] == [True] * 3


def test_modes_follow_the_model():
    class Mode(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.training else x.double()

    model = nn.Sequential(nn.Linear(4, 4), Mode())
    skeleton, partition = Skeleton(model), partition_of(model)

    def look() -> list[Any]:
        found = skeleton.crossings(partition, Call((torch.randn(2, 4),)), model, CPU, PLAIN)
        return [facts(crossing.tree)[0][1:] for crossing in found]

    assert look() == [(torch.float32, True), (torch.float32, True)]
    model[1].eval()
    assert look() == [(torch.float32, True), (torch.float64, True)]
    model.train()
    assert look() == [(torch.float32, True), (torch.float32, True)]


def test_frozen_parameters_may_be_trained_later():
    found = find(frozen(make(nn.ReLU())), torch.randn(2, 4))
    assert [facts(crossing.tree)[0][2] for crossing in found] == [True] * 3


# -- refusals --------------------------------------------------------------------------------------------------------


class Asks(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(x)


@pytest.mark.parametrize(
    "how",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x[x[:, 0] > 0],
        lambda x: x.nonzero().float(),
        lambda x: x * torch.tensor(x.tolist()),
        lambda x: x.unique(),
    ],
    ids=["item", "if", "boolean", "nonzero", "tolist", "unique"],
)
def test_a_forward_that_asks_for_values(how):
    with pytest.raises(
        InputError, match=r"the model's forward asks for the values of its activations \(.item\(\), if, bo"
    ):
        find(make(Asks(how)), torch.randn(2, 4))


def test_a_model_that_cannot_be_copied():
    model = make(nn.ReLU())
    model[1].generator = (i for i in range(3))
    with pytest.raises(InputError, match=r"the model cannot be copied \(.*generator.*\).*take out of the model what"):
        Skeleton(model)


def test_errors_of_the_forward_are_told():
    with pytest.raises(
        InputError, match=r"failed where it was run on tensors without data.*(same reduction dim|shape)"
    ):
        find(make(nn.ReLU()), torch.randn(2, 5))


# -- signatures ------------------------------------------------------------------------------------------------------


def test_signatures():
    x = torch.randn(2, 4)
    signature = signature_of(Call((x,), {"mask": [x > 0, None]}))
    assert signature == signature_of(Call((x + 1,), {"mask": [x > 1, None]}))
    others = [
        Call((x,)),
        Call((x[:1],), {"mask": [x > 0, None]}),
        Call((x,), {"mask": [x > 0, 3]}),
        Call((x,), {"mask": [x, None]}),
        Call((x.double(),), {"mask": [x > 0, None]}),
        Call((x.clone().requires_grad_(),), {"mask": [x > 0, None]}),
        Call((), {"x": x, "mask": [x > 0, None]}),
    ]
    assert len({signature, *map(signature_of, others)}) == 1 + len(others)
