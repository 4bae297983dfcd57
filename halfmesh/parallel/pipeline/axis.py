"""`parallel.pipeline` as an axis of the mesh: each rank has some of the model's stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..axis import Axis, AxisInputs, PlanInputs
from ..registries import SCHEDULES

if TYPE_CHECKING:
    from .cut import StageCut
    from .partition import Partition


class PipelineParallelism(Axis):
    """`parallel.pipeline`."""

    dim = "pp"
    splits_params = False
    takes_modules = True
    splits_batch = "microbatches"
    cost = "stages send each microbatch's activations on, and wait at the beginning and the end of a batch (the bubble)"

    @staticmethod
    def sizes_to_try(ranks: int, node: int) -> Iterator[int]:
        """Stages may be in different machines: they send little."""
        yield from (size for size in range(2, ranks + 1) if ranks % size == 0)

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        """Microbatches and chunks against the schedule."""
        pipeline = config.parallel.pipeline
        size, microbatches = pipeline.size, pipeline.microbatches
        if microbatches is None:
            start = f"pipeline=dict(size={size}, microbatches={2 * size})"
            yield "parallel.pipeline.microbatches", f"is required when pipeline.size > 1; {start} is a start"
        for key, message in SCHEDULES.get(pipeline.schedule).find_problems(size, pipeline.chunks, microbatches):
            yield f"parallel.pipeline.{key}", message

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[Partition | None, list[str]]:
        from .checks import find_optimizer_problem, make_partition

        problem = find_optimizer_problem(inputs.optimizer)
        partition, more = make_partition(inputs.model, inputs.criterion, inputs.dataloader, inputs.options)
        return partition, [*([] if problem is None else [problem]), *more]

    @staticmethod
    def apply(inputs: AxisInputs) -> StageCut:
        from .cut import StageCut

        return StageCut(inputs.model, inputs.optimizer, inputs.plan, inputs.context)
