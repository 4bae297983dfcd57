"""Logits that stay sharded over the vocabulary: their cross entropy, and what else is allowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from halfmesh.parallel.tensor.logits import ShardedLogits, _keeps_last_dim
from halfmesh.utils.torch_private import ALL_GATHER
from tests.parity.test_tensor import SHARDED_LOGITS, WORDS, Language
from tests.support.ranks import here, ranks_on, run_ranks
from tests.support.tensor_parity import apart, divide, random, rejection

pytestmark = pytest.mark.distributed

TOKENS, TRAINED = 10, 12


def logits(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ShardedLogits]:
    """All logits, and this rank's shard of the same ones."""
    whole = (4 * random(*shape, WORDS)).to(dtype)
    shard = whole.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone()
    return whole.requires_grad_(), ShardedLogits.of(shard.requires_grad_(), dist.group.WORLD)


def targets(*shape: int, ignored: int = -100) -> torch.Tensor:
    found = torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(1))
    found.view(-1)[::4] = ignored
    return here(found)


CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.2, "ignore_index": 3},
}
SHAPES: dict[str, Callable[[Any, torch.Tensor], tuple[Any, torch.Tensor]]] = {
    "view": lambda x, y: (x.view(-1, WORDS), y.view(-1)),
    "size": lambda x, y: (x.view(-1, x.size(-1)), y.view(-1)),
    "flatten": lambda x, y: (x.flatten(0, 1), y.flatten()),
    "shifted": lambda x, y: (x[..., :-1, :].contiguous().view(-1, WORDS), y[..., 1:].reshape(-1)),
    "masked": lambda x, y: (x[y != 3], y[y != 3]),
    "steep": lambda x, y: (x.mul(1000).view(-1, WORDS), y.view(-1)),  # the ranks' sums are far from each other
    "one": lambda x, y: (x[0, 1], y[0, 1]),
    "cast": lambda x, y: (torch.tanh(x / 30).mul(30).float().reshape((-1, WORDS)), y.reshape(-1)),
}


def losses(rank: int, world_size: int) -> dict[str, float]:
    """How far losses and gradients are from those of all logits."""
    found = {}
    for case, options in CASES.items():
        for shape, prepare in SHAPES.items():
            whole, mine = logits(2, 5)
            y = targets(2, 5, ignored=options.get("ignore_index", -100))
            expected, loss = (F.cross_entropy(*prepare(x, y), **options) for x in (whole, mine))
            assert type(loss) is torch.Tensor
            for each in (expected, loss):
                (each.square().sum() if each.isfinite().all() else each.sum()).backward()
            grad = whole.grad.chunk(world_size, -1)[rank]
            pairs = (loss, expected), (mine.grad, grad)
            found[f"{case} {shape}"] = max(apart(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in pairs)
    return found


def test_loss_and_gradient_are_those_of_all_logits():
    for found in run_ranks(losses, 2):
        assert len(found) == len(CASES) * len(SHAPES)
        assert all(gap < (1e-5 if "cast" in case else 1e-13) for case, gap in found.items()), found


def in_bf16(rank: int, world_size: int) -> tuple[torch.dtype, float, torch.dtype]:
    whole, mine = logits(TOKENS, dtype=torch.bfloat16)
    y = targets(TOKENS)
    loss = F.cross_entropy(mine, y)
    loss.backward()
    return loss.dtype, abs(float(loss - F.cross_entropy(whole.double(), y))), mine.grad.dtype


def test_bf16_logits_are_summed_in_fp32():
    for dtype, difference, of_grad in run_ranks(in_bf16, 2):
        assert (dtype, of_grad) == (torch.float32, torch.bfloat16)
        assert difference < 1e-6


def rejections(rank: int, world_size: int) -> dict[str, str]:
    _, x = logits(TOKENS)
    y, cube = targets(TOKENS), logits(2, 5)[1]
    calls: dict[str, Callable[[], Any]] = {
        "argmax()": lambda: x.argmax(-1),
        "softmax()": lambda: x.softmax(-1),
        "log_softmax()": lambda: F.log_softmax(x, -1),
        "nll_loss()": lambda: F.nll_loss(x, y),
        "mse_loss()": lambda: F.mse_loss(torch.zeros(TOKENS, WORDS), x),
        "mul()": lambda: x * x,
        "sub()": lambda: x - 1,
        "cpu()": lambda: x.cpu(),
        "__get__()": lambda: x.T,
        "view()": lambda: x.view(-1),
        "reshape()": lambda: x.reshape(WORDS, TOKENS),
        "flatten()": lambda: x.flatten(),
        "__getitem__()": lambda: x[:, 0],
        "takes no weight": lambda: F.cross_entropy(x, y, weight=torch.ones(WORDS)),
        "takes no reduce": lambda: F.cross_entropy(x, y, reduce=False),
        "takes [tokens, vocabulary]": lambda: F.cross_entropy(cube.view(2, 5, WORDS), y.view(2, 5)),
        "class indices": lambda: F.cross_entropy(x, torch.zeros(TOKENS, WORDS)),
        "[10, 12] and [9]": lambda: F.cross_entropy(x, y[1:]),
    }
    found = {words: rejection(call) for words, call in calls.items()}
    if ranks_on() == "gloo-cpu":  # a GPU ends the process
        found["out of bounds"] = rejection(lambda: F.cross_entropy(x, torch.full((TOKENS,), WORDS)))
    return found


@pytest.mark.promise("a vocabulary larger than the hidden states")
def test_what_reads_all_logits_is_rejected():
    for found in run_ranks(rejections, 2):
        for words, message in found.items():
            assert words in message, message
            assert message.startswith("RuntimeError" if words == "out of bounds" else "InputError"), message


def test_what_an_index_leaves_of_the_vocabulary_is_known():
    x, mask, some = torch.arange(24).view(2, 3, 4), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 1])
    full = slice(None)
    kept = [0, (0, 1), ..., (..., full), slice(1), (full, 1), (some, some), mask, (0, None), None]
    kept += [(full, slice(1), full), (0, ...), (0, 1, ...), (mask, full), (some, full, full)]
    lost = [(0, 0, 0), (..., 0), (..., slice(1)), (..., None), (0, 0, slice(1)), (mask, 0), (0, 0, full, None)]
    lost += [(0, 0, 0, ...), (some, some, some), x > 3]
    assert [index for index in kept if not _keeps_last_dim(index, 3)] == []
    assert [index for index in lost if _keeps_last_dim(index, 3)] == []
    assert all(x[index].shape[-1] == 4 for index in kept)


