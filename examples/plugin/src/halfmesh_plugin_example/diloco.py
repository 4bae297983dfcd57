"""A data strategy: DiLoCo (https://arxiv.org/abs/2311.08105), for data ranks that are far apart.

Each data rank steps its own copy of the weights with its own gradients. Only every `inner_steps` updates, a round, the
ranks meet: their changes are averaged, and an outer optimizer, SGD with Nesterov momentum, takes the average for its
gradient. So they send 1 / `inner_steps` of what `replicate` sends.

Within a round the ranks' weights differ: saves are rejected, a signal or `engine.preempt()` ends the run after it, and
an evaluation is of each rank's own. A checkpoint has the outer momentum, and of the inner optimizers' states one;
all ranks of a resumed run go on with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn

from halfmesh import Options
from halfmesh.options import PositiveFloat, PositiveInt
from halfmesh.parallel.data_strategy import DataStrategy, StrategyInputs
from halfmesh.parallel.reducer import Reduction
from halfmesh.utils.param_shard import ParamShard

MOMENTUM = "outer_momentum"
"""In the inner optimizer's state, with which it is saved."""


class DiLoCoOptions(Options):
    """What may stand in `parallel.data` beside `strategy="diloco"`."""

    inner_steps: PositiveInt = 20
    """Updates of a round."""
    outer_lr: PositiveFloat = 0.7
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


class DiLoCo(DataStrategy):
    """The optimizer given is the inner one; each rank has a whole one."""

    options = DiLoCoOptions
    modes = ("torch",)  # weights are in fp32: the outer step writes into what the model computes with
    cost = "nothing but an average of all weights every inner_steps updates"

    def __init__(self, inputs: StrategyInputs) -> None:
        super().__init__(inputs)
        self.publisher = self
        self._steps = 0  # of this round
        self._has_stepped = False
        self._begun: dict[nn.Parameter, torch.Tensor] = {}  # the weights at the begin of this round
        inputs.optimizer.register_step_post_hook(self._count)
        inputs.optimizer.register_load_state_dict_post_hook(self._begin_round)

    @staticmethod
    def find_key_problems(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        for axis, size in config.parallel.sizes.items():
            if size > 1:
                yield f"parallel.{axis}", "diloco has not been tried with it; leave one of the two out"
        if config.loss_reduction != "mean":
            yield "loss_reduction", "diloco averages changes of weights, which makes means; use 'mean'"
        if config.debug == "sync":
            yield "debug", "under diloco ranks differ within a round; remove it"
        saves, length = config.checkpoint, config.parallel.data.inner_steps
        if saves is not None and saves.every is not None and saves.every % length:
            yield "checkpoint.every", f"diloco's ranks have equal weights every {length} updates; use a multiple"

    @staticmethod
    def find_size_problems(options: Any, data_ranks: int) -> Iterator[tuple[str, str]]:
        if data_ranks == 1:
            yield (
                "parallel.data.strategy",
                "on one data rank diloco would be 'replicate', without outer steps",
            )

    @staticmethod
    def find_problems(model: nn.Module, param_dtype: torch.dtype | None) -> Iterator[str]:
        for name, module in model.named_modules():
            if getattr(module, "running_mean", None) is not None:
                yield f"{name}: diloco does not average running statistics; use GroupNorm or LayerNorm"

    def make_reducer(
        self, shards: Sequence[ParamShard], buffers: Mapping[str, torch.Tensor], withholds: bool
    ) -> Reduction:
        return Reduction()  # a rank's own gradients are complete

    @property
    def exchange(self) -> str:
        return f"weights averaged every {self.inputs.options.inner_steps} updates"

    @property
    def diverged(self) -> str:
        length = self.inputs.options.inner_steps
        return f"diloco's ranks have equal weights every {length} updates; call it then" if self._steps else ""

    # -- the publisher -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Weights are written: by an update, or by a load, which leaves `_steps` at 0."""
        if self._steps == 0:
            params = [param for group in self.inputs.optimizer.param_groups for param in group["params"]]
            self._begun = {param: param.detach().clone() for param in params if param.requires_grad}

    def stepped(self, shards: Sequence[ParamShard]) -> None:
        """Nothing is sent yet."""

    def finish(self) -> None:
        """Count the update; the last one of a round is followed by the outer step."""
        self._steps += self._has_stepped
        self._has_stepped = False
        if self._steps == self.inputs.options.inner_steps:
            self._outer_step()
            self._begin_round()

    @torch.no_grad()
    def _outer_step(self) -> None:
        options, state = self.inputs.options, self.inputs.optimizer.state
        changes = torch.cat([(begun - param).float().flatten() for param, begun in self._begun.items()])
        dist.all_reduce(changes, group=self.inputs.group)
        changes /= self.inputs.mean_over
        parts = changes.split([param.numel() for param in self._begun])
        for (param, begun), part in zip(self._begun.items(), parts, strict=True):
            change = part.view(param.shape).to(param.dtype)
            if MOMENTUM not in state[param]:
                state[param][MOMENTUM] = torch.zeros_like(param)
            momentum = state[param][MOMENTUM].mul_(options.outer_momentum).add_(change)
            param.copy_(begun - options.outer_lr * (change + options.outer_momentum * momentum))

    def _count(self, *_: Any) -> None:
        self._has_stepped = True  # torch calls it for each bucket of an update

    def _begin_round(self, *_: Any) -> None:
        self._steps, self._begun = 0, {}
