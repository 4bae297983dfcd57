"""Logits that stay sharded over the vocabulary: their cross entropy, and what else is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from halfmesh.parallel.tensor.logits import ShardedLogits, _keeps_last_dim
from halfmesh.utils.torch_private import ALL_GATHER
from tests.parity.test_tensor import WORDS, Language
from tests.support.ranks import here, run_ranks
from tests.support.saved_memory import bytes_left
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
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.2, "ignore_index": 3},
}
SHAPES: dict[str, Callable[[Any, torch.Tensor], tuple[Any, torch.Tensor]]] = {
    "size": lambda x, y: (x.view(-1, x.size(-1)), y.view(-1)),
    "shifted": lambda x, y: (x[..., :-1, :].contiguous().view(-1, WORDS), y[..., 1:].reshape(-1)),
    "masked": lambda x, y: (x[y != 3], y[y != 3]),
    "steep": lambda x, y: (x.mul(1000).view(-1, WORDS), y.view(-1)),  # the ranks' sums are far from each other
    "one": lambda x, y: (x[0, 1], y[0, 1]),
    "cast": lambda x, y: (torch.tanh(x / 30).mul(30).float().reshape((-1, WORDS)), y.reshape(-1)),
}


def losses(rank: int, world_size: int) -> dict[str, float]:
    """How far losses and gradients are from those of all logits; of bf16 logits they are computed in fp32."""
    whole, mine = logits(TOKENS, dtype=torch.bfloat16)
    loss = F.cross_entropy(mine, targets(TOKENS))
    assert loss.dtype == torch.float32
    found = {"cast from bf16": abs(float(loss - F.cross_entropy(whole.double(), targets(TOKENS))))}
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
        assert len(found) == len(CASES) * len(SHAPES) + 1
        assert all(gap < (1e-5 if "cast" in case else 1e-13) for case, gap in found.items()), found


def rejections(rank: int, world_size: int) -> dict[str, str]:
    _, x = logits(TOKENS)
    y, cube = targets(TOKENS), logits(2, 5)[1]
    calls: dict[str, Callable[[], Any]] = {
        "log_softmax()": lambda: F.log_softmax(x, -1),
        "mse_loss()": lambda: F.mse_loss(torch.zeros(TOKENS, WORDS), x),
        "mul()": lambda: x * x,
        "__get__()": lambda: x.T,
        "view()": lambda: x.view(-1),
        "__getitem__()": lambda: x[:, 0],
        "takes no weight": lambda: F.cross_entropy(x, y, weight=torch.ones(WORDS)),
        "takes [tokens, vocabulary]": lambda: F.cross_entropy(cube.view(2, 5, WORDS), y.view(2, 5)),
        "(torch.float32)": lambda: F.cross_entropy(x, torch.zeros(TOKENS, WORDS)),
        "[10, 12] and [9]": lambda: F.cross_entropy(x, y[1:]),
    }
    return {words: rejection(call) for words, call in calls.items()}


@pytest.mark.promise("a vocabulary larger than the hidden states")
def test_what_reads_all_logits_is_rejected():
    for found in run_ranks(rejections, 2):
        for words, message in found.items():
            assert words in message, message
            assert message.startswith("InputError"), message


def test_what_an_index_leaves_of_the_vocabulary_is_known():
    x, mask, some = torch.arange(24).view(2, 3, 4), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 1])
    full = slice(None)
    kept = [0, (0, 1), ..., (..., full), (some, some), mask, None, (full, slice(1), full), (0, ...), (mask, full)]
    lost = [(0, 0, 0), (..., 0), (..., slice(1)), (..., None), (0, 0, slice(1)), (mask, 0), (0, 0, 0, ...), x > 3]
    assert [index for index in kept if not _keeps_last_dim(index, 3)] == []
    assert [index for index in lost if _keeps_last_dim(index, 3)] == []
    assert all(x[index].shape[-1] == 4 for index in kept)


def traffic(rank: int, world_size: int) -> tuple[int, int]:
    """The bytes sent from the head's output to its gradient, and those kept for it."""
    ids, y = here(torch.arange(TRAINED).view(2, -1) % WORDS), targets(TRAINED)
    engine = divide(Language(), {"words": "vocab", "head": "vocab_parallel"})
    engine.backward(F.cross_entropy(engine(ids).view(-1, WORDS), y))  # with the trial
    engine.step()
    features = engine.model.words(ids).tanh().detach()
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums, patch.object(dist, ALL_GATHER) as gathers:
        F.cross_entropy(engine.model.head(features).view(-1, WORDS), y).backward()
    assert not gathers.called
    kept = bytes_left(lambda: F.cross_entropy(engine.model.head(features).view(-1, WORDS), y))
    return sum(call.args[0].nbytes for call in sums.mock_calls), kept


def test_three_numbers_of_a_token_are_sent_and_a_shard_is_kept():
    of_token = WORDS // 2 * 4 + 4 + 8 + 1 + 1  # logits, log-sum, index, elsewhere, ignored
    assert run_ranks(traffic, 2) == [(TRAINED * 3 * 4, TRAINED * of_token + 8)] * 2  # and the number of targets
