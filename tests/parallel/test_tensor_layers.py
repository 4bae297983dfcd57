"""Each divided layer beside the whole one: outputs, dtypes, gradients, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfmesh.parallel import collectives
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import divide, join_grads, parity, random, refusal

pytestmark = pytest.mark.distributed

WORDS = 12


def mlp(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias), nn.GELU(), nn.Linear(6, 8, bias), nn.Tanh(), nn.Linear(8, 6, bias))


MLP_PLAN = {"2": "colwise", "4": "rowwise"}
SHAPES = ((4,), (3, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4))


def linear_layers(rank: int, world_size: int) -> dict:
    found = {}
    for bias in (True, False):
        for shape in SHAPES:
            found[bias, shape] = parity(mlp(bias).double(), lambda m, shape=shape: m(random(*shape)), MLP_PLAN)
        gathered = {"0": "colwise_gather", "2": "rowwise_split", "4": "colwise_gather"}
        found[bias, "gather"] = parity(mlp(bias).double(), lambda m: m(random(2, 3, 4)), gathered)
    for frozen in ("weight", "bias"):
        model = mlp().double()
        for layer in model[2], model[4]:
            getattr(layer, frozen).requires_grad_(False)
        found[frozen] = parity(model, lambda m: m(random(3, 4)), MLP_PLAN)
    return found


def test_linear_layers():
    for found in run_ranks(linear_layers, 2):
        for cell, result in found.items():
            assert max(result.output, result.grads) < 1e-14, cell
            assert result.missing == [], cell


def misfits(rank: int, world_size: int) -> list[str]:
    model, split = mlp(), mlp()
    divide(model, {"4": "rowwise"})
    divide(split, {"2": "rowwise_split"})
    return [refusal(lambda: model(random(3, 4, dtype=torch.float32))), refusal(lambda: split[2](torch.ones(3, 8)))]


def test_whole_features_are_refused_where_parts_are_awaited():
    for first, second in run_ranks(misfits, 2):
        assert first == (
            "InputError: a 'rowwise' layer takes this rank's 4 features, but 8 came; give the layer before it the "
            "style 'colwise', or this one 'rowwise_split' if its input is whole"
        )
        assert second.startswith("InputError: a 'rowwise' layer takes this rank's 3 features, but 4 came; ")


def dtypes(rank: int, world_size: int) -> dict:
    """(output dtype, how far from the whole model's), in half precision of every kind."""
    found = {}
    x, ids = random(3, 4, dtype=torch.float32), torch.arange(WORDS)
    for dtype in (torch.float16, torch.bfloat16):
        for name, plan in (("mlp", MLP_PLAN), ("gather", {"2": "colwise_gather"}), ("split", {"2": "rowwise_split"})):
            with torch.autocast("cpu", dtype):
                expected = mlp()(x)
                model = mlp()
                divide(model, plan)
                found["autocast", dtype, name] = (model(x).dtype, expected.dtype, _apart(model(x), expected))
            model, whole = mlp().to(dtype), mlp().to(dtype)
            divide(model, plan)
            found["cast", dtype, name] = (
                model(x.to(dtype)).dtype,
                dtype,
                _apart(model(x.to(dtype)), whole(x.to(dtype))),
            )
        for cast in (False, True):
            torch.manual_seed(0)
            embedding = nn.Sequential(nn.Embedding(WORDS, 4)).to(dtype if cast else torch.float32)
            with torch.autocast("cpu", dtype, enabled=not cast):
                expected = embedding(ids)
                divide(embedding, {"0": "vocab"})
                found["words", dtype, cast] = (embedding(ids).dtype, expected.dtype, _apart(embedding(ids), expected))
    return found


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def test_dtypes_are_those_of_the_whole_model():
    for found in run_ranks(dtypes, 2):
        for cell, (dtype, expected, apart) in found.items():
            assert dtype == expected, cell
            assert apart <= (0 if cell[0] == "words" else 0.02), cell


class Language(nn.Module):
    """Words in, words out; one weight for both if `tied`."""

    def __init__(self, tied: bool = True, padding_idx: int | None = None, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 6, padding_idx=padding_idx)
        self.head = nn.Linear(6, WORDS, bias=bias)
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).tanh())


WORDS_PLAN = {"words": "vocab", "head": "vocab"}


