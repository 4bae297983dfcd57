"""One update of one rank, on tensors without memory and without the other ranks, by `initialize` and the engine."""

from __future__ import annotations

import gc
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.overrides import TorchFunctionMode

from ..config.composition import Setup
from ..engine.initialize import initialize
from ..errors import InputError, find_module
from ..parallel.buckets import give_grads
from ..parallel.pipeline.axis import find_batch_problem
from ..parallel.registries import AXES
from ..utils.tensors import map_tensors, tensors_of
from ..utils.torch_private import has_no_memory
from .model_spec import Built, build_model, call_of
from .tracker import OTHER, Tracker, Traffic, dry_run_mode

if TYPE_CHECKING:
    from ..config import Config
    from ..engine.engine import Engine

CATEGORIES = ("parameters", "masters", "optimizer", "gradients", "communication", "activations", "temporary")
"""Categories of a rank's memory. activations: with the batch. communication: messages over dp and pp. temporary: what
an update needs while it runs, some of it kept for the next."""


@dataclass
class Figures:
    """The memory and communication of one rank.

    Attributes:
        parameters: the number of their elements.
        bytes: by category, each at its largest within an update; the maxima may be at different times.
        kept: bytes between two updates.
        peak: the most bytes at once; None if no update was simulated.
        sent: in one update, by axis ("all": over all ranks).
        rows: of the batch.
        communicators: the axes of each of NCCL's on the rank ("world": of all ranks), if it would run on GPUs.
    """

    parameters: int
    bytes: dict[str, int]
    kept: int
    peak: int | None = None
    sent: dict[str, Traffic] = field(default_factory=dict)
    rows: int = 0
    communicators: tuple[str, ...] = ()

    @property
    def state(self) -> int:
        """Bytes that smaller batches and recomputation do not change: `kept`, and the gradients if known."""
        return self.kept + self.bytes.get("gradients", 0)

    @property
    def needed(self) -> int:
        """Bytes that the rank needs, as far as known."""
        return self.state if self.peak is None else self.peak


