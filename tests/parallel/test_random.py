"""Forks of the random numbers: what differs between the ranks of a tensor group, what stays in step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from halfmesh.parallel import random
from halfmesh.parallel.random import CommonRandom, RandomFork

CPU = torch.device("cpu")


def draws(rank: int, inside: int = 4, forks: int = 3) -> list[torch.Tensor]:
    """Outside, inside, outside, ..., as rank `rank` of a tensor group draws."""
    torch.manual_seed(7)
    fork = RandomFork(rank, CPU)
    found = [torch.rand(4)]
    for _ in range(forks):
        fork.open()
        found.append(torch.rand(inside)[:4])
        fork.close()
        found.append(torch.rand(4))
    return found


def test_ranks_agree_outside_and_differ_inside():
    ranks = [draws(rank) for rank in range(4)]
    for found in ranks[1:]:
        same = [torch.equal(a, b) for a, b in zip(found, ranks[0], strict=True)]
        assert same == [True, False, True, False, True, False, True]
    assert len(torch.stack([draw for found in ranks for draw in found[1::2]]).unique(dim=0)) == 4 * 3
    assert len(torch.stack([draw for found in ranks for draw in found[::2]]).unique(dim=0)) == 4


def test_ranks_stay_in_step_whatever_is_drawn_inside():
    for few, many in zip(draws(0, inside=4)[::2], draws(1, inside=1001)[::2], strict=True):
        assert torch.equal(few, many)


def test_forks_do_not_depend_on_what_was_drawn_in_others():
    assert torch.equal(draws(1, inside=4)[3], draws(1, inside=77)[3])


def test_open_and_close_count_once():
    torch.manual_seed(7)
    fork = RandomFork(1, CPU)
    fork.close()
    assert not fork.is_open
    begin = torch.get_rng_state()
    fork.open()
    inside = torch.get_rng_state()
    fork.open()
    assert torch.equal(torch.get_rng_state(), inside), "a second open does not draw"
    assert fork.is_open
    fork.close()
    fork.close()
    assert not fork.is_open
    after = torch.rand(3)
    torch.set_rng_state(begin)
    torch.randint(2**62, ())
    assert torch.equal(torch.rand(3), after)


def test_a_seed_of_the_users_ends_a_fork():
    fork = RandomFork(0, CPU)
    fork.open()
    torch.manual_seed(3)
    assert not fork.is_open
    expected = torch.rand(2)
    torch.manual_seed(3)
    fork.close()
    assert torch.equal(torch.rand(2), expected)


def test_no_end_of_forks_is_remembered():
    fork = RandomFork(0, CPU)
    for _ in range(random._REMEMBERED + 10):
        fork.open()
        fork.close()
    assert len(fork._outside) == random._REMEMBERED


# A forward of dropouts, in and out of forks. Checkpointing any stretch of it has to give the same masks again.
STEPS = ("drop", "open", "drop", "drop", "close", "drop", "open", "drop", "close", "drop")
STRETCHES = list(combinations(range(len(STEPS) + 1), 2))


def through(x: torch.Tensor, fork: RandomFork, begin: int, end: int) -> torch.Tensor:
    for step in STEPS[begin:end]:
        if step == "drop":
            x = nn.functional.dropout(x * 1.5, 0.5)
        else:
            getattr(fork, step)()
    return x


def grad(run: Callable[[torch.Tensor, RandomFork], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of `run`, and what is drawn after backward."""
    torch.manual_seed(7)
    fork = RandomFork(1, CPU)
    x = torch.ones(400, requires_grad=True)
    run(x, fork).sum().backward()
    assert x.grad is not None
    assert not fork.is_open
    after = torch.rand(3)
    again = through(torch.ones(400), fork, 0, len(STEPS))  # the next forward
    return torch.cat([x.grad, again.detach()]), after


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "early stop off"])
def test_checkpointing_any_stretch_repeats_the_forks(how):
    expected, after = grad(lambda x, fork: through(x, fork, 0, len(STEPS)))
    assert 0 < (expected[:400] == 0).float().mean() < 1

    for begin, end in STRETCHES:

        def run(x: torch.Tensor, fork: RandomFork, begin: int = begin, end: int = end) -> torch.Tensor:
            x = through(x, fork, 0, begin)
            with set_checkpoint_early_stop(how != "early stop off"):
                x = checkpoint(through, x, fork, begin, end, use_reentrant=how == "reentrant")
            return through(x, fork, end, len(STEPS))

        got, got_after = grad(run)
        assert torch.equal(got, expected), (begin, end)
        assert torch.equal(got_after, after), (begin, end)


