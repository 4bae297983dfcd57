"""Fully sharded data parallelism as a data strategy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InputError
from ...shard import ParamShard
from ..data_strategy import DataStrategy, StrategyInputs
from ..reducer import ReduceOptions, Reducer
from ..shard_spec import Placement
from .fsdp_wrap import ShardOptions, Units, find_problems, make_mesh
from .fully_shard import FullyShard


class FSDP(DataStrategy):
    """Weights, gradients and optimizer state are sharded; each block gathers its weights before it computes."""

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
        self.publisher = self.sharded = FullyShard(inputs, mesh, units, options)
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
                    "FSDP2 does not support this under a pipeline, whose stages call the blocks separately; remove it"
                )
                yield f"parallel.data.{key}", message
        if data.buffer_dtype is not None and param_dtype not in (None, getattr(torch, data.buffer_dtype)):
            message = (
                f"{data.buffer_dtype!r} is not the dtype that the mode casts the model to ({computes_in}); remove it"
            )
            yield "parallel.data.buffer_dtype", message
        if data.param_dtype not in (None, computes_in):
            message = (
                f"{data.param_dtype!r} is not the dtype that the mode computes in ({computes_in}); remove it: the mode "
                "decides"
            )
            yield "parallel.data.param_dtype", message
        if config.activation_offload and not config.activation_checkpoint.enabled:
            message = (
                "True with data='fsdp' would also offload the gathered weights that forward saves; set "
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
    ) -> FSDPReducer:
        self.sharded.withholds = withholds
        context = self.inputs.context
        return FSDPReducer(self.sharded, shards, buffers, context.dp_group, self.inputs.reduce, context.device)

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
        if _met_freed_storage(error):
            raise InputError(
                "backward needs weights that FSDP2 has given up, which it gathers where it sees the gradient of a "
                "block's output. Either a module returns tensors within an object that it cannot look into: return "
                "tensors, tuples, lists or dicts (dataclasses since torch 2.13). Or gradients of gradients were asked "
                "for (torch.autograd.grad with create_graph=True), which weights in parts do not give: use data='zero1'"
            ) from error

    def undo(self) -> None:
        self.sharded.undo()


def _met_freed_storage(error: BaseException) -> bool:
    """Whether `error`, or its cause, says that the memory of a tensor was freed."""
    seen: BaseException | None = error
    while seen is not None:
        if "are out of bounds for storage of size 0" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class FSDPReducer(Reducer):
    """`halfmesh.parallel.gradient_sums.Reduction` of a model that FSDP2 shards: it reduces only
    parameters that are left whole, and running statistics.

    Raises:
        InputError: a cycle ends without FSDP2 being told before its last backward; parameters were put into the
            optimizer that are not sharded; the model failed in the middle of a step.
    """

    def __init__(
        self,
        sharded: FullyShard,
        shards: Sequence[ParamShard],
        buffers: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        options: ReduceOptions,
        device: torch.device,
    ) -> None:
        self._sharded = sharded
        self._device = device
        self._own_stale = False
        self._is_open = False
        self._is_sent = False
        self._is_broken = False
        super().__init__(shards, buffers, group, options)

    @property
    def stale(self) -> bool:
        """Whether gradients arrived since `finish`, of whole or of sharded parameters."""
        return self._own_stale or (self._finished and self._sharded.was_used)

    @stale.setter
    def stale(self, value: bool) -> None:
        self._own_stale = value

    def cover(self, shards: Sequence[ParamShard]) -> None:
        super().cover(self._sharded.left_whole(shards))

    def covers(self, shards: Sequence[ParamShard]) -> bool:
        return super().covers(self._sharded.left_whole(shards))

    def open(self, last: bool) -> None:
        if self._is_broken:
            raise InputError(
                "the gradients of an update were dropped before its end (an error in backward, or load_state_dict "
                "between two microbatches); under data='fsdp' some of them are on their way to others, so that the "
                "ranks do not agree any more; end the run"
            )
        self._sharded.refuse_lost_changes()
        self._is_open, self._is_sent = True, last
        self._sharded.announce(last)
        super().open(last)

    def expect_last(self, params: Collection[nn.Parameter]) -> None:
        self._sharded.announce(True, params)

    def expect_rest(self, params: Collection[nn.Parameter]) -> None:
        self._is_sent = True
        super().expect_rest(params)

    def finish(self) -> None:
        if not self._is_sent:
            raise InputError(
                "engine.step(last=True) ended a cycle whose last backward had run already; under data='fsdp' gradients "
                "are summed in that backward, which has to be told before. Let engine.dataloader feed the loop (it "
                "knows its end), give it as many batches as gradient_accumulation divides, or use data='zero1'"
            )
        if self._finished:
            raise InputError(
                "gradients were added by a backward outside this engine after those of the update had been summed "
                "(data='fsdp'); call engine.backward(loss) for every loss"
            )
        used = self._sharded.used
        counts = torch.tensor(used, dtype=torch.float32).to(self._device, non_blocking=True)
        work = self._all_reduce(counts, divide=False)
        super().finish()
        work.wait()
        self._sharded.take_grads([1.0] * len(used) if all(used) else counts.tolist())
        self._is_open = False

    def forget(self) -> None:
        super().forget()
        self._is_broken |= self._is_open