def simulate_rank(
    config: Config,
    model: str,
    batch: tuple[str, ...],
    rank: int,
    world_size: int,
    microbatches: int = 0,
    rows: int | None = None,
    limit: int | None = None,
) -> Figures:
    """The figures of one rank. This process has no process group.

    Args:
        model: "package.module:build", see `build_model`.
        microbatches: their number in the pipeline, of the same size; 0: the config's.
        rows: of the batch, instead of those of the model's inputs.
        limit: if the memory kept between two updates is larger (bytes), the update itself is not simulated.

    Raises:
        InputError, IncompatibleConfigError: as `initialize`; or the model cannot be called with these inputs.
    """
    with ExitStack() as scope:
        logger = logging.getLogger("halfmesh")
        scope.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR if rank > 0 else logging.WARNING)  # warnings of one rank; a plan shows the rest
        if world_size > 1:
            dist.init_process_group("fake", rank=rank, world_size=world_size)  # sends to nobody
            scope.callback(dist.destroy_process_group)
        scope.enter_context(dry_run_mode())
        tracker = scope.enter_context(Tracker())
        given, pipeline = build_model(model, batch), config.parallel.pipeline
        if given.batches:
            given = given.with_rows(given.rows if rows is None else rows)
            for problem in find_batch_problem(given.rows, pipeline.microbatches or 1) if pipeline.size > 1 else ():
                raise InputError(f"--batch: {problem}")
            config = Setup.of(config, world_size).accumulate(given.rows).config
            if microbatches and pipeline.microbatches:
                given = given.with_rows(given.rows // pipeline.microbatches * microbatches)
        pipeline = pipeline.model_copy(update={"microbatches": microbatches or pipeline.microbatches})
        length, parallel = config.gradient_accumulation, config.parallel.model_copy(update={"pipeline": pipeline})
        eager = config.compile.model_copy(update={"enabled": False})
        changed = {"gradient_accumulation": min(length, 2), "parallel": parallel, "compile": eager}
        left_out = {"global_batch_size": None, "checkpoint": None, "resume": None}
        config = config.model_copy(update=changed | left_out)
        with FewChunks():
            engine = initialize(given.model, optim.AdamW, given.criterion or _stand_in, config=config, device="cpu")
        engine._hooks.close(None)  # guards and probes look at values
        for axis in engine._parallel.axes.values():
            axis.skip_trial()
        figures = _Simulation(engine, given, tracker, length).run(limit)
        figures.communicators = engine.context.communicators
        return figures


class _Simulation:
    """An update of `engine`, of `length` batches, seen by `tracker`; of the batches the first and the last are run."""

    def __init__(self, engine: Engine, given: Built, tracker: Tracker, length: int) -> None:
        self._engine, self._given, self._tracker, self._length = engine, given, tracker, length
        self._master_weights = engine._update.master_weights
        self._params = [_local(param) for param in engine.model.parameters()]
        tracker.axes = engine.context.groups
        # Other axes send activations: these messages count as activations.
        kinds = [axis for _, axis in AXES.each()]
        tracker.transfers = {"dp", *(k.replica_dim for k in kinds), *(k.dim for k in kinds if k.splits_modules)}

    def run(self, limit: int | None) -> Figures:
        """The figures of an update that is not the first."""
        tracker, engine, given = self._tracker, self._engine, self._given
        self._make_state()
        held = self._label_held()
        batch, numel = _bytes(given.batches), sum(param.numel() for param in engine.model.parameters())
        tracker.begin()
        tracker.sent.clear()
        left = tracker.alive[OTHER] - batch  # memory that one update leaves for the next
        if limit is not None and tracker.total - batch > limit:
            return Figures(numel, held, tracker.total - batch, rows=given.rows)
        if not given.batches:
            held["gradients"] = _bytes([param for param in self._params if param.requires_grad])
            return Figures(numel, held, tracker.total)
        self._compute()
        computing, peak = tracker.largest, tracker.peak
        tracker.begin()
        began = tracker.alive[OTHER]
        engine.step(last=True)
        peak = max(peak, tracker.peak)
        engine.zero_grad()
        gc.collect()
        tracker.look_again()
        sizes = {
            **held,
            **{name: max(computing[name], tracker.largest[name]) for name in ("gradients", "communication")},
            "activations": computing[OTHER] - left,
            "temporary": left + tracker.largest[OTHER] - began,
        }
        return Figures(numel, sizes, tracker.total - batch, peak, tracker.sent, given.rows)

    def _make_state(self) -> None:
        """Create the optimizer's state, by a step whose gradients are zeros."""
        engine = self._engine
        reduces = engine.context.dims.grad_ranks > 1
        reduced = getattr(torch, engine.config.parallel.data.reduce_dtype) if reduces else None
        for shard in self._master_weights.trained:
            if shard.param.requires_grad:
                give_grads([(shard.param, torch.zeros_like(shard.param, dtype=reduced))])
        engine._update.step()
        engine.zero_grad()

    def _label_held(self) -> dict[str, int]:
        """Label the memory that is kept from one update to the next in the tracker. Returns its bytes."""
        tracker, engine = self._tracker, self._engine
        tracker.label(self._master_weights.kept, "masters")
        tracker.label([*self._params, *engine.model.buffers()], "parameters")
        tracker.label(tensors_of(list(engine.optimizer.state.values())), "optimizer")
        return {name: tracker.alive[name] for name in ("parameters", "masters", "optimizer")}

    def _compute(self) -> None:
        """Forward and backward of all batches of an update; of more than two, those between are like the first."""
        tracker, engine = self._tracker, self._engine
        hooks = [
            param.register_post_accumulate_grad_hook(lambda p: tracker.label([p.grad], "gradients", only=OTHER))
            for param in engine.model.parameters()
            if param.requires_grad and _local(param) is param
        ]
        if self._length > 1:
            self._forward_and_backward()
            engine.step()
            for sent in tracker.sent.values():
                sent.add(sent, self._length - 2)
        self._forward_and_backward()
        for hook in hooks:
            hook.remove()
        tracker.label([shard.param.grad for shard in self._master_weights.trained], "gradients")

    def _forward_and_backward(self) -> None:
        engine, given = self._engine, self._given
        inputs, targets = given.batches[0]
        args, kwargs = call_of(inputs)
        try:
            output = engine(*args, **kwargs)
            engine.backward(engine.criterion(output, *(() if given.criterion is None else (targets,))))
        except InputError:
            raise
        except Exception as error:
            shown = map_tensors(lambda t: f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}", (args, kwargs))
            words = ", ".join([*map(str, shown[0]), *(f"{name}={value}" for name, value in shown[1].items())])
            where = find_module(engine.model, error)
            raised = f"{type(error).__name__}: {error}" + (f" (in {where})" if where else "")
            notes = getattr(error, "__notes__", ())
            raise InputError("\n".join([f"--model: calling the model with {words} raised {raised}", *notes])) from error


class FewChunks(TorchFunctionMode):
    """Makes chunks of equal size one tensor, where neither values nor a graph distinguish them.

    FSDP2 splits each parameter into the shards of all ranks and keeps one: on 512 ranks that was most of a dry run.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.chunk and args and has_no_memory(args[0]) and args[0].is_leaf and args[0].numel():
            return _chunk(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _chunk(tensor: torch.Tensor, chunks: int, dim: int = 0) -> list[torch.Tensor]:
    size = -(-tensor.shape[dim] // chunks)
    count, rest = divmod(tensor.shape[dim], size)
    same = [tensor.narrow(dim, 0, size)] * count
    return [*same, tensor.narrow(dim, count * size, rest)] if rest else same


def _local(param: nn.Parameter) -> torch.Tensor:
    """This rank's shard of `param` under fsdp, else `param`."""
    to_local = getattr(param.detach(), "to_local", None)
    return param if to_local is None else to_local().requires_grad_(param.requires_grad)


def _stand_in(output: Any) -> torch.Tensor:
    """The model's loss if it returns one, else the sum of its first output."""
    floats = [tensor for tensor in tensors_of(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not floats:
        raise InputError(
            "--model: no tensor that the model returned requires gradients, so there is no loss for the backward"
        )
    return floats[0] if floats[0].dim() == 0 else floats[0].float().sum()


def _bytes(tree: Any) -> int:
    """Bytes of the storages in `tree`; inputs and targets may share one."""
    storages = {id(held := tensor.untyped_storage()): held for tensor in tensors_of(tree)}
    return sum(held.nbytes() for held in storages.values())
