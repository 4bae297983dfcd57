"""torch's multi-head attention and its transformer layers, with their heads divided, beside the whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.parallel.style import parse_style
from tests.support.ranks import run_ranks
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


def padding(keys: int, batch: int = N) -> torch.Tensor:
    mask = torch.zeros(batch, keys, dtype=torch.bool)
    mask[0, -1] = True
    return mask


def arguments() -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Name, whether there is a batch, and what is passed beside query, key and value."""
    yield "plain", True, {}
    yield "unbatched", False, {}
    yield "bool mask", True, {"attn_mask": BOOLS}
    yield "float mask", True, {"attn_mask": random(L, S)}
    yield "masks of heads", True, {"attn_mask": random(N * HEADS, L, S)}
    yield "bool masks of heads", True, {"attn_mask": random(N * HEADS, L, S) > 1}
    yield "unbatched masks", False, {"attn_mask": random(HEADS, L, S), "key_padding_mask": padding(S)[0]}
    yield "unbatched mask", False, {"attn_mask": BOOLS}
    yield "padding", True, {"key_padding_mask": padding(S)}
    yield "float padding", True, {"key_padding_mask": random(N, S)}
    yield "both", True, {"key_padding_mask": padding(S), "attn_mask": BOOLS}
    yield "all", True, {"key_padding_mask": padding(S), "attn_mask": random(N * HEADS, L, S) > 1}
    yield "causal", True, {"attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1), "is_causal": True}


def cells(module: nn.MultiheadAttention, batch_first: bool) -> Iterator[tuple[Any, ...]]:
    for name, batched, options in arguments():
        for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
            shapes = [((N, n, E) if batch_first else (n, N, E)) if batched else (n, E) for n in (L, S, S)]
            q, k, v = (random(*shape, seed=i) for i, shape in enumerate(shapes))
            yield name, str(weights), (q, k, v), {**options, **weights}


def joined(result: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """Output and weights as one, so that a loss of both goes backward."""
    return torch.cat([part.flatten() for part in result if part is not None])


def attend(rank: int, world_size: int) -> dict:
    found = {}
    for batch_first in (True, False):
        for bias in (True, False):
            module = attention(batch_first=batch_first, bias=bias)
            for name, weights, inputs, options in cells(module, batch_first):
                if not bias and name not in ("plain", "both", "unbatched masks"):
                    continue
                cell = parity(module, lambda m, i=inputs, o=options: joined(m(*i, **o)), PLAN)
                found[batch_first, bias, name, weights] = (cell.output, cell.grads, cell.missing)
    return found


def test_attention():
    for found in run_ranks(attend, 2, timeout=120):
        assert len(found) == 2 * (13 + 3) * 3
        for cell, (output, grads, missing) in found.items():
            assert max(output, grads) < 1e-13, cell
            assert missing == [], cell


def details(rank: int, world_size: int) -> dict:
    found: dict[str, Any] = {}
    x = random(N, L, E)
    # Self-attention: gradients of what it is called with.
    module = attention(batch_first=True)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    module(inputs[0], inputs[0], inputs[0])[0].square().sum().backward()
    tensor = divide(module, PLAN)
    output, weights = module(inputs[1], inputs[1], inputs[1])
    output.square().sum().backward()
    found["input grad"] = apart(inputs[1].grad, inputs[0].grad)
    found["shapes"] = tuple(output.shape), tuple(weights.shape)
    found["local"] = (module.num_heads, tuple(module.in_proj_weight.shape), tuple(module.out_proj.weight.shape))
    # Weights are dropped before they are returned, on each rank those of its own heads.
    module.dropout = 0.5
    torch.manual_seed(1)
    dropped = module(x, x, x, average_attn_weights=False)[1]
    found["dropped"] = (dropped == 0).double().mean().item()
    mask = dropped != 0
    found["heads apart"] = not torch.equal(mask[:, :2], mask[:, 2:])
    torch.manual_seed(1)
    module(x, x, x, need_weights=False)
    found["in step"] = torch.rand(1).item()
    module.eval()
    found["eval"] = bool((module(x, x, x)[1] != 0).all())
    tensor.close()
    # Large queries: the scores fit into fp16 only after they are scaled.
    large = attention(batch_first=True, bias=False)
    with torch.no_grad():
        large.in_proj_weight.fill_(0.0)
        large.in_proj_weight[:8].fill_diagonal_(200.0)
        large.in_proj_weight[8:16].fill_diagonal_(200.0)
        large.in_proj_weight[16:].fill_diagonal_(1.0)
    large = large.half()
    ones = torch.ones(1, 3, E, dtype=torch.float16)
    expected = large(ones, ones, ones)
    divide(large, PLAN)
    found["fp16"] = [torch.allclose(a, b, rtol=1e-2) for a, b in zip(large(ones, ones, ones), expected, strict=True)]
    for dtype in (torch.float16, torch.bfloat16):
        module, wide = attention(batch_first=True).float(), x.float()
        options = {"attn_mask": torch.ones(L, L).triu(1) * -9.0, "key_padding_mask": padding(L)}
        with torch.autocast("cpu", dtype):
            expected = [*module(wide, wide, wide, **options), module(wide, wide, wide, need_weights=False)[0]]
        divide(module, PLAN)
        with torch.autocast("cpu", dtype):
            got = [*module(wide, wide, wide, **options), module(wide, wide, wide, need_weights=False)[0]]
            found[dtype] = [
                (a.dtype == b.dtype, ((a - b).abs().max() / b.abs().max()).item() < 0.02)
                for a, b in zip(got, expected, strict=True)
            ]
    return found


def test_details():
    first, second = run_ranks(details, 2)
    assert first["in step"] == second["in step"]
    for found in (first, second):
        assert found["input grad"] < 1e-14
        assert found["shapes"] == ((N, L, E), (N, L, L))
        assert found["local"] == (2, (12, 8), (8, 4))
        assert 0.3 < found["dropped"] < 0.7
        assert found["heads apart"]
        assert found["eval"]
        assert found["fp16"] == [True, True]
        for dtype in (torch.float16, torch.bfloat16):
            assert found[dtype] == [(True, True)] * 3


def wrong_calls() -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    q, k = random(N, L, E), random(N, S, E)
    yield {"is_causal": True, "need_weights": False}, (q, k, k)
    yield {"is_causal": True}, (q, q, q)
    yield {"attn_mask": BOOLS[:1]}, (q, k, k)
    yield {"attn_mask": BOOLS[:, :1]}, (q, k, k)
    yield {"attn_mask": BOOLS[None].expand(N, L, S)}, (q, k, k)
    yield {"attn_mask": BOOLS[None].expand(HEADS, L, S)}, (q, k, k)
    yield {"attn_mask": BOOLS[None, None]}, (q, k, k)
    yield {"attn_mask": BOOLS[0]}, (q, k, k)
    yield {"attn_mask": BOOLS.int()}, (q, k, k)
    yield {"key_padding_mask": padding(S)[:1]}, (q, k, k)
    yield {"key_padding_mask": padding(1)}, (q, k, k)
    yield {"key_padding_mask": padding(S).to(torch.uint8)}, (q, k, k)
    yield {}, (q, k, q)
    yield {}, (q, k[:1], k[:1])
    yield {}, (q[:1], k, k)
    yield {}, (q, k, k[..., :4])
    yield {}, (q[0], k, k)
    yield {}, (q[None], k[None], k[None])
    yield {"key_padding_mask": padding(S)}, (q[0], k[0], k[0])


def call_wrongly(rank: int, world_size: int) -> list[tuple[str, str]]:
    whole, module = attention(batch_first=True), attention(batch_first=True)
    divide(module, PLAN)
    return [
        (refusal(lambda o=o, i=i: whole(*i, **o)), refusal(lambda o=o, i=i: module(*i, **o))) for o, i in wrong_calls()
    ]


def test_what_torch_refuses_is_refused():
    for found in run_ranks(call_wrongly, 2):
        for case, (theirs, ours) in zip(wrong_calls(), found, strict=True):
            assert theirs != "no error", case
            assert ours.startswith("InputError: "), (case[0].keys(), theirs, ours)
        assert found[0][1].endswith(
            "is_causal=True is a hint that attn_mask is causal, and there is no attn_mask; pass "
            "torch.nn.Transformer.generate_square_subsequent_mask(length)"
        )
        assert found[2][1].endswith(
            "attn_mask has the shape (1, 3) and dtype torch.bool; it has to be of booleans or floating-point numbers, "
            "and of shape (5, 3) or (8, 5, 3)"
        )
        assert "key_padding_mask has the shape (1, 3) and dtype torch.bool; " in found[9][1]
        assert "query, key and value have the shapes (2, 5, 8), (2, 3, 8), (2, 5, 8); they need" in found[12][1]


class Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("module", "size", "message"),
    [
        (nn.MultiheadAttention(8, 4, kdim=6), 2, "keys or values have another width than queries (kdim, vdim), which"),
        (nn.MultiheadAttention(8, 4, vdim=6), 2, "keys or values have another width than queries (kdim, vdim), which"),
        (nn.MultiheadAttention(8, 4, add_zero_attn=True), 2, "it adds a key and a value of its own (add_bias_kv, add_"),
        (nn.MultiheadAttention(8, 4, add_bias_kv=True), 2, "it adds a key and a value of its own (add_bias_kv, add_"),
        (nn.MultiheadAttention(9, 3), 2, "3 heads are not divisible by tensor=2; tensor can be 1, 3"),
        (Own(8, 4), 2, "it is a Own, and this style is for torch.nn.MultiheadAttention"),
        (nn.Linear(8, 4), 2, "it is a Linear, and this style is for torch.nn.MultiheadAttention"),
    ],
)
def test_what_cannot_be_divided(module, size, message):
    found = list(parse_style("attention").find_problems(module, size))
    assert len(found) == 1
    assert found[0].startswith(message)


def encoder(batch_first: bool = True, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS, 12, 0.0, batch_first=batch_first, **options)
    return nn.TransformerEncoder(layer, 2).double()


def layers(rank: int, world_size: int) -> dict:
    found: dict[Any, Any] = {}
    x, memory = random(N, L, E), random(N, S, E, seed=1)
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    calls: dict[str, Any] = {
        "plain": {},
        "causal": {"mask": causal, "is_causal": True},
        "mask": {"mask": causal},
        "padding": {"src_key_padding_mask": padding(L)},
    }
    for batch_first in (True, False):
        for norm_first in (True, False):
            for name, options in calls.items():
                model = encoder(batch_first, norm_first=norm_first, activation="gelu" if norm_first else "relu")
                y = x if batch_first else x.transpose(0, 1)
                cell = parity(model, lambda m, y=y, o=options: m(y, **o))
                found["encoder", batch_first, norm_first, name] = max(cell.output, cell.grads)
    for name, options in calls.items():  # evaluation, where torch has fast paths and nested tensors
        for grads in (True, False):
            model = encoder().eval()
            with torch.set_grad_enabled(grads):
                expected = model(x, **options)
                divide(model)
                output = model(x, **options)
            seen = ~padding(L) if name == "padding" else slice(None)  # torch's nested tensors have no padding
            found["eval", name, grads] = apart(output[seen], expected[seen])
    model = encoder().eval()  # some layers only, in a model that makes nested tensors
    with torch.no_grad():
        expected = model(x, **calls["padding"])
        divide(model, {"layers.1": "auto"})
        found["eval", "some"] = apart(model(x, **calls["padding"])[seen], expected[seen])
    torch.manual_seed(0)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, HEADS, 12, 0.0, batch_first=True), 2).double()
    masks = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding(S)}
    cell = parity(decoder, lambda m: m(x, memory, **masks))
    found["decoder"] = max(cell.output, cell.grads)
    torch.manual_seed(0)
    both = nn.Transformer(E, HEADS, 2, 1, 12, 0.0, batch_first=True).double()
    cell = parity(both, lambda m: m(memory, x, tgt_mask=causal, src_key_padding_mask=padding(S)))
    found["transformer"] = max(cell.output, cell.grads)
    found["missing"] = cell.missing
    found["sequence"] = refusal(lambda: divide(encoder(), "auto", True))
    return found


def test_transformer_layers():
    for found in run_ranks(layers, 2, timeout=120):
        assert found.pop("missing") == []
        assert found.pop("sequence").startswith("ValueError: sequence_parallel=True, but no plan says where")
        assert len(found) == 16 + 8 + 1 + 2
        for cell, value in found.items():
            assert value < 1e-13, cell
