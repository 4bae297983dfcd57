"""Plans of one's own: those that mix features between colwise and rowwise layers are refused before the first update,
and the right ones train as one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import halfmesh
from halfmesh.utils.torch_private import call_hooks
from tests.support.models import MODES
from tests.support.nano_gpt import CONTEXT, GPT, PLAN, WORDS, CausalSelfAttention
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import apart, make_optimizer, random, refusal, rng_state, scalar
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN, HEADS = 8, 16, 4
PAIR = {"*.up": "colwise", "*.down": "rowwise"}


def largest_gap(weights: dict[str, torch.Tensor], whole: nn.Module) -> float:
    return max(apart(here(weights[name]), param) for name, param in whole.named_parameters())


class Hidden(nn.Module):
    """What stands between two layers; the first gives `times` times as many features as the second takes."""

    times = 1

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, self.times * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return F.gelu(h)


class Softmaxed(Hidden):
    def between(self, h):
        return F.softmax(h, -1)


class SoftmaxLayer(Hidden):
    def __init__(self):
        super().__init__()
        self.act = nn.Softmax(-1)

    def between(self, h):
        return self.act(h)


class Normed(Hidden):
    def between(self, h):
        return F.layer_norm(h, h.shape[-1:])


class RMSNormed(Hidden):
    def between(self, h):
        return h * h.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class Centred(Hidden):
    def between(self, h):
        return h - h.mean(-1, keepdim=True)


class Relative(Hidden):
    def between(self, h):
        return h - h.amax(-1, keepdim=True)


class Normalized(Hidden):
    def between(self, h):
        return F.normalize(h, dim=-1)


class Summed(Hidden):
    def between(self, h):
        return h.cumsum(-1)


class Gated(Hidden):
    times = 2

    def between(self, h):
        value, gate = h.chunk(2, -1)
        return value * F.silu(gate)


class GatedLinear(Hidden):
    times = 2

    def between(self, h):
        return F.glu(h, -1)


class Grouped(Hidden):
    """Reshapes into a fixed number of heads."""

    def between(self, h):
        heads = h.unflatten(-1, (HEADS, -1))
        return heads.softmax(-1).flatten(-2)


class ZeroStart(Softmaxed):
    """With its initial weights the output is zero, whatever comes before."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.down.weight)


class Named(Hidden):
    """Calls its layers by a function that it holds."""

    def __init__(self):
        super().__init__()
        self.mlp = lambda x: self.down(F.softmax(self.up(x), -1))

    def forward(self, x):
        return self.mlp(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)


class FixedHeads(Attention):
    def heads(self, x):
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


class ReLU(Hidden):
    def between(self, h):
        return F.relu(h)


