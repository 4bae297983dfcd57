"""Dropout in a divided model: which ranks drop alike, and that activation checkpointing meets the same masks again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfmesh
from tests.support.models import MODES
from tests.support.nano_gpt import CONTEXT, GPT, PLAN, WORDS
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import divide, random, rng_state

pytestmark = pytest.mark.distributed

ROWS, WIDTH, HEADS = 3, 16, 4
SEQUENCES = {"transformer.h.0": "sequence_begin", "transformer.ln_f": "sequence_end", "*.h.*.ln_?": "sequence"}
SEQUENCES |= {"*.h.*.attn": "region", "*.h.*.mlp": "region", "*.resid_dropout": "sequence", "*.mlp.dropout": "sequence"}
PARTS = {"block": "", "attention": "attn", "hidden": "mlp.gelu"}


def make_model(part: str = "", **options: Any) -> nn.Module:
    """Drops in divided layers, too. `part`: of each block, is computed again in backward; options: of `checkpoint`."""
    torch.manual_seed(0)
    model = GPT(dropout=0.5)
    for block in model.transformer["h"]:
        block.mlp.gelu = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
        if part:
            inner = block.get_submodule(PARTS[part])
            inner.forward = lambda x, run=inner.forward: checkpoint(run, x, **options)
    return model


def make_engine(sequence: bool, mode: str = "none", model: nn.Module | None = None) -> halfmesh.Engine:
    tensor = {"size": 2, "sequence_parallel": sequence, "plan": PLAN | (SEQUENCES if sequence else {})}
    return halfmesh.initialize(
        model or make_model(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda output, ids: nn.functional.cross_entropy(output.flatten(0, 1).float(), ids.flatten()),
        config={**MODES[mode], "parallel": {"tensor": tensor}},
        device=rank_device(),
    )


def ids() -> torch.Tensor:
    return here(torch.randint(WORDS, (ROWS, CONTEXT), generator=torch.Generator().manual_seed(1)))


def update(engine: halfmesh.Engine) -> None:
    engine.backward(engine.criterion(engine(ids()), ids()))
    engine.step()


def masks(rank: int, world_size: int, sequence: bool) -> dict[str, torch.Tensor]:
    """What each dropout drops in two forwards, between which rank 1 draws numbers of its own."""
    found: dict[str, torch.Tensor] = {}
    calls: list[int] = []
    engine = make_engine(sequence)

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if module.training:
                found[f"{name} {len(calls)}"] = output == 0

        return hook

    for name, module in engine.model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(note(name))
    for call in range(2):
        calls.append(call)
        state = rng_state()
        update(engine)
        assert torch.equal(rng_state(), state), "outside as if the model had drawn nothing"
        if rank == 1:
            torch.rand(3, device=rank_device())
    state = rng_state()
    with torch.no_grad():
        engine.eval()(ids())
    assert torch.equal(rng_state(), state), "evaluation draws nothing"
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_masks(sequence):
    """Ranks of a tensor group drop alike where activations are whole, and differently where they are divided."""
    ranks = run_ranks(masks, 4, sequence)  # (dp, tp): 0 0, 0 1, 1 0, 1 1
    divided = ("attn_dropout", "gelu.1", *(("resid_dropout", "mlp.dropout") if sequence else ()))
    assert len(ranks[0]) == 2 * (1 + 2 * 4)
    for name in ranks[0]:
        first, second, third, fourth = (found[name] for found in ranks)
        differ = name.split()[0].endswith(divided)
        assert torch.equal(first, second) != differ, name
        assert torch.equal(third, fourth) != differ, name
        assert not torch.equal(first, third), name
        assert not torch.equal(second, fourth), name
    shapes = {name.split()[0].removeprefix("transformer."): tuple(mask.shape) for name, mask in ranks[0].items()}
    assert shapes["drop"] == (ROWS, CONTEXT, WIDTH)
    assert shapes["h.0.attn.resid_dropout"] == (ROWS, CONTEXT // 2 if sequence else CONTEXT, WIDTH)
    assert shapes["h.0.mlp.gelu.1"] == (ROWS, CONTEXT, 2 * WIDTH)
    assert shapes["h.0.attn.attn_dropout"] == (ROWS, HEADS // 2, CONTEXT, CONTEXT)
    for found in ranks:  # no mask comes twice
        for shape in set(shapes.values()):
            alike = [mask for mask in found.values() if tuple(mask.shape) == shape]
            assert len(torch.stack(alike).unique(dim=0)) == len(alike)


def checkpointed(rank: int, world_size: int, sequence: bool, mode: str, parts: tuple[str, ...]) -> dict[Any, Any]:
    """Losses, gradients and the next random number, with and without activation checkpointing."""
    found = {}
    for part, reentrant in [("", False), *((part, kind) for part in parts for kind in (False, True))]:
        engine = make_engine(sequence, mode, make_model(part, use_reentrant=reentrant))
        losses = []
        for _ in range(2):
            outputs = [engine(ids()), engine(ids())]  # two forwards before the first backward
            loss = sum(engine.criterion(output, ids()) for output in outputs)
            engine.backward(loss)
            grads = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
            engine.step()
            losses.append(loss.item())
        found[part, reentrant] = losses, grads, torch.rand(3, device=rank_device())
        engine.close()
    return found


@pytest.mark.parametrize(
    ("mode", "sequence", "parts"),
    [("none", False, ("block", "hidden")), ("none", True, ("attention",)), ("torch_bf16", True, ("block", "hidden"))],
)
def test_activation_checkpointing_repeats_the_masks(mode, sequence, parts):
    for found in run_ranks(checkpointed, 2, sequence, mode, parts):
        losses, grads, after = found.pop(("", False))
        assert losses[0] != losses[1]
        assert len(found) == 2 * len(parts)
        for case, got in found.items():
            assert got[0] == losses, case
            assert torch.equal(got[2], after), case
            torch.testing.assert_close(got[1], grads, rtol=1e-5, atol=1e-6, msg=str(case))


def interrupted(rank: int, world_size: int) -> list[Any]:
    """What is drawn where activations are whole, after a backward that left the order of random numbers, and after an
    error between divided layers."""
    engine = make_engine(False, model=make_model("hidden", use_reentrant=False, preserve_rng_state=False))
    found: list[Any] = []
    engine.model.transformer["drop"].register_forward_hook(lambda _, args, output: found.append(output == 0))
    torch.manual_seed(0)
    for _ in range(3):
        update(engine)

    def fail(*_: Any) -> None:
        raise LookupError("between divided layers")

    handle = engine.model.transformer["h"][0].mlp.gelu[1].register_forward_hook(fail)
    with pytest.raises(LookupError):
        engine(ids())
    handle.remove()
    engine(ids())
    return [*found, torch.rand(3, device=rank_device())]


def test_ranks_draw_alike_again_whatever_interrupts_a_divided_layer():
    first, second = run_ranks(interrupted, 2)
    assert len(first) == 6
    assert not torch.equal(first[0], first[1])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def dropped_samples(rank: int, world_size: int) -> list[list[bool]]:
    """Which samples each DropPath drops, with divided sequences, in two forwards."""
    from timm.layers import DropPath
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 4}
    model = VisionTransformer(**sizes, class_token=False, global_pool="avg", drop_path_rate=0.5)
    engine, seen = divide(model, "auto", True), []
    for module in model.modules():
        if isinstance(module, DropPath) and module.drop_prob:
            module.register_forward_hook(lambda _, args, output: seen.append((output == 0).flatten(1).all(1).tolist()))
    for _ in range(2):
        engine(random(16, 1, 16, 16, dtype=torch.float32))
    return seen


@pytest.mark.slow
def test_samples_are_dropped_alike_on_all_ranks():
    pytest.importorskip("timm")
    first, second = run_ranks(dropped_samples, 2)
    assert first == second
    assert all(any(dropped) and not all(dropped) for dropped in first)
    assert len({str(dropped) for dropped in first}) == len(first) == 4
