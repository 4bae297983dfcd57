"""fp8: the products of linear layers as torchao computes them, and nothing else changed."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh import ConfigError, InputError
from halfmesh.amp import float8
from tests.support.ranks import here, rank_device, ranks_on, run_ranks
from tests.support.whole import close_whole

torchao = pytest.importorskip("torchao")


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Net(nn.Module):
    """Two layers that fit float8, one whose sizes do not, one with a forward of its own, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 48, bias=False)
        self.odd, self.own, self.head = nn.Linear(48, 24), Doubled(24, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        x = self.b(self.norm(torch.tanh(self.a(x))))
        return self.head(torch.tanh(self.own(torch.tanh(self.odd(torch.tanh(x))))))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(16, 32), torch.randint(0, 16, (16,))) for _ in range(4)]


def make_engine(config):
    adamw = lambda params: torch.optim.AdamW(params, lr=1e-2)  # noqa: E731
    return halfmesh.initialize(Net(), adamw, nn.CrossEntropyLoss(), config=config, device=rank_device())


def train(engine, count):
    for x, y in here(batches()[:count]):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()


def fp8(**options):
    return {"fp8": {"mode": "torch", **options}}


@pytest.mark.promise("fp8 by torchao", "bitwise torchao's products", of="PyTorch", page="precision.md")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_equal_to_torchao_by_hand(recipe):
    """Bit by bit. Its layers cast their input under CUDA's autocast only, so here hooks do."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    engine = make_engine(fp8(recipe=recipe))
    train(engine, 4)
    model, criterion = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in ("a", "b"))
    for layer in (model.a, model.b):
        layer.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(engine.model.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_input_that_is_a_transposed_view(recipe):
    with make_engine(fp8(recipe=recipe)) as engine:
        x = here(torch.randn(4, 32, 16)).transpose(1, 2)
        assert torch.equal(engine(x), engine(x.contiguous()))


@pytest.mark.parametrize(
    ("options", "stay", "words"),
    [
        ({}, {"odd", "head"}, "2 of 4 linear layers in float8 (tensorwise scales, emulated), odd, head in bfloat16"),
        ({"filter": ["a", "h*"], "recipe": "rowwise"}, {"a", "odd", "head"}, "1 of 4 linear layers in float8 (rowwise"),
    ],
)
def test_layers_that_stay_compute_as_in_bf16_and_the_plan_names_them(options, stay, words):
    engine, found = make_engine(fp8(**options)), set()
    assert words in str(engine.plan)
    for name in ("a", "b", "odd", "head"):
        layer = engine.model.get_submodule(name)
        x = torch.randn(16, layer.in_features)
        with torch.autocast("cpu", torch.bfloat16):
            if torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias)):
                found.add(name)
    assert found == stay
    engine.model.product = "the user's"
    engine.close()
    assert engine.model.__dict__.pop("product") == "the user's"
    assert all(not {"forward", "product"} & vars(module).keys() for module in engine.model.modules())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fp8": {"mode": "naive"}}, "mode 'naive' has no fp8; it has fp16, bf16"),
        (fp8(init_scale=2.0), "fp8.init_scale: fp8 computes gradients in bf16"),
        ({"fp16": {"mode": "torch", "recipe": "rowwise"}}, "fp16.recipe: it sets how float8 works"),
        (fp8(filter=["haed"]), "fp8.filter: no linear layer is named 'haed'; did you mean 'head'"),
        (fp8(filter=["*"]), "fp8: every linear layer is in fp8.filter, or has a size that 16 does not divide; use"),
        (fp8(emulate=False), "fp8.emulate: False, but cpu has no float8"),
        (None, "it needs the package torchao, which is not installed; pip install 'halfmesh[fp8]'"),
    ],
    ids=str,
)
def test_mistakes(config, words, monkeypatch):
    if config is None:
        monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises((ConfigError, InputError), match=re.escape(words)):
        make_engine(config or fp8())


def weights_after(config):
    engine = make_engine(config | {"clip_grad_norm": 1.0})
    assert "fp8" not in config or "2 of 4 linear layers in float8" in str(engine.plan)
    train(engine, 2)
    return close_whole(engine)


def train_sharded(rank, world_size):
    plan = {"a": "colwise_gather", "b": "rowwise_split"}
    return weights_after(fp8(recipe="rowwise") | {"parallel": {"tensor": {"size": 2, "plan": plan}}})


@pytest.mark.promise("fp8 by torchao")
@pytest.mark.distributed
def test_sharded_layers_compute_in_float8():
    """Scales of rows that are powers of two round alike in the parts: the weights end nearer to those of one process
    than bf16's do."""
    start, expected = Net().state_dict(), weights_after(fp8(recipe="rowwise"))

    def off(state):
        ways = ((state[n] - expected[n]).norm() / (expected[n] - start[n]).norm() for n in ("a.weight", "b.weight"))
        return max(way.item() for way in ways)

    share = 0.5 if ranks_on() == "gloo-cpu" else 0.6  # CUDA's autocast has norms give fp32
    most = share * off(weights_after({"bf16": {"mode": "torch"}}))
    assert all(off(state) < most for state in run_ranks(train_sharded, 2))