class TwoGates(Hidden):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Dropped(Hidden):
    """Starts at zero, as residual branches do, and drops (nothing of what is here, so that it can be compared)."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)
        nn.init.zeros_(self.down.weight)

    def between(self, h):
        return self.drop(F.gelu(h))


class Masked(nn.Module):
    """Attention that takes a mask by name, and returns the weights of its heads, too."""

    class Heads(Attention):
        def forward(self, x, *, mask):
            q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))
            weights = (q @ k.transpose(-1, -2)).masked_fill(mask, float("-inf")).softmax(-1)
            return {"out": self.out((weights @ v).transpose(1, 2).flatten(2)), "weights": weights}

    def __init__(self):
        super().__init__()
        self.inner = self.Heads()

    def forward(self, x):
        return self.inner(x, mask=torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool())["out"]


class AlwaysDrops(Hidden):
    """Also in evaluation, as F.dropout does by default."""

    def between(self, h):
        return F.dropout(h, 0.5)


class FailsOnOne(Hidden):
    """In the trial, as where the memory of one rank is used up."""

    def between(self, h):
        if not self.training and dist.get_rank() == 0:
            raise RuntimeError("out of memory")
        return F.gelu(h)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module], blocks: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


FUSED = {"*.qkv": "fused_colwise(3)", "*.out": "rowwise"}
WRONG: dict[type[nn.Module], dict[str, str]] = {
    **dict.fromkeys((Softmaxed, ZeroStart, SoftmaxLayer, Normed, RMSNormed, Centred, Relative, Normalized), PAIR),
    **dict.fromkeys((Summed, Gated, GatedLinear, Grouped, Named), PAIR),
    FixedHeads: FUSED,
    Attention: {"*.qkv": "colwise", "*.out": "rowwise"},
}
RIGHT: dict[type[nn.Module], dict[str, str]] = {
    Hidden: PAIR,
    ReLU: PAIR,
    TwoGates: {**PAIR, "*.gate": "colwise"},
    Dropped: PAIR,
    Attention: FUSED,
    Masked: FUSED,
    Gated: {**PAIR, "*.up": "fused_colwise(2)"},
}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Model(kind).double()


def engine_of(model: nn.Module, plan: dict[str, str], parallel: Any = None, **config: Any) -> halfmesh.Engine:
    config["parallel"] = {"tensor": {"size": 2, "plan": plan}, **(parallel or {})}
    return halfmesh.initialize(model, make_optimizer, scalar, config=config, device=rank_device())


def train(engine: Any, steps: int = 2) -> None:
    for _ in range(steps):
        engine.backward(scalar(engine(random(4, 6, WIDTH))))
        engine.step()


def wrong_plans(rank: int, world_size: int) -> dict[str, str]:
    return {
        kind.__name__: refusal(lambda kind=kind, plan=plan: train(engine_of(made(kind), plan)))
        for kind, plan in WRONG.items()
    }


@pytest.mark.promise(
    "tensor parallelism of chosen layers",
    "patterns with styles, plans for classes; your own plan is tried out before the first update",
    of="SageMaker",
    page="tensor-parallel.md",
)
def test_plans_that_mix_features_are_refused_before_the_first_update():
    for found in run_ranks(wrong_plans, 2):
        for kind, plan in WRONG.items():
            message = found[kind.__name__]
            start = "InputError: 1 kind of block computed something else when sharded over tensor=2"
            assert message.startswith(start), (kind, message)
            assert f"blocks.0 and 1 more ({kind.__name__}): its output differs by " in message
            assert f"The plan: {plan}" in message


class ScaledByInput(Hidden):
    """The same forward, but each rank's gradient of the input is a part of it."""

    def forward(self, x):
        return self.down(F.gelu(self.up(x)) * x.sum(-1, keepdim=True))


def wrong_backward(rank: int, world_size: int) -> str:
    return refusal(lambda: train(engine_of(made(ScaledByInput), PAIR)))


def test_a_wrong_backward_behind_a_right_forward_is_refused_before_the_first_update():
    for message in run_ranks(wrong_backward, 2):
        assert message.startswith("InputError: the gradients of first.weight, first.bias"), message
        assert "differ between the ranks of a tensor group" in message


class Residual(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.block = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


def row(*kinds: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layers = (Residual(kind) for kind in kinds)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))


BOTH = {**PAIR, **FUSED}
SEQUENCE = {"1": "sequence_begin", "*.block": "region", "3": "sequence_end"}
CHECKPOINT = {"activation_checkpoint": {"patterns": ["1", "2"]}}
WAYS: dict[str, dict[str, Any]] = {
    **{mode: config for mode, config in MODES.items() if "apex" not in mode},
    "checkpointed": {**MODES["naive_bf16"], **CHECKPOINT},
    "compiled": {"compile": {"backend": "eager", "scope": "blocks"}},
    "accumulated": {"gradient_accumulation": 2},
}


def learn(engine: Any, steps: int = 2) -> None:
    x, labels = random(4, 6, WIDTH, dtype=torch.float32), here(torch.arange(24).reshape(4, 6) % 3)
    for _ in range(steps):
        loss = engine.criterion(engine(x), labels)
        engine.backward(loss)
        engine.step()


