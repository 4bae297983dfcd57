"""Models whose logits stay sharded over the vocabulary, as one process trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import halfmesh
from tests.composition.workloads import CONTEXT, WORDS, criterion, find_workload
from tests.support.proofs import FormatAlone, Row, rows
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import divide, parity, rejection
from tests.support.versions import TORCH

pytestmark = pytest.mark.distributed

GPT_PLAN = {"*": "auto", "head": "vocab_parallel"}
LLAMA_PLAN = {"*": "auto", "model.embed_tokens": "vocab", "lm_head": "vocab_parallel"}
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2}}
HALVES = {"pipeline": {"size": 2, "microbatches": 4, "schedule": "zbv", "chunks": 2}}


def gpt() -> Any:
    workload = find_workload("gpt")
    return workload.make(), workload.data(), criterion


def config(sequence_parallel: bool = False, axes: Any = None, **more: Any) -> dict[str, Any]:
    tensor = {"size": 2, "plan": GPT_PLAN, "sequence_parallel": sequence_parallel}
    return {"parallel": {"tensor": tensor, **(axes or {})}, **more}


# Before torch 2.13 it is rejected: torch counts some weights twice.
LATER = [Row("halves of backward", gpt, config(True, HALVES), 4, slow=True)] if TORCH >= (2, 13) else []


@pytest.mark.promise(
    "a vocabulary larger than the hidden states", "logits stay sharded", of="SageMaker", page="tensor-parallel.md"
)
@rows(
    Row("tensor", gpt, config()),
    Row("sequence", gpt, config(sequence_parallel=True)),
    Row("accumulated, bf16", gpt, config(bf16={"mode": "torch"}, gradient_accumulation=2), work=FormatAlone),
    Row("fp16", gpt, config(fp16={"mode": "naive"}), work=FormatAlone),
    Row("fsdp", gpt, config(axes={"data": "fsdp"}), 4, slow=True),
    Row("context", gpt, config(axes={"context": 2}), 4),
    Row("pipeline", gpt, config(axes=PIPELINE), 4),
    *LATER,
)
def test_gpt_is_verified(row):
    row.prove()


def llama() -> Any:
    return find_workload("llama").build()


def own_losses(rank: int, world_size: int) -> tuple[list[float], str]:
    """How far Llama's own loss, and what it trains, are from one process; and what is said of a metric."""
    ids = here(torch.randint(WORDS, (2, CONTEXT), generator=torch.Generator().manual_seed(0)))
    labels = ids.masked_fill(ids % 5 == 0, -100)

    def loss(model: Any, **more: Any) -> torch.Tensor:
        return model(input_ids=ids, labels=labels, **more).loss

    found = [
        parity(llama().double(), loss, LLAMA_PLAN, True),
        parity(llama().double(), lambda m: loss(m, num_items_in_batch=torch.tensor(7)), LLAMA_PLAN),
    ]
    output = divide(llama(), LLAMA_PLAN)(input_ids=ids)
    return found, rejection(lambda: output.logits.argmax(-1))


def test_the_loss_of_a_hugging_face_model_is_that_of_one_process():
    for found, metric in run_ranks(own_losses, 2):
        assert max(found) < 1e-6, found  # its loss is computed in fp32
        assert "logits.full_tensor()" in metric


def kept_output(rank: int, world_size: int) -> list[float]:
    """How far an output that a pipeline keeps, and the loss, are from those of one process."""
    ids = here(torch.randint(WORDS, (4, CONTEXT), generator=torch.Generator().manual_seed(0)))
    expected = here(find_workload("gpt").build())(ids)
    axes = {"pipeline": PIPELINE["pipeline"] | {"keep_outputs": True}}
    given = find_workload("gpt").build(), lambda params: torch.optim.SGD(params, lr=0.1), criterion
    engine = halfmesh.initialize(*given, config=config(axes=axes), device=rank_device())
    output = engine(ids)
    loss = engine.criterion(output, ids)
    engine.backward(loss)
    own = F.cross_entropy(expected.flatten(0, -2), ids.flatten())
    return [float((output.value() - expected).abs().max()), float((loss.value() - own).abs())]


def test_outputs_that_a_pipeline_keeps_are_gathered():
    for found in run_ranks(kept_output, 4):
        assert max(found) < 1e-5, found
