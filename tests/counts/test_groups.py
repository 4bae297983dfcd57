"""How many groups a rank makes where each is waited for by all ranks: a few, not one for each row of the mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import halfmesh.parallel.mesh
from halfmesh import load_config
from halfmesh.dry_run.simulate_rank import simulate_rank

LAYOUT = {"pipeline": {"size": 8, "microbatches": 8}, "tensor": 8}


def build() -> LlamaForCausalLM:
    """The first stage and the last one share a parameter."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


@pytest.mark.parametrize("data", ["zero1", {"strategy": "fsdp", "hybrid": 8}], ids=["zero1", "hybrid"])
def test_rank_0_of_1024_makes_few_groups(monkeypatch, data):
    calls: Counter[str] = Counter()
    new_group = dist.new_group

    def split_group(*, split_ranks: list[list[int]], timeout: Any) -> Any:
        """As torch's for the rank 0 of a fake world, where groups are made of any ranks."""
        calls["split"] += 1
        assert timeout.total_seconds() == 30
        assert sorted(rank for row in split_ranks for rank in row) == [*range(1024)], "each rank in one row"
        return new_group(next(row for row in split_ranks if 0 in row), timeout)

    def counted(*args: Any, **options: Any) -> Any:
        calls["new"] += 1
        return new_group(*args, **options)

    monkeypatch.setattr(halfmesh.parallel.mesh, "splits_world", lambda: True)
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist, "new_group", counted)
    monkeypatch.setattr(dist.distributed_c10d, "new_group", counted)
    config = load_config({"parallel": LAYOUT | {"data": data}, "timeout": 30})
    simulate_rank(config, f"{__name__}:build", ("8,32:int64",), rank=0, world_size=1024)
    assert calls.total() <= 64, calls
    assert calls["split"] >= 4, "pp, dp, tp, and the stages with the shared parameter"
