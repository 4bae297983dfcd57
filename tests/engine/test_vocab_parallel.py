"""Models whose logits stay sharded over the vocabulary, as one process trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import halfmesh
from tests.composition.workloads import CONTEXT, WORDS, criterion, find_workload
from tests.support.proofs import prove
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import divide, parity, refusal
from tests.support.versions import TORCH

pytestmark = pytest.mark.distributed

ZBV = {"schedule": "zbv", "chunks": 2}
GPT_PLAN = {"*": "auto", "head": "vocab_parallel"}
LLAMA_PLAN = {"*": "auto", "model.embed_tokens": "vocab", "lm_head": "vocab_parallel"}


def gpt() -> Any:
    workload = find_workload("gpt")
    return workload.make(), workload.data(), criterion


def config(sequence_parallel: bool = False, axes: Any = None, **more: Any) -> dict[str, Any]:
    tensor = {"size": 2, "plan": GPT_PLAN, "sequence_parallel": sequence_parallel}
    return {"parallel": {"tensor": tensor, **(axes or {})}, **more}


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "tensor": (config(), 2),
    "sequence": (config(sequence_parallel=True), 2),
    "accumulated, bf16": (config(bf16={"mode": "torch"}, gradient_accumulation=2), 2),
    "fsdp": (config(axes={"data": "fsdp"}), 4),
    "fp16": (config(fp16={"mode": "naive"}), 2),
    "context": (config(axes={"context": 2}), 4),
    "pipeline": (config(axes={"pipeline": {"size": 2, "microbatches": 2}}), 4),
}
if TORCH >= (2, 13):  # before it is refused: torch counts some weights twice
    LAYOUTS["halves of backward"] = config(True, {"pipeline": {"size": 2, "microbatches": 4, **ZBV}}), 4


@pytest.mark.promise(
    "a vocabulary larger than the hidden states",
    "logits stay sharded; the loss is that of one process, and what else reads them is refused",
    of="SageMaker",
    page="tensor-parallel.md",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt_is_verified(layout):
    given, ranks = LAYOUTS[layout]
    report = prove(given, gpt, ranks)
    assert report.equal, str(report)


def llama() -> Any:
    return find_workload("llama").build()


def own_losses(rank: int, world_size: int) -> dict[str, Any]:
    """How far Llama's own loss, and what it trains, are from one process."""
    ids = here(torch.randint(WORDS, (2, CONTEXT), generator=torch.Generator().manual_seed(0)))
    labels = ids.masked_fill(ids % 5 == 0, -100)

    def loss(model: Any, **more: Any) -> torch.Tensor:
        return model(input_ids=ids, labels=labels, **more).loss

    found = {
        "mean": parity(llama().double(), loss, LLAMA_PLAN),
        "sequence": parity(llama().double(), loss, LLAMA_PLAN, True),
        "count": parity(llama().double(), lambda m: loss(m, num_items_in_batch=torch.tensor(7)), LLAMA_PLAN),
    }
    engine = divide(llama(), LLAMA_PLAN)
    output = engine(input_ids=ids)
    found["metric"] = refusal(lambda: output.logits.argmax(-1))
    return found


def test_the_loss_of_a_hugging_face_model_is_that_of_one_process():
    for found in run_ranks(own_losses, 2):
        assert "logits.full_tensor()" in found.pop("metric")
        assert len(found) == 3
        assert max(found.values()) < 1e-6, found  # its loss is computed in fp32


def outputs(rank: int, world_size: int) -> dict[str, float]:
    """How far an output that a pipeline keeps, and the loss, are from those of one process."""
    ids = here(torch.randint(WORDS, (4, CONTEXT), generator=torch.Generator().manual_seed(0)))
    expected = here(find_workload("gpt").build())(ids)
    engine = halfmesh.initialize(
        find_workload("gpt").build(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        criterion,
        config=config(axes={"pipeline": {"size": 2, "microbatches": 2, "keep_outputs": True}}),
        device=rank_device(),
    )
    output = engine(ids)
    loss = engine.criterion(output, ids)
    engine.backward(loss)
    own = F.cross_entropy(expected.flatten(0, -2), ids.flatten())
    return {"output": float((output.value() - expected).abs().max()), "loss": float((loss.value() - own).abs())}


def test_outputs_that_a_pipeline_keeps_are_gathered():
    for found in run_ranks(outputs, 4):
        assert max(found.values()) < 1e-5, found
