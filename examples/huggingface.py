"""Hugging Face: a Llama that computes its own loss, sharded by the plan that it brings. Nothing is downloaded.

    python examples/huggingface.py
    torchrun --standalone --nproc-per-node 2 examples/huggingface.py

Needs transformers. The model learns to continue this file, byte by byte; prints losses, which are the same on any
number of ranks (within bf16's rounding).
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import halfmesh

LENGTH = 64
RANKS = int(os.environ.get("WORLD_SIZE", 1))


class Text(Dataset[dict[str, torch.Tensor]]):
    """Pieces of a text, as a Hugging Face model wants them: one dict each."""

    def __init__(self, text: bytes) -> None:
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.ids) - LENGTH) // 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[16 * index : 16 * index + LENGTH]
        return {"input_ids": ids[:-1], "targets": ids[1:]}


class Llama(LlamaForCausalLM):
    """With targets it returns their loss, and only a chunk of the logits is in memory at a time."""

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor | None = None, **inputs: Any) -> Any:
        if targets is None:
            return super().forward(input_ids, **inputs)
        hidden = self.model(input_ids, **inputs).last_hidden_state
        return halfmesh.nn.linear_cross_entropy(hidden, self.lm_head, targets)


torch.manual_seed(0)
model = Llama(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
)
engine = halfmesh.initialize(
    model,
    torch.optim.AdamW(model.parameters(), lr=3e-3),
    None,  # no criterion: the model returns its loss
    DataLoader(Text(Path(__file__).read_bytes()), batch_size=16, drop_last=True),
    dict(bf16=dict(mode="torch"), parallel=dict(tensor=RANKS), clip_grad_norm=1.0),
)

for epoch in range(4):
    for batch in engine.dataloader:
        engine.zero_grad()
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
    if engine.context.rank == 0:
        print(f"epoch {epoch}: loss of the last batch {loss.item():.3f}")
engine.close()
