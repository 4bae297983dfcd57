"""Several losses, models and optimizers under O0 to O3: each loss its own scale, one verdict for the step."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import halfmesh
from tests.amp.apex_reference import Apex
from tests.amp.apex_runs import (
    CLASSES,
    FEATURES,
    LEVELS,
    assert_same,
    linear,
    make_batches,
    make_pair,
    scaler_states,
    set_scalers,
    skipped,
)

CONFIG = {"fused": False}  # the gradients that the optimizer finds are unscaled
SCALES = (2.0**10, 2.0**13)  # unlike each other: taking the wrong one cannot go unseen
BATCHES = make_batches(3)
WEIGHTS = {"fp16": "first.weight", "fp32": "norm.weight"}  # in O2 the second one stays in fp32


class Part(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))

    def patched(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.last, torch.tanh(self.norm(linear(self.first, x))))


class Parts(nn.Module):
    """Two models, each with a loss of its own, and maybe a third one that both losses use."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.m0, self.m1 = Part(0), Part(1)
        self.both = Part(2) if shared else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._outputs(x, Part.forward)

    def patched(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._outputs(x, Part.patched)

    def _outputs(self, x: torch.Tensor, call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        own = [call(model, x) for model in (self.m0, self.m1)]
        return tuple(own if self.both is None else [out + call(self.both, x) for out in own])


def sgd(model: nn.Module) -> optim.Optimizer:
    """As many groups as models, with rates of their own."""
    groups = [{"params": list(part.parameters()), "lr": 0.1 / 2**i} for i, part in enumerate(model.children())]
    return optim.SGD(groups, momentum=0.5)


def losses_of(outputs: Iterable[torch.Tensor], y: torch.Tensor, criterion: Callable[..., Any]) -> list[torch.Tensor]:
    """The second one is of another size than the first."""
    return [criterion(out, y) * factor for out, factor in zip(outputs, (1.0, 3.0), strict=True)]


def wide_criterion(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), y)


def criterion_of(run: Any) -> Callable[..., torch.Tensor]:
    return run.criterion if isinstance(run, halfmesh.Engine) else wide_criterion


def with_inf(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    grad.view(-1)[0] = math.inf
    return grad


class Accumulating:
    """The reference in cycles of two batches: the verdict on a loss waits for its last backward of the cycle."""

    def __init__(self, reference: Apex, loss_ids: tuple[int, int]) -> None:
        self.reference, self.model = reference, reference.model
        self.verdicts = {loss_id: 2 + which for which, loss_id in enumerate(loss_ids)}  # the last of four backwards
        self.backwards = 0

    def __call__(self, x: torch.Tensor) -> Any:
        return self.reference(x)

    def backward(self, loss: torch.Tensor, loss_id: int) -> None:
        self.reference.backward(loss / 2, loss_id, delay=self.backwards % 4 != self.verdicts[loss_id])
        self.backwards += 1

    def step(self) -> bool | None:
        return None if self.backwards % 4 else self.reference.step()

    @property
    def loss_scales(self) -> tuple[float, ...]:
        return self.reference.loss_scales


@dataclasses.dataclass
class Injection:
    """inf in one element of one gradient, of one backward of one step."""

    step: int
    loss: int
    location: str

    def backward(self, run: Any, step: int, which: int, part: nn.Module, call: Callable) -> None:
        if (step, which) != (self.step, self.loss):
            return call()
        hook = part.get_parameter(WEIGHTS[self.location]).register_hook(with_inf)
        call()
        return hook.remove()


NOTHING = Injection(-1, -1, "fp16")
INJECTIONS = [NOTHING, *(Injection(*at) for at in itertools.product((0, 1), (0, 1), ("fp16", "fp32")))]


def make_runs(
    model: nn.Module,
    optimizer: Callable[[nn.Module], optim.Optimizer],
    opt_level: str,
    num_losses: int = 1,
    **config: Any,
) -> tuple[halfmesh.Engine, Apex]:
    """An engine and the reference, with dynamic scales that are already somewhere."""
    runs = make_pair(model, optimizer, opt_level, CONFIG | config, loss_scale="dynamic", num_losses=num_losses)
    set_scalers(*runs, [(scale, 0) for scale in SCALES[:num_losses]])
    return runs


def run_losses(
    run: Any,
    loss_ids: tuple[int, int],
    injection: Injection = NOTHING,
    zeroes: bool = False,
    batches: Any = BATCHES,
) -> list[tuple[bool, tuple[float, ...]]]:
    """One backward for each of two losses, and a step. Returns for each step whether it was skipped, and the scales."""
    history = []
    for step, (x, y) in enumerate(batches):
        if zeroes:
            run.zero_grad()
        for which, loss in enumerate(losses_of(run(x), y, criterion_of(run))):
            part = (run.model.m0, run.model.m1)[which]

            def backward(loss=loss, which=which):
                run.backward(loss, loss_id=loss_ids[which])

            injection.backward(run, step, which, part, backward)
        result = run.step()
        history.append((skipped(result), run.loss_scales))
    return history


@pytest.mark.promise("APEX's levels and overrides")
@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_two_losses_one_optimizer(opt_level, num_losses):
    """inf in either backward of either of the first two of three steps: one is skipped, and two are made."""
    loss_ids = (0, num_losses - 1)
    for injection in INJECTIONS:
        engine, reference = make_runs(Parts(True), sgd, opt_level, num_losses)
        history = run_losses(engine, loss_ids, injection)
        assert history == run_losses(reference, loss_ids, injection), injection
        assert_same(engine, reference)
        assert [was for was, _ in history] == [step == injection.step for step in range(3)]
        lowered = {loss_ids[injection.loss]} if injection.loss >= 0 else set()
        assert history[-1][1] == tuple(SCALES[i] / (2 if i in lowered else 1) for i in range(num_losses))


@pytest.mark.parametrize(("opt_level", "num_losses"), [("O0", 1), ("O1", 2), ("O2", 1), ("O2", 2), ("O3", 2)])
def test_accumulation_of_both_losses(opt_level, num_losses):
    """Two batches per step, so four backwards; inf in any of them skips the step. zero_grad inside does nothing."""
    loss_ids = (0, num_losses - 1)
    for batch, loss in [(-1, -1), (2, 0), (2, 1), (3, 1)]:
        engine, reference = make_runs(Parts(True), sgd, opt_level, num_losses, gradient_accumulation=2)
        injection, batches = Injection(batch, loss, "fp16"), make_batches(6)
        history = run_losses(engine, loss_ids, injection, True, batches)
        assert history == run_losses(Accumulating(reference, loss_ids), loss_ids, injection, batches=batches)
        assert [was for was, _ in history] == [None, False, None, batch >= 0, None, False]
        # The engine adds up the batches of a cycle as they come, in half precision (delay_unscale does so in apex).
        rounds = opt_level == "O3" or (opt_level == "O2" and num_losses == 1)
        assert_same(engine, reference, *((1e-3, 1e-3) if rounds else ()))


class Weight(nn.Module):
    """One number: its gradients are what the input says, to the last bit in any precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("scales", [(16.0,), (16.0, 2.0**14)])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_gradients_are_added_up_in_fp32(opt_level, scales):
    """1024 + 1/16 is no fp16 number. With scales of its own each loss is unscaled before it is added to the other."""
    engine, reference = make_runs(Weight(), lambda m: optim.SGD(m.parameters(), lr=1.0), opt_level, len(scales))
    set_scalers(engine, reference, [(scale, 0) for scale in scales])
    seen = []
    [param] = engine.optimizer.param_groups[0]["params"]
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(param.grad.item()))
    for loss_id, slope in ((0, 1024.0), (len(scales) - 1, 0.0625)):
        engine.backward(engine(torch.tensor([slope])).sum(), loss_id=loss_id)
    assert not engine.step().skipped
    assert seen == [1024.0625]


def test_a_loss_without_backward_keeps_its_scale():
    """Nor does the step count for its growth."""
    engine, reference = make_runs(Weight(), lambda m: optim.SGD(m.parameters(), lr=1e-3), "O2", 2)
    for loss_id, slope in ((0, 1.0), (1, 1.0), (0, 1e38), (0, 1.0), (1, math.nan)):
        for run in (engine, reference):
            run.backward(run(torch.ones(1)).sum() * slope, loss_id=loss_id)
            run.step()
        saved = scaler_states(engine.state_dict())
        assert [(s["scale"], s["growth_tracker"]) for s in saved] == [(s.scale, s.unskipped) for s in reference.scalers]


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_clipping(opt_level):
    """By the norm of what both losses left, unscaled: torch's own clipping of apex's master_params."""
    by_config = opt_level == "O2"
    config = {"clip_grad_norm": 0.3} if by_config else {}
    engine, reference = make_runs(Parts(True), sgd, opt_level, 2, **config)
    for x, y in BATCHES:
        for run in (engine, reference):
            for loss_id, loss in enumerate(losses_of(run(x), y, criterion_of(run))):
                run.backward(loss, loss_id=loss_id)
        clipped = None if by_config else engine.clip_grad_norm_(0.3)
        result = engine.step()
        norm = nn.utils.clip_grad_norm_([target for _, target in reference.pairs], 0.3)
        reference.step()
        assert norm > 0.6
        assert result.grad_norm == pytest.approx(norm.item(), rel=2e-3 if opt_level == "O3" else 1e-5)
        assert clipped is None or clipped.item() == pytest.approx(norm.item(), rel=2e-3)
    assert_same(engine, reference, *((1e-3, 1e-3) if opt_level == "O3" else ()))


@pytest.mark.parametrize(("opt_level", "num_losses"), [("O1", 1), ("O2", 2)])
def test_zeroed_gradients_leave_no_trace(opt_level, num_losses):
    """A backward that no step was taken for, of the other loss and with other numbers."""
    engine, reference = make_runs(Parts(True), sgd, opt_level, num_losses)
    loss_ids = (0, num_losses - 1)
    run_losses(engine, loss_ids, batches=BATCHES[:1])
    run_losses(reference, loss_ids, batches=BATCHES[:1])
    x, y = BATCHES[2]
    engine.eval()  # BatchNorm's statistics are to stay
    engine.backward(losses_of(engine(x), y, engine.criterion)[1] * 7, loss_id=loss_ids[1])
    engine.train()
    engine.zero_grad()
    history = run_losses(engine, loss_ids, batches=BATCHES[1:])
    assert history == run_losses(reference, loss_ids, batches=BATCHES[1:])
    assert_same(engine, reference)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_resume_is_bitwise(opt_level):
    """After one of the losses has overflowed; and nothing is saved in half precision."""
    engine, _ = make_runs(Parts(True), sgd, opt_level, 2)
    other, _ = make_runs(Parts(True), sgd, opt_level, 2)
    run_losses(engine, (0, 1), Injection(0, 1, "fp16"))
    run_losses(other, (0, 1), Injection(1, 0, "fp16"))  # a state of its own, to be overwritten
    state, file = engine.state_dict(), io.BytesIO()
    assert {value.dtype for value in state["model"].values()} == {torch.float32, torch.int64}
    torch.save(state, file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert run_losses(other, (0, 1)) == run_losses(engine, (0, 1))
    for part in ("model", "update"):
        torch.testing.assert_close(other.state_dict()[part], engine.state_dict()[part], rtol=0, atol=0)
