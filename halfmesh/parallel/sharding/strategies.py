"""The data strategies that shard: zero1 and fsdp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ...launching.failures import is_timeout
from ...shard import ParamShard
from ..data_strategy import DataStrategy, StrategyInputs
from ..shard_spec import Placement
from .explain import note_unit, refuse_given_up
from .fsdp import FullyShard
from .reducers import ShardReducer, SliceReducer
from .units import ShardOptions, Units, find_problems, make_mesh
from .zero1 import Slices


class Zero1(DataStrategy):
    """Each data rank steps a part of the weights, and holds optimizer state and masters of that part."""

    shards_state = True

    def __init__(self, inputs: StrategyInputs) -> None:
        super().__init__(inputs)
        group = inputs.context.dp_group
        self.publisher = self.slices = Slices(inputs.shards, inputs.optimizer, group, inputs.reduce, inputs.tied)
        self.shards = self.slices.shards

    def make_reducer(
        self, shards: Sequence[ParamShard], buffers: Mapping[str, torch.Tensor], withholds: bool
    ) -> SliceReducer:
        return SliceReducer(self.slices, shards, buffers, self.inputs.context.dp_group, self.inputs.reduce)

    def placement(self, shard: ParamShard, source: Placement) -> Placement:
        assert shard.source is not None
        whole = shard.source.param
        return source.run(whole.shape, whole.stride(), shard.start, shard.start + shard.param.numel())

    def compared(self, shard: ParamShard) -> ParamShard:
        return shard.source or shard

    @property
    def text(self) -> str:
        return f", each data rank steps 1/{self.inputs.context.dp_size} of it (zero1)"

    def follow(self) -> None:
        self.slices.follow()

    def undo(self) -> None:
        self.slices.undo()


class FSDP(DataStrategy):
    """Weights, gradients and optimizer state in parts; each block gathers its weights before it computes."""

    shards_state = shards_model = True

    def __init__(self, inputs: StrategyInputs) -> None:
        self.inputs = inputs
        data, context = inputs.options, inputs.context

        def dtype(name: str | None) -> torch.dtype | None:
            return None if name is None else getattr(torch, name)

        options = ShardOptions(
            param_dtype=inputs.param_dtype or dtype(data.param_dtype),
            cast_inputs=inputs.param_dtype is None,
            output_dtype=dtype(data.output_dtype),
            buffer_dtype=dtype(data.buffer_dtype),
            reshard_after_forward=data.reshard_after_forward,
            prefetch=data.prefetch,
            cpu_offload=data.cpu_offload,
        )
        mesh, units = make_mesh(context, data.hybrid), Units(inputs.blocks, inputs.not_called)
        self.publisher = self.sharded = FullyShard(
            inputs.model, inputs.shards, inputs.optimizer, mesh, units, options, inputs.reduce, inputs.make
        )
        inputs.finish()
        self.sharded.move(context.device)
        self.sharded.tell_dtypes()
        self.shards = self.sharded.shards

    @staticmethod
    def find_problems(model: nn.Module, param_dtype: torch.dtype | None) -> Iterator[str]:
        return find_problems(model, casts=param_dtype is not None)

    def make_reducer(
        self, shards: Sequence[ParamShard], buffers: Mapping[str, torch.Tensor], withholds: bool
    ) -> ShardReducer:
        self.sharded.withholds = withholds
        context = self.inputs.context
        return ShardReducer(self.sharded, shards, buffers, context.dp_group, self.inputs.reduce, context.device)

    def placement(self, shard: ParamShard, source: Placement) -> Placement:
        assert shard.source is not None
        start = self.sharded.first_row(len(shard.source.param))
        return source.rows(start, start + len(shard.param))

    @property
    def update_device(self) -> torch.device:
        return torch.device("cpu") if self.inputs.options.cpu_offload else self.inputs.context.device

    @property
    def text(self) -> str:
        data, where = self.inputs.options, " in host memory" if self.inputs.options.cpu_offload else ""
        return f", in parts{where} over {data.hybrid or self.inputs.context.dp_size} data ranks (fsdp)"

    def follow(self) -> None:
        self.sharded.refuse_other_memory()

    def explain(self, error: RuntimeError) -> None:
        refuse_given_up(error)
        if is_timeout(error):
            note_unit(error, self.sharded.model)

    def undo(self) -> None:
        self.sharded.undo()
