"""The GPT of the example."""

import pytest
import torch
from gpt import GPT


def make_model(dropout=0.0):
    torch.manual_seed(0)
    return GPT(context=8, width=16, depth=2, num_heads=2, dropout=dropout)


def test_no_byte_is_predicted_from_later_ones():
    model = make_model()
    ids = torch.tensor([[5, 6, 7, 8]])
    changed = torch.tensor([[5, 6, 9, 8]])
    before, after = model(ids), model(changed)
    assert before.shape == (1, 4, 256)
    assert torch.equal(before[:, :2], after[:, :2])
    assert (before[:, 2:] - after[:, 2:]).abs().amin(1).max() > 1e-3
    torch.testing.assert_close(model(ids[:, :2]), before[:, :2])


def test_places_count():
    model = make_model()
    first, second = model(torch.tensor([[5, 5]]))[0]
    assert (first - second).abs().max() > 1e-2


def test_head_and_embedding_are_one():
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    assert "tokens.weight" in names
    assert "head.weight" not in names
    assert model.head.weight is model.tokens.weight


def test_initial_weights():
    torch.manual_seed(0)
    model = GPT(context=64, width=768, depth=2, num_heads=2)
    for layer, std in ((model.blocks[0].mlp.up, 0.018), (model.blocks[0].mlp.down, 0.009), (model.tokens, 0.018)):
        assert layer.weight.std().item() == pytest.approx(std, rel=0.02)
    assert model.blocks[1].attention.qkv.bias.abs().max() == 0


def test_dropout_is_for_training_only():
    model, ids = make_model(dropout=0.5), torch.arange(8).unsqueeze(0)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    block = model.train().blocks[0]
    block.drop1.p = block.drop2.p = 0.0
    x = torch.randn(1, 8, 16)
    assert not torch.equal(block(x), block(x))  # the attention's own


def test_models_and_inputs_that_cannot_be():
    with pytest.raises(ValueError, match="width=16 is not divisible by num_heads=3"):
        GPT(context=8, width=16, depth=1, num_heads=3)
    with pytest.raises(ValueError, match="9 bytes are more than the context of 8; give the last ones only"):
        make_model()(torch.zeros(1, 9, dtype=torch.int64))
