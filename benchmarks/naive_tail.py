"""The tail of a step in half precision with fp32 masters: from gradients that are there to new weights.

Forward and backward run before each step, outside what is timed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

import halfmesh

from .contenders import LR, Setup, adamw, functional_adamw, update_of
from .counts import count_calls, count_ops
from .harness import AGAIN, BARE, HALFMESH, LOOP, Contender, Result, take_turns
from .single import close, fair
from .works import Work, make_transformer, token_loss, tokens

FOREACH = "hand-written foreach"
FOREACH_FUSED = "hand-written foreach, fused=True"
CLIP = 1.0
GROWTH_INTERVAL = 2000
WORK = Work(
    "naive_tail",
    "the update of a transformer in fp16 with fp32 masters: 198 tensors, 3.25 M parameters",
    lambda: make_transformer(depth=16),
    lambda: tokens(batch=1, length=8),  # forward and backward are not timed, and fp16 products are slow here
    token_loss,
    {"fp16": 3},
    warm=3,
)


class _ByHand:
    """What Megatron's and apex's loops do, in plain torch: masters, a verdict, clipping, AdamW, and copies back."""

    def __init__(self, setup: Setup, fused: bool = False) -> None:
        self.model = setup.model()
        self.masters = [param.detach().clone().requires_grad_() for param in self.model.parameters()]
        self.model.half()
        self.params: list[torch.Tensor] = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=fused or None)
        self.scale, self.good = 65536.0, 0
        self.setup = setup

    def before(self) -> torch.Tensor:
        for param in self.params:
            param.grad = None
        loss = self.setup.work.criterion(self.model(self.setup.x).float(), self.setup.y)
        (loss * self.scale).backward()
        return loss

    def loop(self) -> None:
        """One tensor after the other; the host looks at each."""
        finite = True
        for param, master in zip(self.params, self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float().div_(self.scale)
            finite = finite and bool(torch.isfinite(master.grad).all())
        if self._judge(finite):
            square = 0.0
            for master in self.masters:
                assert master.grad is not None
                square += float(master.grad.norm()) ** 2
            coefficient = min(1.0, CLIP / (square**0.5 + 1e-6))
            for master in self.masters:
                assert master.grad is not None
                master.grad.mul_(coefficient)
            self.optimizer.step()
            with torch.no_grad():
                for param, master in zip(self.params, self.masters, strict=True):
                    param.copy_(master)

    def foreach(self) -> None:
        """The same with one call for all tensors, and one look by the host."""
        grads = [param.grad.float() for param in self.params if param.grad is not None]
        torch._foreach_div_(grads, self.scale)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if self._judge(bool(torch.isfinite(norm))):
            torch._foreach_mul_(grads, (CLIP / (norm + 1e-6)).clamp(max=1.0))
            for master, grad in zip(self.masters, grads, strict=True):
                master.grad = grad
            self.optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)

    def bare(self) -> Callable[[], None]:
        """Four passes over memory: gradients to fp32, their norm, AdamW's kernel (which clips), weights to fp16."""
        wide = [torch.zeros_like(master) for master in self.masters]
        update = functional_adamw(self.masters)

        @torch.no_grad()
        def step() -> None:
            torch._foreach_copy_(wide, [param.grad for param in self.params if param.grad is not None])
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(wide)))
            update(wide, norm.clamp(min=self.scale * CLIP) / CLIP)
            torch._foreach_copy_(self.params, self.masters)

        return step

    def _judge(self, finite: bool) -> bool:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good == GROWTH_INTERVAL:
            self.scale, self.good = self.scale * 2, 0
        return finite


def make_loop(setup: Setup, name: str) -> Contender:
    by_hand = _ByHand(setup)
    return Contender(name, by_hand.loop, by_hand.model, by_hand.optimizer, by_hand.before)


def make_foreach(setup: Setup, name: str, fused: bool) -> Contender:
    by_hand = _ByHand(setup, fused)
    return Contender(name, by_hand.foreach, by_hand.model, by_hand.optimizer, by_hand.before)


def make_bare(setup: Setup) -> Contender:
    by_hand = _ByHand(setup)
    return Contender(BARE, by_hand.bare(), by_hand.model, None, by_hand.before, note="nothing is checked")


def make_halfmesh(setup: Setup) -> Contender:
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    model = setup.work.model()
    config = {"fp16": {"mode": "naive"}, "clip_grad_norm": CLIP}
    engine = halfmesh.initialize(model, adamw(model), setup.work.criterion, config=config, device="cpu")
    return update_of(engine, setup)


MAKERS: list[tuple[str, Callable[[Setup], Contender]]] = [
    (LOOP, lambda setup: make_loop(setup, LOOP)),
    (AGAIN, lambda setup: make_loop(setup, AGAIN)),
    (FOREACH, lambda setup: make_foreach(setup, FOREACH, fused=False)),
    (FOREACH_FUSED, lambda setup: make_foreach(setup, FOREACH_FUSED, fused=True)),
    (HALFMESH, make_halfmesh),
    (BARE, make_bare),
]


def measure(rounds: int, quick: bool = False) -> Result:
    torch.set_num_threads(1)
    setup = Setup.of(WORK, "fp16", CLIP)
    contenders, rows = fair([(label, lambda make=make: make(setup)) for label, make in MAKERS], "fp16", WORK.warm)  # type: ignore[misc]
    steps = 1 if quick else WORK.steps["fp16"]
    timed = take_turns(contenders, rounds, steps)
    for measured, contender in zip(timed, contenders, strict=True):
        row = next(known for known in rows if known.name == measured.name)
        row.wall, row.cpu = measured.wall, measured.cpu
        row.counts = {"Python calls": count_calls(contender, 4)} | count_ops(contender, 2)
        close(contender)
    return Result(WORK.name, WORK.title, "fp16", rows, CLIP, steps, group="tail")
