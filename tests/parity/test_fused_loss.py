"""`halfmesh.nn.linear_cross_entropy` in a model's forward: every layout trains as one process without chunks does."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.nn import linear_cross_entropy
from tests.parallel.context.runs import GPT, LENGTH, WORDS
from tests.support.proofs import FormatAlone, Row, rows

pytestmark = pytest.mark.distributed

ROWS, CHUNK = 4, 6
VOCAB_PARALLEL = {"*": "auto", "tokens": "vocab", "head": "vocab_parallel"}
END = {"words": "vocab", "end.head": "vocab_parallel"}
STAGES = {"size": 2, "microbatches": 2, "partition": ["blocks.1"]}
RECOMPUTED = {"activation_checkpoint": {"patterns": ["end"]}}
LM_HEAD = {"*": "auto", "lm_head": "vocab_parallel"}
NAIVE = {"fp16": {"mode": "naive", "loss_scale": 1024.0}}


class FusedGPT(GPT):
    """Returns its loss. In a plain loop, as of the one process, it computes all logits at once."""

    reduction = "mean"

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids, positions)
        for block in self.blocks:
            x = block(x)
        options: Any = {"ignore_index": 3, "label_smoothing": 0.1, "reduction": self.reduction}
        return linear_cross_entropy(self.norm(x), self.head, targets, chunk_size=CHUNK, **options)


def batch(uneven: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and the targets: of `uneven` rows and halves of rows unlike numbers count, else of each row as many."""
    ids = torch.randint(WORDS, (ROWS, LENGTH))
    targets = ids.roll(-1, 1).masked_fill(ids.roll(-1, 1) == 3, 4)
    targets[:, :5] = 3
    if uneven:
        targets[0, 3:] = targets[1, :2] = 3
    return ids, targets


def gpt(uneven: bool = True) -> Any:
    ids, targets = batch(uneven)
    return FusedGPT(LENGTH, 16, 2, 4), {"ids": ids, "targets": targets}


class End(nn.Module):
    """The loss, in a module that may be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(self.norm(x), self.head, targets, chunk_size=CHUNK, ignore_index=3)


class WithEnd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.end = nn.Embedding(WORDS, 16), End()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.end(self.words(ids), targets)


def with_end() -> Any:
    ids, targets = batch()
    return WithEnd(), {"ids": ids, "targets": targets}


def of_tokens() -> Any:
    """The model returns the loss of each token."""
    model, batch = gpt()
    model.reduction = "none"
    return model, (batch, torch.zeros(ROWS)), lambda losses, _: losses.mean()


def llama(tied: bool = False) -> Any:
    transformers = pytest.importorskip("transformers")

    class FusedLlama(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any, targets: Any, position_ids: Any = None, **given: Any) -> torch.Tensor:
            hidden = self.model(input_ids, position_ids=position_ids, **given).last_hidden_state
            return linear_cross_entropy(hidden, self.lm_head, targets, chunk_size=CHUNK, ignore_index=3)

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": WORDS, "initializer_range": 0.2, "use_cache": False}
    ids, targets = batch()
    model = FusedLlama(transformers.LlamaConfig(**sizes, tie_word_embeddings=tied))
    return model, {"input_ids": ids, "targets": targets}


def config(more: Any = None, **parallel: Any) -> Any:
    return {"parallel": parallel, **(more or {})}


@rows(
    Row("vocabulary-parallel", gpt, config(tensor={"size": 2, "plan": VOCAB_PARALLEL})),
    Row("gathered logits", gpt, config(tensor=2)),
    Row("context", gpt, config(context=2)),
    Row("zero1", partial(gpt, False), config({"gradient_accumulation": 2}, data="zero1")),
    Row("fsdp", partial(gpt, False), config(data="fsdp")),
    Row("recomputed, context", with_end, config(RECOMPUTED, context=2)),
    Row("recomputed", with_end, config(RECOMPUTED, tensor={"size": 2, "plan": END})),
    Row("recomputed in fp16", with_end, config(RECOMPUTED | NAIVE, context=2), work=FormatAlone),
    Row("stages, fsdp", of_tokens, config(data="fsdp", pipeline=STAGES), 4),
    Row(
        "Llama, tied",
        partial(llama, True),
        config(tensor={"size": 2, "plan": {**LM_HEAD, "model.embed_tokens": "vocab"}}),
    ),
    Row("Llama, sequences", llama, config(tensor={"size": 2, "plan": LM_HEAD, "sequence_parallel": True})),
    Row("Llama, context", llama, config(context=2)),
    Row("fp16", gpt, config(NAIVE, tensor={"size": 2, "plan": VOCAB_PARALLEL}), work=FormatAlone),
    Row("bf16", gpt, config({"bf16": {"mode": "torch"}}, context=2), work=FormatAlone),
)
def test_trains_as_one_process(row):
    row.prove()
