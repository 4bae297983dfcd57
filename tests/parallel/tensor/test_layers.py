"""Divided layers beside whole ones: outputs, updates, dtypes, and inputs that they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import MODES, make_engine
from tests.support.ranks import here, ranks_on, run_ranks
from tests.support.tensor_parity import apart, divide, parity, random, refusal

pytestmark = pytest.mark.distributed

WORDS = 12
WRONG_WORDS = (-1, WORDS, -WORDS) if ranks_on() == "gloo-cpu" else ()  # a GPU ends the process
MLP_PLAN = {"2": "colwise", "4": "rowwise"}
WORDS_PLAN = {"words": "vocab", "head": "vocab"}


def mlp(bias: bool = True, frozen: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    linear = [nn.Linear(4, 6, bias), nn.Linear(6, 8, bias), nn.Linear(8, 6, bias)]
    for layer in linear[1:] if frozen else ():
        getattr(layer, frozen).requires_grad_(False)
    return nn.Sequential(linear[0], nn.GELU(), linear[1], nn.Tanh(), linear[2])


class Language(nn.Module):
    """Words in, words out; one weight for both if `tied`."""

    def __init__(self, tied: bool = True, padding_idx: int | None = None, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 6, padding_idx=padding_idx)
        self.head = nn.Linear(6, WORDS, bias=bias)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).tanh())


class Renamed(nn.Linear):
    """Computes what nn.Linear does."""


class Attention(nn.Module):
    """Heads that are counted, three projections in one weight, a norm over each head."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.fast = 4, True
        self.qkv, self.q_norm, self.proj = nn.Linear(8, 24, bias), nn.LayerNorm(2), Renamed(8, 8, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 2)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), k, v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(heads.transpose(1, 2).flatten(2))


ATTENTION_PLAN = {"q_norm": "partial", "qkv": "fused_colwise(3)", "proj": "rowwise"}
ATTENTION_PLAN |= {"": "heads(num_heads)", "*": "off(fast, not_there)"}


class Sinks(nn.Module):
    """A parameter with an entry for each head, words by their features, and keys that all heads use as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.keys = nn.Embedding(WORDS, 8), nn.Linear(8, 6)
        self.heads, self.out, self.sinks = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        latent, rotary = self.keys(self.words(ids)).split([4, 2], -1)
        heads = self.heads(latent).unflatten(-1, (-1, 2)) * rotary.unsqueeze(-2)
        return self.out((heads * self.sinks.unsqueeze(-1)).flatten(-2))


SINKS_PLAN = {"words": "embedding_gather", "keys": "latent_keys(2)", "": "rows(sinks)"}
SINKS_PLAN |= {"heads": "colwise", "out": "rowwise"}


class Projections(nn.Module):
    """Three layers on one input, perhaps computed again in backward."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.out = nn.Linear(4, 4), nn.Linear(8, 4)
        self.q, self.k, self.v = (nn.Linear(4, 8) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.out(self._run(self.q, x) * self._run(self.k, x).sigmoid() + self._run(self.v, x))

    def _run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)


PROJECTIONS_PLAN = {"[qkv]": "colwise", "out": "rowwise"}


class Edited(nn.Module):
    """Changes its input in place between two layers that use it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leaf, self.out = nn.Linear(4, 4), nn.Linear(8, 4)
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.first.weight.requires_grad_(False)  # else torch refuses: its input is needed for the weight's gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.leaf(x)
        y = self.first(x)
        x.mul_(2.0).add_(1.0)
        return self.out(y + self.second(x))


class Layer(nn.Module):
    """A layer between divided sequences. `named`: it passes activations by name."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.norm, self.drop, self.named = nn.LayerNorm(4), nn.Dropout(0.0), named
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.drop(self.mlp(input=normed) if self.named else self.mlp(normed))


def sequence_model(named: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(Layer(named), Layer(named))
    return nn.Sequential(nn.Linear(4, 4), layers, nn.LayerNorm(4), nn.Linear(4, 2))


SEQUENCE_PLAN = {"1.0": "sequence_begin", "1.*.norm": "sequence", "1.*.drop": "sequence", "2": "sequence_end"}
SEQUENCE_PLAN |= {"1.*.mlp": "region(input)", "1.*.mlp.0": "colwise", "1.*.mlp.2": "rowwise"}


def pairs() -> Iterator[tuple[str, nn.Module, torch.Tensor, dict[str, str], bool]]:
    """Models for two ranks: name, model, input, plan, and whether the sequence is divided, too."""
    for shape in ((4,), (3, 4), (2, 3, 4), (0, 4)):
        yield f"shape {shape}", mlp(), random(*shape), MLP_PLAN, False
    yield "transposed", mlp(), random(4, 3, 2).permute(2, 1, 0), MLP_PLAN, False
    gathered = {"0": "colwise_gather", "2": "rowwise_split", "4": "colwise_gather"}
    for bias in (True, False):
        yield f"bias {bias}", mlp(bias), random(3, 4), MLP_PLAN, False
        yield f"gathered, bias {bias}", mlp(bias), random(2, 3, 4), gathered, False
        yield f"attention, bias {bias}", Attention(bias), random(2, 3, 8), ATTENTION_PLAN, False
    for frozen in ("weight", "bias"):
        yield f"frozen {frozen}", mlp(frozen=frozen), random(3, 4), MLP_PLAN, False
    for reentrant in (None, True, False):
        yield f"shared input, {reentrant}", Projections(reentrant), random(3, 4), PROJECTIONS_PLAN, False
    ids = here(torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(0)))
    yield "sinks, latent keys, words by features", Sinks(), ids, SINKS_PLAN, False
    yield "edited", Edited(), random(3, 4), {"first": "colwise", "second": "colwise", "out": "rowwise"}, False
    for named in (True, False):
        yield f"sequence, named {named}", sequence_model(named), random(2, 6, 4), SEQUENCE_PLAN, True


