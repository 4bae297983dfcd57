"""torch's multi-head attention and its transformer layers, with their heads divided, beside the whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import MODES, make_engine
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import apart, divide, parity, random, refusal

pytestmark = pytest.mark.distributed

N, L, S, E, HEADS = 2, 5, 3, 8, 4
PLAN = {"": "attention", "out_proj": "rowwise"}
BOOLS = torch.zeros(L, S, dtype=torch.bool)
BOOLS[1:, 0] = BOOLS[0, 2] = True


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, HEADS, **options).double()
    for name, param in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(param)
    return module


def padding(keys: int) -> torch.Tensor:
    mask = torch.zeros(N, keys, dtype=torch.bool, device=rank_device())
    mask[0, -1] = True
    return mask


def arguments() -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Name, whether there is a batch, and what is passed beside query, key and value."""
    yield "plain", True, {}
    yield "unbatched", False, {}
    yield "bool mask", True, {"attn_mask": here(BOOLS)}
    yield "float mask", True, {"attn_mask": random(L, S)}
    yield "masks of heads", True, {"attn_mask": random(N * HEADS, L, S)}
    yield "unbatched masks", False, {"attn_mask": random(HEADS, L, S), "key_padding_mask": padding(S)[0]}
    yield "float padding", True, {"key_padding_mask": random(N, S)}
    yield "both", True, {"key_padding_mask": padding(S), "attn_mask": here(BOOLS)}
    yield "all", True, {"key_padding_mask": padding(S), "attn_mask": random(N * HEADS, L, S) > 1}
    yield "causal", True, {"attn_mask": here(torch.ones(L, S, dtype=torch.bool).triu(1)), "is_causal": True}


