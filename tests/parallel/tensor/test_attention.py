"""torch's attention and transformer layers with divided heads: dropout, half precision, kernels, torch's fast paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import MODES, make_engine
from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import apart, divide, random, rejection

pytestmark = pytest.mark.distributed

N, L, E, HEADS = 2, 5, 8, 4
PLAN = {"": "attention", "out_proj": "rowwise"}


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(E, HEADS, batch_first=True, **options).double()


def padding() -> torch.Tensor:
    mask = torch.zeros(N, L, dtype=torch.bool)
    mask[0, -1] = True
    return here(mask)


def dropped(rank: int, world_size: int) -> tuple[float, bool, bool]:
    x, engine = random(N, L, E), divide(attention(dropout=0.5), PLAN)
    mask = engine(x, x, x, average_attn_weights=False)[1] != 0
    heads_differ = not torch.equal(mask[:, :2], mask[:, 2:])
    return mask.double().mean().item(), heads_differ, bool((engine.eval()(x, x, x)[1] != 0).all())


def test_each_head_drops_by_itself_and_in_training_only():
    for kept, heads_differ, evaluates in run_ranks(dropped, 2):
        assert 0.3 < kept < 0.7
        assert heads_differ
        assert evaluates


def in_half(rank: int, world_size: int) -> dict[str, float]:
    """With queries so large that the scores fit into fp16 only after they are scaled."""
    found: dict[str, float] = {}
    ones = here(torch.ones(1, 3, E))
    for mode in ("torch_fp16", "naive_fp16"):
        ours, theirs = attention(bias=False).float(), attention(bias=False).float()
        for module in (ours, theirs):
            with torch.no_grad():
                module.in_proj_weight.zero_()
                for part, value in zip(module.in_proj_weight.chunk(3), (200.0, 200.0, 1.0), strict=True):
                    part.fill_diagonal_(value)
        outputs = [each(ones, ones, ones)[0] for each in (divide(ours, PLAN, **MODES[mode]), whole(mode, theirs))]
        found[mode] = apart(*(output.float() for output in outputs))
        assert outputs[0].dtype == outputs[1].dtype
    return found


def whole(mode: str, model: nn.Module) -> Any:
    return make_engine(MODES[mode], model=model)


def test_large_scores_in_half_precision():
    for found in run_ranks(in_half, 2):
        assert max(found.values()) < 0.02, found


def hints(rank: int, world_size: int) -> tuple[list[tuple[bool, bool]], str]:
    """Whether the kernel is given a mask, and the hint: with the hint, and with padding beside it."""
    q, given, inner = random(N, L, E), [], F.scaled_dot_product_attention

    def recorded(*args: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool, **options: Any) -> torch.Tensor:
        given.append((attn_mask is not None, is_causal))
        return inner(*args, attn_mask=attn_mask, is_causal=is_causal, **options)

    engine = divide(attention(), PLAN)
    hint = {"attn_mask": here(torch.ones(L, L, dtype=torch.bool).triu(1)), "is_causal": True, "need_weights": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", recorded)
        engine(q, q, q, **hint)
        engine(q, q, q, key_padding_mask=padding(), **hint)
    alone = rejection(lambda: divide(attention(), PLAN)(q, q, q, is_causal=True, need_weights=False))
    return given[-2:], alone


def test_a_hint_reaches_the_kernel_in_place_of_its_mask_and_is_rejected_alone():
    """As in torch: kernels that take no mask are faster."""
    for given, alone in run_ranks(hints, 2):
        assert given == [(False, True), (True, False)]
        assert ": is_causal=True is only a hint about attn_mask; pass attn_mask as well" in alone


def evaluated(rank: int, world_size: int) -> list[float]:
    """Of an encoder, where torch has fast paths and nested tensors, all or a part of it divided."""
    found, x = [], random(N, L, E)
    for plan in ("auto", {"layers.1": "auto"}):
        for options in ({}, {"src_key_padding_mask": padding()}):
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(E, HEADS, 12, 0.0, batch_first=True)
            model = here(nn.TransformerEncoder(layer, 2).double()).eval()
            with torch.no_grad():
                expected = model(x, **options)
                output = divide(model, plan)(x, **options)
            seen = ~padding() if options else slice(None)  # torch's nested tensors have no padding
            found.append(apart(output[seen], expected[seen]))
    return found


@pytest.mark.not_simulated("nested tensors")
def test_evaluation_of_torchs_layers():
    for found in run_ranks(evaluated, 2):
        assert max(found) < 1e-13, found
