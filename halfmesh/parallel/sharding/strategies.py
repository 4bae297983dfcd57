"""The data strategies that shard: zero1 and fsdp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    cost = "each update sends the new weights to all data ranks"

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
    cost = "each block waits for its weights in forward and again in backward, for every batch of an update"
    keys = (
        *DataStrategy.keys,
        *("param_dtype", "output_dtype", "buffer_dtype", "reshard_after_forward", "prefetch", "cpu_offload"),
        "hybrid",
    )

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
    def find_key_problems(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        data, computes_in = config.parallel.data, config.precision_dtype or "float32"
        for key in ("output_dtype", "reshard_after_forward", "prefetch") if config.parallel.pipeline.size > 1 else ():
            if getattr(data, key) != type(data).model_fields[key].default:
                message = (
                    "FSDP2 does not do this under a pipeline, whose stages call the model's blocks apart; remove it"
                )
                yield f"parallel.data.{key}", message
        if data.buffer_dtype is not None and param_dtype not in (None, getattr(torch, data.buffer_dtype)):
            message = f"{data.buffer_dtype!r} is not what the mode casts the model to ({computes_in}); remove it"
            yield "parallel.data.buffer_dtype", message
        if data.param_dtype not in (None, computes_in):
            message = (
                f"{data.param_dtype!r} is not what the mode computes in ({computes_in}); remove it: the mode decides"
            )
            yield "parallel.data.param_dtype", message
        if config.activation_offload and not config.activation_checkpoint.enabled:
            message = (
                "True with data='fsdp' would move the gathered weights, too, which forward saves; set "
                "activation_checkpoint, which saves inputs only, or use 'zero1'"
            )
            yield "activation_offload", message

    @staticmethod
    def find_size_problems(options: Any, data_ranks: int) -> Iterator[tuple[str, str]]:
        if options.hybrid is not None and data_ranks % options.hybrid:
            fits = ", ".join(str(n) for n in range(1, data_ranks + 1) if data_ranks % n == 0)
            message = f"{options.hybrid} does not divide the {data_ranks} data ranks; use one of {fits}"
            yield "parallel.data.hybrid", message

    @staticmethod
    def find_advice(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        data = config.parallel.data
        if data.reduce_dtype != "float32":
            message = (
                f"gradients are summed over the ranks in {data.reduce_dtype}, where small ones are lost among large "
                "ones; 'float32', the default, is what FSDP2's documentation recommends, also for weights in half "
                "precision"
            )
            yield "parallel.data.reduce_dtype", message
        if param_dtype is None and data.param_dtype in (None, "float32"):
            message = (
                "weights are gathered in float32; bf16 = dict(mode='naive') gathers, sends and holds half as much, "
                "with the parts as fp32 masters, and mode='torch' with param_dtype='bfloat16' gathers in bf16, too"
            )
            yield "parallel.data.param_dtype", message

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