def labelled(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float().flatten(0, -2), labels.flatten())


def start(model: Any, plan: dict[str, str], config: dict[str, Any], **parallel: Any) -> halfmesh.Engine:
    tensor = {"size": 2, "plan": plan, "sequence_parallel": "1" in plan}
    config = {**config, "parallel": {"tensor": tensor, **parallel}}
    return halfmesh.initialize(
        model, lambda p: torch.optim.SGD(p, lr=0.1), labelled, config=config, device=rank_device()
    )


def ways(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """What is said of a wrong plan and of a right one."""
    found = {}
    for name, config in WAYS.items():
        models = row(Attention, Softmaxed), row(Attention, Hidden)
        found[name] = tuple(refusal(lambda m=m, c=config: learn(start(m, BOTH, c))) for m in models)
    for name, plan in (("deferred", BOTH), ("sequence", {**BOTH, **SEQUENCE})):
        kinds = (Attention, Softmaxed), (Attention, Hidden)
        found[name] = tuple(refusal(lambda k=k, p=plan: learn(start(lambda: row(*k), p, {}))) for k in kinds)
    return found


def test_in_every_precision_and_with_what_changes_the_forward():
    for found in run_ranks(ways, 2, timeout=240):
        assert len(found) == len(WAYS) + 2
        for way, (wrong, right) in found.items():
            assert "2.block (Softmaxed): its output differs by" in wrong, (way, wrong)
            assert "Attention" not in wrong, way
            assert right == "no error", (way, right)


def layouts(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """A wrong block in one stage only, and with data ranks under each strategy."""
    found = {}
    pipeline = {"size": 2, "microbatches": 2}
    for name, parallel in {
        "pipeline": {"pipeline": pipeline},
        "replicate": {},
        "zero1": {"data": "zero1"},
        "fsdp": {"data": "fsdp"},
    }.items():
        models = row(Softmaxed, Hidden, Hidden), row(ReLU, Hidden, Hidden)
        found[name] = tuple(refusal(lambda m=m, p=parallel: learn(start(m, PAIR, {}, **p))) for m in models)
    return found


@pytest.mark.sends
def test_in_every_layout_on_all_ranks():
    for found in run_ranks(layouts, 4, timeout=240):
        for layout, (wrong, right) in found.items():
            assert "1.block (Softmaxed): its output differs by" in wrong, (layout, wrong)
            assert right == "no error", (layout, right)


@contextmanager
def told() -> Iterator[list[str]]:
    """The warnings about plans that are logged on this rank."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("halfmesh").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("halfmesh").removeHandler(handler)
        texts[:] = [text for text in texts if "parallel.tensor.plan" in text]


def right_plans(rank: int, world_size: int) -> dict[str, tuple[float, list[str]]]:
    found = {}
    for kind, plan in RIGHT.items():
        model, whole = made(kind), here(made(kind))
        optimizer = make_optimizer(whole.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            scalar(whole(random(4, 6, WIDTH))).backward()
            optimizer.step()
        with told() as warnings:
            engine = engine_of(model, plan)
            train(engine)
        off = largest_gap(close_whole(engine), whole)
        found[kind.__name__] = off, warnings
    return found


def test_right_plans_train_as_one_process():
    for found in run_ranks(right_plans, 2):
        for kind, (off, warnings) in found.items():
            assert off < 1e-9, kind
            assert warnings == [], kind


def costs(rank: int, world_size: int) -> dict[str, Any]:
    """How often a block is computed, what becomes of random numbers, and what is told where nothing can be tried."""
    found: dict[str, Any] = {}
    calls: list[nn.Module] = []
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
    for name, model, plan in (("brought", layer, "auto"), ("own", Residual(ReLU), PAIR)):
        block = getattr(model, "block", model)
        block.register_forward_hook(lambda module, *_: calls.append(module))
        engine = start(model, plan, {})
        hooks = len(call_hooks(block))
        for step in ("first", "second"):
            calls.clear()
            output = engine(random(4, 6, WIDTH, dtype=torch.float32))
            state = rng_state()
            engine.backward(scalar(output))
            found[f"{name}, {step}"] = len(calls), torch.equal(state, rng_state())
            engine.step()
        found[f"{name}, hooks"] = hooks - len(call_hooks(block))
        engine.close()
    engine = start(row(AlwaysDrops, Hidden), PAIR, {})
    output, state = engine(random(4, 6, WIDTH, dtype=torch.float32)), rng_state()
    with told() as warnings:
        engine.backward(scalar(output))
    found["draws"] = torch.equal(state, rng_state())
    return found | {"told": warnings}


def test_what_it_costs_and_what_is_told():
    for rank, found in enumerate(run_ranks(costs, 2)):
        assert found["brought, first"] == found["brought, second"] == found["own, second"] == (1, True)
        assert found["own, first"] == (3, True)  # whole and sharded
        assert (found["brought, hooks"], found["own, hooks"]) == (0, 1)  # removed
        assert found["draws"]
        assert len(found["told"]) == (rank == 0)
        for text in found["told"]:
            assert "could not be tried out: 1.block (it draws random numbers in evaluation, too); compare a few" in text


def fails_alone(rank: int, world_size: int) -> list[str]:
    engine = engine_of(made(FailsOnOne), PAIR)
    with told() as warnings:
        train(engine)
    return warnings


def test_a_rank_that_fails_alone_leaves_no_other_waiting():
    (first, *_), _ = run_ranks(fails_alone, 2, timeout=60)
    assert "could not be tried out: blocks.0 (computing it whole failed: RuntimeError('out of memory'))" in first


def trained(model: nn.Module, engine: halfmesh.Engine | None = None) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = None if engine else torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        ids = here(torch.randint(WORDS, (4, CONTEXT + 1), generator=generator))
        output = (engine or model)(ids[:, :-1])
        loss = F.cross_entropy(output.flatten(0, 1), ids[:, 1:].flatten())
        if engine:
            engine.backward(loss)
            engine.step()
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def small_gpt(rank: int, world_size: int) -> tuple[float, float, str]:
    torch.manual_seed(0)
    whole = here(GPT().double())
    torch.manual_seed(0)
    model = GPT().double()
    before = [param.detach().clone() for param in whole.parameters()]
    config = {"parallel": {"tensor": {"size": 2, "plan": PLAN}}}
    engine = halfmesh.initialize(model, lambda p: torch.optim.AdamW(p, lr=1e-2), config=config, device=rank_device())
    assert engine.model.get_parameter("transformer.h.0.attn.c_attn.weight").shape == (24, 16)
    trained(model, engine)
    weights = close_whole(engine)
    trained(whole)
    moved = max(apart(a, b) for a, b in zip(before, whole.parameters(), strict=True))
    found = largest_gap(weights, whole)
    unchanged = halfmesh.initialize(
        GPT(CausalSelfAttention), lambda p: torch.optim.SGD(p, lr=1e-2), config=config, device=rank_device()
    )
    try:
        trained(unchanged.model, unchanged)
    except RuntimeError as error:
        return found, moved, "\n".join([str(error), *error.__notes__])
    return found, moved, ""


@pytest.mark.promise("tensor parallelism of chosen layers")
def test_a_gpt_of_small_scripts_trains_with_one_line_changed():
    for found, moved, message in run_ranks(small_gpt, 2):
        assert found < 1e-9 < 1e-2 < moved
        assert "is invalid for input of size" in message  # without that line
        assert "In 'transformer.h.0.attn' (CausalSelfAttention), with tensor=2." in message
        assert "parallel.tensor.plan: Between a 'colwise' and a 'rowwise' layer" in message
