"""Models with stages and boundaries of every kind train and evaluate under each schedule as in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.utils.tensors import tensors_of
from tests.support.pipeline_parts import pipe, step, whole
from tests.support.ranks import here, rank_device, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]

WIDTH = 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Apply(nn.Module):
    """A module without parameters."""

    def __init__(self, how: Callable[[Any], Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Any) -> Any:
        return self.how(x)


class Layer(nn.Module):
    """A layer, and what is done with its input and its output."""

    def __init__(self, take: Callable[[Any], Any] = lambda x: x, give: Callable[..., Any] = lambda x, y: y) -> None:
        super().__init__()
        self.layer, self.take, self.give = linear(), take, give

    def forward(self, x: Any) -> Any:
        return self.give(x, self.layer(self.take(x)))


class Skips(nn.Module):
    """Values of the first stage are used in the last one; weights and a table are used in several."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.randn(9, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.size(0)
        first = self.a(x * self.scale)
        x = self.b(first.tanh()) + self.table[:1].expand(rows, -1)
        x = self.c(x) * self.scale
        return self.d(x).view(rows, -1) + first


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.b, self.c, self.norm = linear(), linear(), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed((x * 4).long() % 9)
        x = self.norm(self.c(self.b(x).tanh()))
        return nn.functional.linear(x, self.embed.weight)


class Scaled(nn.Module):
    """A layer with scales that other layers have, too; one of them may get no gradient here."""

    def __init__(self, *scales: nn.Parameter, idle: nn.Parameter | None = None) -> None:
        super().__init__()
        self.layer, self.scales, self.idle = linear(), nn.ParameterList(scales), idle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for scale in self.scales:
            x = x * scale
        return x if self.idle is None else x + self.idle.detach()


def scales() -> nn.Module:
    """Parameters of stages 0 and 3, of all four, of 1 and 2; and one of 0 and 3 that learns in stage 0 only."""
    ends, everywhere, inner, once = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(4))
    first, last = Scaled(ends, everywhere, once), Scaled(ends, everywhere, idle=once)
    return sequential(first, Scaled(everywhere, inner), Scaled(everywhere, inner), last)


def one_of(y: torch.Tensor) -> torch.Tensor:
    """1 whatever the rows are, with a gradient for each of them."""
    return (y / y.detach()).mean()


def shared_layer() -> nn.Module:
    layer = linear()
    return sequential(layer, Layer(), linear(), layer)


class Caches(nn.Module):
    """Keeps what follows from shapes."""

    cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None or len(self.cache) < len(x):
            self.cache = torch.full((len(x), 1), 0.1, device=x.device)
        return x + self.cache[: len(x)]