def test_checkpoints_one_after_the_other():
    """A stretch that ends within a fork leaves nothing behind for those that are repeated after it."""
    expected, _ = grad(lambda x, fork: through(x, fork, 0, len(STEPS)))

    def run(x: torch.Tensor, fork: RandomFork) -> torch.Tensor:
        for begin, end in ((0, 3), (3, 5), (5, 8), (8, 10)):
            x = checkpoint(through, x, fork, begin, end, use_reentrant=False)
        return x

    assert torch.equal(grad(run)[0], expected)


def test_the_model_draws_from_a_sequence_of_its_own():
    torch.manual_seed(7)
    expected = torch.rand(4)
    ranks = []
    for rank in range(2):
        torch.manual_seed(rank)
        common, model = CommonRandom(5, CPU), nn.Identity()
        drawn = []
        for _ in range(2):
            torch.rand(rank)  # one of the ranks draws more
            state = torch.get_rng_state()
            common.enter(model)
            common.enter(model)  # a model that calls itself
            drawn.append(torch.rand(4))
            common.leave()
            common.leave()
            assert torch.equal(torch.get_rng_state(), state), "outside as if the model had drawn nothing"
        ranks.append(drawn)
        common.enter(model.eval())
        assert torch.equal(torch.get_rng_state(), state), "evaluation draws from what is outside"
        common.leave()
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(*ranks, strict=True))
    assert not torch.equal(*ranks[0])
    torch.manual_seed(7)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), ranks[0][0]), "the seed it was given"


class Philox:
    """A CUDA generator, as far as a fork uses it."""

    def __init__(self) -> None:
        self.seed, self.offset = 1024, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def manual_seed(self, seed: int) -> None:
        assert 0 <= seed < 2**64
        self.seed, self.offset = seed, 0

    def draw(self, count: int = 4) -> tuple[int, int]:
        self.offset += count
        return self.seed, self.offset - count


def philox_draws(rank: int, monkeypatch, inside: int = 4) -> list[tuple[int, int]]:
    generator = Philox()
    monkeypatch.setattr(random, "_cuda_generator", lambda device: generator)
    fork = RandomFork(rank, torch.device("cuda", 0))
    found = [generator.draw()]
    for _ in range(3):
        for part in (fork.open, fork.open):
            part()
        assert fork.is_open
        found.append(generator.draw(inside))
        for part in (fork.close, fork.close):
            part()
        assert not fork.is_open
    return [*found, generator.draw()]


def test_the_counter_of_a_gpu(monkeypatch):
    ranks = [philox_draws(rank, monkeypatch, inside=4 * (rank + 1)) for rank in range(8)]
    assert {(found[0], found[-1]) for found in ranks} == {((1024, 0), (1024, 4 + 3 * 4))}, "in step outside"
    inside = {seed for found in ranks for seed, _ in found[1:-1]}
    assert len(inside) == 8 * 3, "a seed for each fork and rank"
    assert {offset for found in ranks for _, offset in found[1:-1]} == {0}


@pytest.mark.parametrize("seed", [0, 1, 2**62, 2**63 + 5, 2**64 - 1])
def test_any_seed_will_do(seed):
    torch.manual_seed(seed)
    fork = RandomFork(7, CPU)
    fork.open()
    assert fork.is_open
    fork.close()
    assert torch.initial_seed() == seed