def words(rank: int, world_size: int) -> dict:
    found: dict = {"parity": {}}
    ids = torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(0))
    for tied in (True, False):
        for padding in (None, 0, 5, WORDS - 1, -1):
            for bias in (True, False):
                cell = parity(Language(tied, padding, bias), lambda m: m(ids), WORDS_PLAN)
                found["parity"][tied, padding, bias] = cell
    for kind in (torch.int32, torch.int64):
        for shape in ((), (1,), (0,), (2, 2, 2)):
            few = torch.full(shape, 7, dtype=kind)
            model = Language()
            expected = model(few)
            divide(model, WORDS_PLAN)
            found[kind, shape] = bool(torch.allclose(model(few), expected))
    model = Language(tied=False, padding_idx=7)
    tensor = divide(model, WORDS_PLAN)
    model(torch.full((4,), 7)).sum().backward()
    found["padding grad"] = join_grads(model, tensor)["words.weight"][7].abs().sum().item()
    for bad in (-1, WORDS, WORDS + 100, -WORDS):
        found["bad", bad] = refusal(lambda bad=bad: model(torch.tensor([[1, bad]])))
    found["fine"] = tuple(model(ids).shape)
    return found


def test_words():
    for found in run_ranks(words, 3):
        for cell, result in found.pop("parity").items():
            assert max(result.output, result.grads) < 1e-14, cell
            assert result.missing == [], cell
        assert found.pop("padding grad") == 0
        assert found.pop("fine") == (3, 5, WORDS)
        bad = [found.pop(key) for key in list(found) if key[0] == "bad"]
        assert bad == ["IndexError: index out of range in self"] * 4, "on every rank, as in one process"
        assert all(found.values()), found


def local_sizes(rank: int, world_size: int) -> list[str]:
    model, language = mlp(), Language()
    divide(model, MLP_PLAN)
    divide(language, WORDS_PLAN)
    return [*(str(model[i]) for i in (0, 2, 4)), str(language.words), str(language.head)]


def test_a_layer_shows_what_this_rank_has():
    assert run_ranks(local_sizes, 2)[1] == [
        "Linear(in_features=4, out_features=6, bias=True)",
        "ColwiseLinear(in_features=6, out_features=4, bias=True)",
        "RowwiseLinear(in_features=4, out_features=6, bias=True)",
        "VocabEmbedding(6, 6)",
        "ColwiseLinear(in_features=6, out_features=6, bias=False)",
    ]


def forks(rank: int, world_size: int) -> list[bool]:
    """Whether a fork is open: after `colwise`, after `rowwise`, in evaluation, and after an error between them."""
    model = mlp()
    tensor = divide(model, MLP_PLAN)
    seen: list[bool] = []
    for layer in (model[3], model[4]):
        layer.register_forward_hook(lambda *_: seen.append(tensor.axis.fork.is_open))
    x = random(3, 4, dtype=torch.float32)
    model(x)
    model.eval()(x)
    model.train()

    def fail(*_: object) -> None:
        assert tensor.axis.fork.is_open
        raise RuntimeError("in the middle")

    handle = model[3].register_forward_hook(fail)
    message = refusal(lambda: model(x))
    handle.remove()
    seen += [message == "RuntimeError: in the middle", not tensor.axis.fork.is_open, tensor.axis._copied is None]
    gathering = mlp()
    other = divide(gathering, {"0": "colwise_gather"})
    gathering[0].register_forward_hook(lambda *_: seen.append(not other.axis.fork.is_open))
    gathering(x)
    return seen


def test_where_random_numbers_part():
    after = [True, False, False, False, True]  # the last one: the hook before the one that fails
    assert run_ranks(forks, 2) == [[*after, True, True, True, True]] * 2


def region(rank: int, world_size: int) -> float:
    """In a region the layers leave the sequence to what is around them."""
    torch.manual_seed(0)
    model, x = mlp().double(), random(2, 4, 4)
    expected = model(x)
    tensor = divide(model, MLP_PLAN)
    for layer in (model[2], model[4]):
        layer.in_region = True
    part = x  # whole in, divided out
    for layer in model:
        part = layer(part)
    assert part.shape == (2, 2, 6)
    return (collectives.gather(part, 1, tensor.axis.group) - expected).abs().max().item()


def test_within_a_region_the_output_is_divided_along_the_sequence():
    assert max(run_ranks(region, 2)) < 1e-15