class Inline(nn.Module):
    """A function on it has its layer from around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer = linear()
        self.function = lambda x, scale=2.0: layer(x).tanh() * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def table(rows: int) -> torch.Tensor:
    return torch.full((rows, 1), 0.1, device=rank_device())


class Keeps(Layer):
    """Keeps a table, and the number of rows that it was made for, as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.rows = how, 0
        self.kept: Any = {"dict": {}, "nested": {"list": []}, "object": Box()}.get(how)
        if how == "buffer":
            self.register_buffer("table", torch.zeros(0, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new, rows = len(x) != self.rows, len(x)
        self.rows = rows
        if self.how == "number" and new:
            self.kept = table(rows)
        elif self.how == "dict" and rows not in self.kept:
            self.kept[rows] = table(rows)
        elif self.how == "nested" and new:
            self.kept["list"].append(table(rows))
        elif self.how == "object" and new:
            self.kept.table = table(rows)
        elif self.how == "buffer" and new:
            self.table = table(rows)
        found = {
            "number": lambda: self.kept,
            "dict": lambda: self.kept[rows],
            "nested": lambda: self.kept["list"][-1],
            "object": lambda: self.kept.table,
            "buffer": lambda: self.table,
        }
        return self.layer(x) + found[self.how]()


@dataclass
class Box:
    table: Any = None


def sequential(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    return sequential(linear(), Apply(lambda x: x[:, None].repeat(1, 3, 1)), layer, Layer(lambda x: x[:, 0]))


def gru() -> nn.Module:
    rows = nn.GRU(WIDTH, WIDTH, batch_first=True)
    return sequential(linear(), Apply(lambda x: x[:, None]), rows, Apply(lambda pair: pair[0][:, 0]))


def parametrized() -> nn.Module:
    wrap = nn.utils.parametrizations
    return sequential(linear(), wrap.weight_norm(linear()), wrap.spectral_norm(linear()), linear())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: sequential(linear(), Apply(torch.tanh), linear(), linear(), linear()),
    "batch_norm": lambda: sequential(linear(), nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH)),
    "frozen_first": lambda: sequential(frozen(linear()), linear(), linear(), linear()),
    "frozen_front": lambda: sequential(frozen(linear()), frozen(linear()), frozen(linear()), linear()),
    "frozen_last": lambda: sequential(linear(), linear(), linear(), frozen(linear())),
    "no_parameters": lambda: sequential(Apply(torch.sin), linear(), Apply(torch.cos), linear()),
    "in_place": lambda: sequential(linear(), Apply(lambda x: x.relu_().mul(2)), Apply(lambda x: x.mul_(3)), linear()),
    "tuple": lambda: sequential(
        Layer(give=lambda x, y: (x, y)),
        Layer(lambda pair: pair[1], lambda pair, y: (pair[0], [y, pair[1]])),
        Layer(lambda pair: pair[1][0], lambda pair, y: (pair[0] * y, pair[1])),
        Layer(lambda pair: pair[0], lambda pair, y: y + pair[1][1]),
    ),
    "dict": lambda: sequential(
        Layer(give=lambda x, y: {"y": y, "mask": y > 0, "index": y.argmax(1), "word": "w", "unused": y * 2}),
        Layer(lambda tree: tree["y"] * tree["mask"], lambda tree, y: {**tree, "y": y, "none": None, "sum": one_of(y)}),
        Layer(lambda tree: tree["y"] * tree["sum"], lambda tree, y: {"y": y, "index": tree["index"].int()}),
        Layer(lambda tree: tree["y"], lambda tree, y: {"out": y * tree["index"][:, None], "mask": y > 0}),
    ),
    "integers_only": lambda: sequential(Apply(lambda x: x.argmax(1)), nn.Embedding(WIDTH, WIDTH), linear(), linear()),
    "empty": lambda: sequential(
        Layer(give=lambda x, y: (y, y[:, :0])),
        Layer(lambda pair: pair[0], lambda pair, y: (y, pair[1])),
        Layer(lambda pair: torch.cat(pair, 1)),
        linear(),
    ),
    "transposed": lambda: sequential(
        Layer(give=lambda x, y: y[:, None].expand(-1, 3, -1).transpose(0, 1)),
        Layer(lambda x: x.transpose(0, 1).sum(1)),
        linear(),
        linear(),
    ),
    "detached": lambda: sequential(linear(), linear(), Layer(torch.Tensor.detach), linear()),
    "half": lambda: sequential(linear(), Layer(give=lambda x, y: y.bfloat16()), Layer(torch.Tensor.float), linear()),
    "skips": Skips,
    "tied_embedding": TiedEmbedding,
    "shared_layer": shared_layer,
    "scales": scales,
    "caches": lambda: sequential(linear(), Caches(), linear(), Caches(), linear()),
    "kept_tables": lambda: sequential(*map(Keeps, ("number", "dict", "nested", "object", "buffer"))),
    "functions": lambda: sequential(Inline(), Inline(), linear(), Inline()),
    "encoder": encoder,
    "gru": gru,
    "parametrized": parametrized,
}
POINTS = {"skips": ("b", "c", "d"), "tied_embedding": ("b", "c", "norm")}
# The schedules differ in the order of the work, not in what crosses: each boundary is met under one of them at least.
CASES = [(name, "1f1b") for name in MODELS]
CASES += [(name, "gpipe") for name in ("batch_norm", "dict", "in_place")]
CASES += [(name, "interleaved") for name in ("batch_norm", "dict", "in_place", "tied_embedding", "shared_layer")]
CASES += [(name, "interleaved") for name in ("frozen_first", "no_parameters", "tuple", "skips", "scales")]
LAYOUTS = {"1f1b": {"size": 4}, "gpipe": {"size": 4}, "interleaved": {"size": 2, "chunks": 2}}
MICROBATCHES = 4


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return here((torch.randn(rows, WIDTH, generator=generator), torch.rand(rows, generator=generator)))


def criterion(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Each sample weighs otherwise."""
    each = [t.float().square().flatten(1).mean(1) for t in tensors_of(output) if t.requires_grad]
    return (sum(each) * target).mean()


sgd = partial(torch.optim.SGD, lr=0.1)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def train(engine: Any, model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Outputs of evaluations and updates in turn, of an engine or of the model by itself."""
    outputs: list[Any] = []
    optimizer = None if engine else sgd(model.parameters())

    def evaluate(rows: int) -> None:
        with torch.no_grad():
            outputs.append((engine or model)(batch(rows, rows)[0]))

    def update(rows: int) -> None:
        x, y = batch(rows, rows)
        if engine:
            engine(x)  # without a backward nothing runs
            outputs.append(step(engine, x, y)[0].value())
            return
        optimizer.zero_grad()
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            outputs.append(model(part))
            (criterion(outputs[-1], target) / MICROBATCHES).backward()
        optimizer.step()

    evaluate(2)  # in training mode, with as many rows as a microbatch has: shapes found for it must do for training
    update(8)
    update(12)
    model.eval()
    evaluate(3)
    model.train()
    return outputs


def run(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[Any, Any]:
    found = {}
    for name, schedule in cases:
        model = build(name)
        options = LAYOUTS[schedule] | {"schedule": schedule, "partition": POINTS.get(name, "auto")}
        config = pipe(microbatches=MICROBATCHES, keep_outputs=True, eval_outputs="all", **options)
        engine = halfmesh.initialize(model, sgd(model.parameters()), criterion, config=config, device=rank_device())
        outputs = train(engine, engine.model)
        found[name, schedule] = outputs, whole(engine)
    return found


def run_whole(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name in MODELS:
        model = here(build(name))
        outputs = train(None, model)
        tensors = [[tensor.detach() for tensor in tensors_of(output)] for output in outputs]
        found[name] = type(outputs[0]), tensors, dict(model.state_dict())
    return found


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    """The type of what the model returns, the tensors of all outputs, and the weights, by model."""
    return run_ranks(run_whole, 1)[0]


@pytest.fixture(scope="module")
def ranks() -> dict[Any, Any]:
    """What each rank found, by case."""
    found: dict[Any, Any] = {}
    for world_size, schedules in ((4, ("1f1b", "gpipe")), (2, ("interleaved",))):
        cases = [case for case in CASES if case[1] in schedules]
        results = run_ranks(run, world_size, cases, timeout=180)
        found |= {case: [result[case] for result in results] for case in cases}
    return found


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_equal_to_one_process(name, schedule, ranks, one_process):
    kind, (evaluated, *parts, last), weights = one_process[name]
    joined = [
        [torch.cat(tensors) for tensors in zip(*parts[begin : begin + MICROBATCHES], strict=True)]
        for begin in (0, MICROBATCHES)
    ]
    expected = [evaluated, *joined, last]
    for outputs, found in ranks[name, schedule]:
        torch.testing.assert_close([tensors_of(output) for output in outputs], expected, rtol=1e-6, atol=1e-6)
        assert type(outputs[0]) is kind
        assert found.keys() == weights.keys()
        torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-6)


# -- what crosses ----------------------------------------------------------------------------------------------------

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NAN32, NAN64 = 0x7F800001, 0x7FF0000000000001  # as floats signalling NaNs, which arithmetic would change


def extremes(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False])
    limits = torch.iinfo(dtype)
    nan = {4: NAN32, 8: NAN64}.get(dtype.itemsize, 0)
    return torch.tensor([limits.min, limits.max, 0, 1, nan, -nan], dtype=dtype)


class Tables(nn.Module):
    """Integers of every dtype beside the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        for number, dtype in enumerate(INTEGERS):
            self.register_buffer(f"table{number}", extremes(dtype))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": self.layer(x), "tables": [table.expand(len(x), -1) for _, table in self.named_buffers()]}


def carries(rank: int, world_size: int) -> Any:
    model = sequential(Tables(), Layer(lambda tree: tree["x"], lambda tree, y: tree | {"x": y}))
    config = pipe(keep_outputs=True, eval_outputs="all")
    engine = halfmesh.initialize(model, sgd, criterion, config=config, device=rank_device())
    trained = step(engine, *batch(4, 0))[0].value()
    return trained, engine.eval()(batch(3, 1)[0])


def test_integers_of_every_dtype_arrive():
    for trained, evaluated in run_ranks(carries, 2):
        for output, rows in ((trained, 4), (evaluated, 3)):
            for dtype, found in zip(INTEGERS, output["tables"], strict=True):
                assert found.dtype == dtype
                assert torch.equal(found, extremes(dtype).expand(rows, -1)), dtype
