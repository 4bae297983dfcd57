"""pytorch/examples word_language_model: an LSTM that keeps its state from batch to batch, and a Transformer.

What a conversion changes: batches come first ([batch, length]), since data ranks and microbatches divide the batch; so
does the LSTM's state. Weights are updated by SGD, and clipping is in the config.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import halfmesh
from tests.support.ranks import here, rank_device
from tests.support.whole import close_whole

TOKENS, WIDTH, LAYERS, BATCH, BPTT, EPOCHS, LR, CLIP = 20, 8, 2, 4, 6, 2, 0.5, 0.25
LSTM_PLAN = {"encoder": "vocab", "decoder": "colwise_gather"}
LSTM_PARTITION = ("rnn",)
TRANSFORMER_PARTITION = ("decoder",)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.decoder = nn.Linear(WIDTH, TOKENS)

    def forward(self, x, h, c):
        state = h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()
        output, (h, c) = self.rnn(self.drop(self.encoder(x)), state)
        scores = F.log_softmax(self.decoder(self.drop(output)), dim=-1)
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


def train_plain(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script before the conversion, with the batch first."""
    model, losses = make_model(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(EPOCHS):
        state = [torch.zeros(BATCH, LAYERS, WIDTH) for _ in range(2)]
        for x, y in get_batches(batchify()):
            optimizer.zero_grad()
            output = model(x, *state) if kind == "lstm" else model(x)
            loss = criterion(output, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if kind == "lstm":
                state = [part.detach() for part in output[1:]]
            losses.append(loss.item())
    return losses, model.state_dict()


def train(kind: str, config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script after it."""
    model, losses = make_model(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    config = {"clip_grad_norm": CLIP, **config}
    engine = halfmesh.initialize(model, optimizer, criterion, config=config, device=rank_device())
    rank, ranks = engine.context.dp_rank, engine.context.dp_size
    for _ in range(EPOCHS):
        state = [here(torch.zeros(BATCH // ranks, LAYERS, WIDTH)) for _ in range(2)]
        for x, y in here(list(get_batches(batchify().chunk(ranks)[rank]))):
            engine.zero_grad()
            output = engine(x, *state) if kind == "lstm" else engine(x)
            loss = engine.criterion(output, y)
            engine.backward(loss)
            engine.step()
            if kind == "lstm":
                state = [part.detach() for part in output[1:]]
            losses.append(loss.item())
    return losses, close_whole(engine)