def evaluated(rank: int, world_size: int) -> list[tuple[type, float]]:
    ids, model = here(torch.arange(WORDS).view(2, 6)), Language()
    expected = here(copy.deepcopy(model))(ids)
    engine = divide(model, SHARDED_LOGITS)
    trained = engine(ids)
    found = [(type(trained), apart(trained.full_tensor(), expected))]
    with torch.no_grad():
        found.append((type(engine(ids)), apart(engine(ids), expected)))
    engine.eval()
    return [*found, (type(engine(ids)), apart(engine(ids), expected))]


def test_they_are_gathered_in_evaluation_and_where_asked():
    for found in run_ranks(evaluated, 2):
        assert [kind for kind, _ in found] == [ShardedLogits, torch.Tensor, torch.Tensor]
        assert max(gap for _, gap in found) < 1e-6


def traffic(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """For each style of the head: the bytes sent from the head's output to its gradient, and those that autograd keeps
    there."""
    found, ids, y = {}, here(torch.arange(TRAINED).view(2, -1) % WORDS), targets(TRAINED)
    for style in ("vocab", "vocab_parallel"):
        engine = divide(Language(), {"words": "vocab", "head": style})
        engine.backward(F.cross_entropy(engine(ids).view(-1, WORDS), y))
        engine.step()
        sent, kept = [], {}

        def count(tensor: torch.Tensor, *args: Any, inner: Any, sent: list[int] = sent, **options: Any) -> Any:
            sent.append(tensor.nbytes)
            return inner(tensor, *args, **options)

        def pack(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        features = engine.model.words(ids).tanh().detach()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", ALL_GATHER):
                patch.setattr(dist, name, partial(count, inner=getattr(dist, name)))
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = F.cross_entropy(engine.model.head(features).view(-1, WORDS), y)
            loss.backward()
        for known in (engine.model.head.weight, features, y):
            kept.pop(known.untyped_storage().data_ptr(), None)
        found[style] = sum(sent), sum(kept.values())
    return found


def test_three_numbers_of_a_token_are_sent_and_a_shard_is_kept():
    fp32 = 4
    for found in run_ranks(traffic, 2):
        assert found["vocab"][0] == TRAINED * WORDS * fp32
        assert found["vocab_parallel"][0] == TRAINED * 3 * fp32
        of_token = WORDS // 2 * fp32 + fp32 + 8 + 1 + 1  # logits, log-sum, index, elsewhere, ignored
        assert found["vocab_parallel"][1] == TRAINED * of_token + 8  # and the number of targets
        assert found["vocab"][1] >= TRAINED * WORDS * fp32
