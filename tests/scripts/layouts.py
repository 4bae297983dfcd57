"""The layouts that every script is trained in, by its config alone."""

from __future__ import annotations

from typing import Any

GLOBAL_BATCH = 16
OUTPUTS = {"keep_outputs": True, "eval_outputs": "all"}  # the scripts use outputs on every rank
WORLD_SIZES = {"one process": 1, "dp 2": 2, "tensor 2": 2, "pipeline 2": 2, "fsdp": 2}


def config(layout: str, plan: Any, partition: Any) -> dict[str, Any]:
    """The config of a layout, with the batch size of a data rank.

    Args:
        plan, partition: for tensor and pipeline ranks, of a model that halfmesh does not know.
    """
    parallel: dict[str, dict[str, Any]] = {
        "one process": {},
        "dp 2": {"data": "replicate"},
        "tensor 2": {"tensor": {"size": 2, "plan": plan}},
        "pipeline 2": {"pipeline": {"size": 2, "microbatches": 2, "partition": partition} | OUTPUTS},
        "fsdp": {"data": "fsdp"},
    }
    data_ranks = 2 if layout in ("dp 2", "fsdp") else 1
    return {"parallel": parallel[layout], "BATCH_SIZE": GLOBAL_BATCH // data_ranks}
