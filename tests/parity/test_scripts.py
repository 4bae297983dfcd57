"""pytorch/examples word_language_model: an LSTM that keeps its state from batch to batch, and a Transformer.

It trains as before its conversion in one process, and as in one process in each layout. What a conversion changes:
batches come first ([batch, length]), since data ranks and microbatches divide the batch; so does the LSTM's state.
Weights are updated by SGD, and clipping is in the config. The scripts of examples/own_loop are in tests/scripts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh
from tests.support.proofs import Row, rows

pytestmark = pytest.mark.distributed

TOKENS, WIDTH, LAYERS, BATCH, BPTT, EPOCHS, LR, CLIP = 20, 8, 2, 4, 6, 2, 0.5, 0.25
LSTM_PLAN = {"encoder": "vocab", "decoder": "colwise_gather"}
LSTM_PARTITION = ("rnn",)
TRANSFORMER_PARTITION = ("decoder",)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.decoder = nn.Linear(WIDTH, TOKENS)

    def forward(self, x, h, c):
        state = h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()
        output, (h, c) = self.rnn(self.encoder(x), state)
        scores = F.log_softmax(self.decoder(output), dim=-1)
        return scores, h.transpose(0, 1), c.transpose(0, 1)


class PositionalEncoding(nn.Module):
    def __init__(self):
        super().__init__()
        angles = torch.arange(64.0)[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("pe", torch.stack((angles.sin(), angles.cos()), -1).flatten(1))

    def forward(self, x):
        return x + self.pe[: x.size(1)]


class TransformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_emb = nn.Embedding(TOKENS, WIDTH)
        self.pos_encoder = PositionalEncoding()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.decoder = nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        x = self.pos_encoder(self.input_emb(x) * WIDTH**0.5)
        return F.log_softmax(self.decoder(self.encoder(x, mask=mask, is_causal=True)), dim=-1)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(1111)
    return RNNModel() if kind == "lstm" else TransformerModel()


def batchify() -> torch.Tensor:
    tokens = torch.randint(TOKENS, (200,), generator=torch.Generator().manual_seed(4)).cumsum(0) % TOKENS
    return tokens.view(BATCH, -1)


def get_batches(source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    starts = range(0, source.size(1) - 1 - BPTT, BPTT)
    return [(source[:, i : i + BPTT], source[:, i + 1 : i + 1 + BPTT]) for i in starts]


def criterion(output: Any, targets: torch.Tensor) -> torch.Tensor:
    scores = output[0] if isinstance(output, (tuple, list)) else output
    return F.nll_loss(scores.flatten(0, 1), targets.flatten())


def train(kind: str, engine: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script after its conversion, or before it, without an engine."""
    model, losses = make_model(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    if engine:
        engine = halfmesh.initialize(model, optimizer, criterion, config={"clip_grad_norm": CLIP}, device="cpu")
    for _ in range(EPOCHS):
        state = [torch.zeros(BATCH, LAYERS, WIDTH) for _ in range(2)]
        for x, y in get_batches(batchify()):
            (engine or optimizer).zero_grad()
            output = (engine or model)(*((x, *state) if kind == "lstm" else (x,)))
            loss = criterion(output, y)
            if engine:
                engine.backward(loss)
                engine.step()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
            if kind == "lstm":
                state = [part.detach() for part in output[1:]]
            losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_it_trains_as_before_the_conversion(kind):
    (losses, weights), (expected, plain) = train(kind, engine=True), train(kind, engine=False)
    assert losses == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)


def build(kind: str) -> Any:
    """Batches of the script, the LSTM's with a state."""
    state = torch.randn(2, BATCH, LAYERS, WIDTH)
    batches = get_batches(batchify())
    return make_model(kind), [((x, *state) if kind == "lstm" else x, y) for x, y in batches], criterion


def layouts(kind: str, plan: Any, partition: Any) -> list[Row]:
    stages = {"size": 2, "microbatches": 2, "partition": partition, "keep_outputs": True, "eval_outputs": "all"}
    parallel = [
        {"data": "replicate"},
        {"tensor": {"size": 2, "plan": plan}},
        {"pipeline": stages},
        {"data": "fsdp"},
    ]
    settings = [{"parallel": layout, "clip_grad_norm": CLIP} for layout in parallel]
    return [Row(f"{kind}, {next(iter(one['parallel']))}", partial(build, kind), one) for one in settings]


@rows(*layouts("lstm", LSTM_PLAN, LSTM_PARTITION), *layouts("transformer", "auto", TRANSFORMER_PARTITION))
def test_it_trains_as_one_process(row):
    row.prove()