def joined(result: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """Output and weights as one, so that a loss of both goes backward."""
    return torch.cat([part.flatten() for part in result if part is not None])


def attend(rank: int, world_size: int) -> dict:
    found = {}
    for batch_first, bias in ((True, True), (False, True), (True, False)):
        for name, batched, options in arguments():
            if not (batch_first and bias) and name not in ("plain", "both", "unbatched masks"):
                continue
            shapes = [((N, n, E) if batch_first else (n, N, E)) if batched else (n, E) for n in (L, S, S)]
            inputs = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
            for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
                module = attention(batch_first=batch_first, bias=bias)
                call = lambda m, i=inputs, o={**options, **weights}: joined(m(*i, **o))  # noqa: E731
                found[batch_first, bias, name, str(weights)] = parity(module, call, PLAN)
    return found


def test_masks_weights_and_layouts():
    for found in run_ranks(attend, 2):
        assert len(found) == (10 + 3 + 3) * 3
        assert max(found.values()) < 1e-13, found


def self_attention(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    x = random(N, L, E)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    here(attention(batch_first=True))(inputs[0], inputs[0], inputs[0])[0].square().sum().backward()
    engine = divide(attention(batch_first=True), PLAN)
    engine.backward(engine(inputs[1], inputs[1], inputs[1])[0].square().sum())
    found["input grad"] = apart(inputs[1].grad, inputs[0].grad)
    engine.model.dropout = 0.5  # of each head by itself
    mask = engine(x, x, x, average_attn_weights=False)[1] != 0
    found["dropped"] = mask.double().mean().item()
    found["heads apart"] = not torch.equal(mask[:, :2], mask[:, 2:])
    found["eval"] = bool((engine.eval()(x, x, x)[1] != 0).all())
    # Large queries: the scores fit into fp16 only after they are scaled.
    large, whole = attention(batch_first=True, bias=False).float(), attention(batch_first=True, bias=False).float()
    for module in (large, whole):
        with torch.no_grad():
            module.in_proj_weight.zero_()
            for part, value in zip(module.in_proj_weight.chunk(3), (200.0, 200.0, 1.0), strict=True):
                part.fill_diagonal_(value)
    ones = here(torch.ones(1, 3, E))
    options = {"attn_mask": here(torch.ones(L, L)).triu(1) * -9.0, "key_padding_mask": padding(L)}
    for mode in ("torch_fp16", "torch_bf16", "naive_fp16"):
        cells = [(large, whole, ones, {})] if mode == "naive_fp16" else []
        cells += [(attention(batch_first=True).float(), attention(batch_first=True).float(), x.float(), options)]
        for divided, other, value, more in cells:
            ours, theirs = divide(divided, PLAN, **MODES[mode]), make_engine(MODES[mode], model=other)
            for a, b in zip(ours(value, value, value, **more), theirs(value, value, value, **more), strict=True):
                found[mode, len(found)] = a.dtype == b.dtype and apart(a.float(), b.float()) < 0.02
            ours.close()
            theirs.close()
    return found


def test_self_attention_dropout_and_half_precision():
    for found in run_ranks(self_attention, 2):
        assert found.pop("input grad") < 1e-14
        assert 0.3 < found.pop("dropped") < 0.7
        assert all(found.values()), found


def masks_of_kernels(rank: int, world_size: int) -> list[tuple[bool, bool]]:
    """Whether the kernel is given a mask, and the hint: with the hint, and with padding beside it."""
    q, given, inner = random(N, L, E), [], F.scaled_dot_product_attention

    def recorded(*args: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool, **options: Any) -> torch.Tensor:
        given.append((attn_mask is not None, is_causal))
        return inner(*args, attn_mask=attn_mask, is_causal=is_causal, **options)

    engine = divide(attention(batch_first=True), PLAN)
    hint = {"attn_mask": here(torch.ones(L, L, dtype=torch.bool).triu(1)), "is_causal": True, "need_weights": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", recorded)
        engine(q, q, q, **hint)
        engine(q, q, q, key_padding_mask=padding(L), **hint)
    return given[-2:]


def test_the_hint_reaches_the_kernel_in_place_of_the_mask():
    """As in torch: kernels that take no mask are faster."""
    assert run_ranks(masks_of_kernels, 2) == [[(False, True), (True, False)]] * 2


def call_with_a_hint(rank: int, world_size: int) -> list[str]:
    q = random(N, L, E)
    engine = divide(attention(batch_first=True), PLAN)
    return [refusal(lambda: engine(q, q, q, is_causal=True, need_weights=False))]


def test_a_hint_without_a_mask_is_refused():
    hint = ": is_causal=True is a hint about attn_mask; pass attn_mask, too"
    assert all(hint in found[0] for found in run_ranks(call_with_a_hint, 2))


def encoder(batch_first: bool = True, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS, 12, 0.0, batch_first=batch_first, **options)
    return nn.TransformerEncoder(layer, 2).double()


def layers(rank: int, world_size: int) -> dict:
    found: dict[Any, float] = {}
    x, memory = random(N, L, E), random(N, S, E, seed=1)
    causal = here(nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64))
    calls: dict[str, Any] = {
        "plain": {},
        "causal": {"mask": causal, "is_causal": True},
        "padding": {"src_key_padding_mask": padding(L)},
    }
    for name, options in calls.items():
        for batch_first, norm_first in ((True, True), (False, False)):
            model = encoder(batch_first, norm_first=norm_first, activation="gelu" if norm_first else "relu")
            y = x if batch_first else x.transpose(0, 1)
            found[batch_first, name] = parity(model, lambda m, y=y, o=options: m(y, **o))
        seen = ~padding(L) if name == "padding" else slice(None)  # torch's nested tensors have no padding
        for grads in (True, False):  # evaluation, where torch has fast paths and nested tensors
            for plan in ("auto", {"layers.1": "auto"}):
                model = here(encoder()).eval()
                with torch.set_grad_enabled(grads):
                    expected = model(x, **options)
                    output = divide(model, plan)(x, **options)
                found["eval", name, grads, str(plan)] = apart(output[seen], expected[seen])
    torch.manual_seed(0)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, HEADS, 12, 0.0, batch_first=True), 2).double()
    masks = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding(S)}
    found["decoder"] = parity(decoder, lambda m: m(x, memory, **masks))
    torch.manual_seed(0)
    both = nn.Transformer(E, HEADS, 2, 1, 12, 0.0, batch_first=True).double()
    found["both"] = parity(both, lambda m: m(memory, x, tgt_mask=causal, src_key_padding_mask=padding(S)))
    return found


@pytest.mark.not_simulated("nested tensors")
def test_transformer_layers():
    for found in run_ranks(layers, 2):
        assert len(found) == 6 + 12 + 2
        assert max(found.values()) < 1e-13, found