def trios() -> Iterator[tuple[str, nn.Module, torch.Tensor, dict[str, str], bool]]:
    """Models for three ranks."""
    ids = here(torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(0)))
    for tied in (True, False):
        for padding in (None, 0, 5, WORDS - 1, -1):
            for bias in (True, False):
                yield f"{tied} {padding} {bias}", Language(tied, padding, bias), ids, WORDS_PLAN, False
    for shape in ((), (0,), (2, 2, 2)):
        yield f"shape {shape}", Language(), here(torch.full(shape, 7, dtype=torch.int32)), WORDS_PLAN, False


def all_parities(rank: int, world_size: int, models: Callable[[], Iterator[tuple[Any, ...]]]) -> dict[str, float]:
    found = {}
    for name, model, x, plan, sequence in models():
        found[name] = parity(model.double(), lambda m, x=x: m(x), plan, sequence)
    return found


@pytest.mark.parametrize(("models", "size"), [(pairs, 2), (trios, 3)])
def test_outputs_and_updates_are_those_of_whole_layers(models, size):
    for found in run_ranks(all_parities, size, models):
        assert len(found) == len(list(models()))
        assert max(found.values()) < 1e-14, found


def dtypes(rank: int, world_size: int) -> dict[str, tuple[bool, float]]:
    """Whether the output has the dtype of a whole model's, and how far it is from that."""
    cases: dict[str, tuple[Callable[[], nn.Module], dict[str, str], torch.Tensor]] = {
        "mlp": (mlp, MLP_PLAN, random(3, 4, dtype=torch.float32)),
        "gather": (mlp, {"2": "colwise_gather"}, random(3, 4, dtype=torch.float32)),
        "split": (mlp, {"2": "rowwise_split"}, random(3, 4, dtype=torch.float32)),
        "words": (lambda: nn.Sequential(nn.Embedding(WORDS, 4)), {"0": "vocab"}, here(torch.arange(WORDS))),
    }
    found = {}
    for mode in ("torch_fp16", "torch_bf16", "naive_fp16", "naive_bf16"):
        for name, (make, plan, x) in cases.items():
            torch.manual_seed(0)
            expected = make_engine(MODES[mode], model=make())(x)
            torch.manual_seed(0)
            output = divide(make(), plan, **MODES[mode])(x)
            found[f"{mode} {name}"] = output.dtype == expected.dtype, apart(output.float(), expected.float())
    return found


def test_dtypes_are_those_of_the_whole_model():
    for found in run_ranks(dtypes, 2):
        for case, (same_dtype, difference) in found.items():
            assert same_dtype, case
            assert difference <= (0 if "words" in case else 0.02), case


def sums(call: Callable[[], Any]) -> int:
    """How many all-reduces `call` starts."""
    with pytest.MonkeyPatch.context() as patch:
        calls, plain = [], dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs))
        call()
    return len(calls)


def shared_inputs(rank: int, world_size: int) -> list[int]:
    engine, x = divide(Projections().double(), PROJECTIONS_PLAN), random(3, 4)
    outputs: list[torch.Tensor] = []
    engine.backward(engine(x).sum())  # the first tries the plan out, too
    counts = [sums(lambda: outputs.append(engine(x))), sums(lambda: engine.backward(outputs[0].sum()))]
    both = engine(x) + engine(x)
    counts.append(sums(lambda: engine.backward(both.sum())))
    engine.model.before.requires_grad_(False)
    frozen_below = engine(x)
    return [*counts, sums(lambda: engine.backward(frozen_below.sum()))]


def test_layers_that_share_an_input_share_one_sum():
    assert run_ranks(shared_inputs, 2) == [[1, 1, 2, 0]] * 2


def wrong_inputs(rank: int, world_size: int) -> dict[str, str]:
    x, found = random(3, 4, dtype=torch.float32), {}
    found["whole features"] = refusal(lambda: divide(mlp(), {"4": "rowwise"})(x))
    found["sequence"] = refusal(lambda: divide(sequence_model(), SEQUENCE_PLAN, True)(random(2, 5, 4).float()))
    plan = {name: style for name, style in SEQUENCE_PLAN.items() if name != "1.*.norm"}
    engine = divide(sequence_model(), plan, True)
    output = engine(random(2, 6, 4).float())
    found["norms"] = refusal(lambda: engine.backward(output.square().sum()))
    for bad in WRONG_WORDS:
        engine = divide(Language(), WORDS_PLAN)
        found[f"word {bad}"] = refusal(lambda e=engine, bad=bad: e(here(torch.tensor([[1, bad]]))))
    x.requires_grad_()
    outer = divide(mlp(), MLP_PLAN)(x)
    (grad,) = torch.autograd.grad(outer.square().sum(), x, create_graph=True)
    found["a gradient of a gradient"] = refusal(lambda: grad.sum().backward())
    return found


def test_inputs_that_cannot_be_right_are_refused_on_every_rank():
    words = {
        "whole features": "takes this rank's 4 features, but its input has 8; give the layer before it the style",
        "sequence": "needs a sequence length that tensor=2 divides, and this one is 5; pad it to 6",
        "norms": "the gradients of 1.0.norm.weight, 1.0.norm.bias, 1.1.norm.weight, 1.1.norm.bias",
        **{f"word {bad}": "IndexError: index out of range in self" for bad in WRONG_WORDS},
        "a gradient of a gradient": "marked with @once_differentiable",
    }
    for found in run_ranks(wrong_inputs, 2):
        assert found.keys() == words.keys()
        for case, message in found.items():
            assert words[case] in message, case
