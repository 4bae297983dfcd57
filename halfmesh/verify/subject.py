"""The user's model, batches, criterion and optimizer, built again in each process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.overrides import TorchFunctionMode

from ..config import Config
from ..dry_run.model_spec import call_builder, find_function
from ..engine.deferred import materialize, named_tensors
from ..errors import InputError
from ..utils.log import rank_and_world_size
from ..utils.tensors import count_rows, map_tensors, tensors_of
from ..utils.torch_private import BATCH_NORMS
from . import layout

Batch = tuple[Any, tuple[Any, ...]]
"""Inputs, and the criterion's arguments after the output: the targets, or none."""
NOISE = 0.02
"""Of parameters that are constant, relative to the constant or 1: behind zeros and ones mistakes hide."""
_DROPS = re.compile(r"drop(?!less)")
_BENDS = re.compile(r"relu|^hard|threshold|max_pool|^(topk|argmax|round)")


@dataclass(frozen=True)
class Case:
    """The runs of one phase, the same in every process.

    Attributes:
        given: what is trained: `Given`, or a `Script`.
        config: of the layout, settled.
        data_ranks: of the layout.
        start: the folder of what all runs begin with, once the first has written it.
        dtype: of model and inputs, in the proof of the structure; None: as they are built.
        overflows: the update in which the loss is inf on the last rank; None: none.
        eps: outputs of the first layer are moved by up to this share of themselves.
        batch_norms: modules whose statistics are those of a call: their classes, by name.
    """

    given: Any
    config: Config
    data_ranks: int
    updates: int
    device: str
    start: Path
    dtype: torch.dtype | None = torch.float64
    overflows: int | None = None
    eps: float = 0.0
    batch_norms: Mapping[str, str] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """Of an update's batch: data ranks x accumulation."""
        return self.data_ranks * self.config.gradient_accumulation

    @property
    def microbatches(self) -> int:
        """In which a pipeline splits a chunk."""
        pipeline = self.config.parallel.pipeline
        return pipeline.microbatches or 1 if pipeline.size > 1 else 1


@dataclass
class Subject:
    """A model and how it is trained. `batches`: one, of which rows are drawn; or several, which are used in turn."""

    model: nn.Module
    batches: Sequence[Batch]
    criterion: Any
    optimizer: Any

    def batch(self, case: Case, update: int, call: int, calls: int) -> Batch:
        """Part `call` of `calls` of an update's batch: of several chunks, or of one the rows of a microbatch."""
        own, parts = max(1, case.chunks // calls), max(1, calls // case.chunks)
        batch = join([self._chunk(case, update, call // parts * own + chunk) for chunk in range(own)])
        batch = split_rows(batch, parts, call % parts)
        return map_tensors(lambda tensor: tensor.to(case.device), batch)

    def _chunk(self, case: Case, update: int, chunk: int) -> Batch:
        """A data rank's batch. Of several batches the next, else rows, as many as microbatches need."""
        number = update * case.chunks + chunk
        if len(self.batches) > 1:
            return self.batches[number % len(self.batches)]
        whole = count_rows(self.batches[0])
        rows = -(-whole // case.microbatches) * case.microbatches
        # By chance, so that chunks have unequally many of what a loss ignores; but no two have the same rows.
        order = torch.randint(whole, (rows,), generator=torch.Generator().manual_seed(number))
        order[order == number % whole] = order[0] = (number + 1) % whole
        return map_tensors(lambda t: t[order.to(t.device)] if t.dim() and len(t) == whole else t, self.batches[0])


@dataclass(frozen=True)
class Given:
    """The user's builder and optimizer: see `verify`."""

    build: str | Callable[[], Any]
    optimizer: str | Callable[[Any], optim.Optimizer] | None = None
    is_script = False

    @property
    def preload(self) -> str:
        """A module, or a function in one, for the server of processes."""
        return self.build if isinstance(self.build, str) else f"{self.build.__module__}:{self.build.__qualname__}"

    def survey(self, case: Case) -> tuple[Config, dict[str, str]]:
        """Write weights and batches for all runs. Returns the settled config, and what `find_batch_norms` does. Raises
        InputError if the builder is wrong."""
        subject = self.make(case)
        rows = count_rows(subject.batches[0])
        if len(subject.batches) == 1 and rows < 2 and case.chunks > 1:
            raise InputError("the batch has one row, which proves nothing; return several rows, or a list of batches")
        torch.save((dict(named_tensors(subject.model)), subject.batches), case.start / "model")
        return layout.settle(case.config, rows * case.data_ranks), find_batch_norms(subject.model)

    def make(self, case: Case) -> Subject:
        """Call the user's functions. Raises InputError if they return what cannot be trained."""
        build, optimizer = self.build, self.optimizer
        torch.manual_seed(rank_and_world_size()[0])  # ranks but the first keep what they build: rank 0's count
        name = f"--model {build}" if isinstance(build, str) else getattr(build, "__qualname__", "build")
        built = call_builder(find_function(build) if isinstance(build, str) else build, name, "for real")
        if not built.batches:
            raise InputError(
                f"{name}: it returned no batch; return (model, inputs) or (model, (inputs, targets), criterion)"
            )
        materialize(built.model)
        has_targets = built.criterion is not None
        batches = [(inputs, (targets,) if has_targets else ()) for inputs, targets in built.batches]
        if isinstance(optimizer, str):
            optimizer = find_function(optimizer, "--optimizer")
        sgd = optimizer or (lambda params: optim.SGD(params, lr=0.05, momentum=0.9))
        return Subject(built.model, batches, built.criterion, sgd)


def find_batch_norms(model: nn.Module) -> dict[str, str]:
    """The modules that normalize each batch separately: their classes, by name."""
    return {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)}


def make_subject(case: Case) -> Subject:
    """The model, comparable, and the batches of all runs."""
    weights, batches = torch.load(case.start / "model", case.device, weights_only=False)
    subject: Subject = case.given.make(case)
    criterion = subject.criterion if batches[0][1] else own_loss
    prepare(case, subject.model, criterion, weights)
    return replace(subject, batches=cast(batches, case.dtype), criterion=criterion)


def own_loss(output: Any) -> torch.Tensor:
    """The model's own loss where it returns one, else the mean square of its first output."""
    floats = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    if not floats:
        raise InputError("the model returned no floating-point tensor to make a loss of")
    return floats[0] if floats[0].dim() == 0 else F.mse_loss(floats[0], torch.zeros_like(floats[0]))


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """`tree` with its floating-point tensors in `dtype`, if there is one."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def join(batches: Sequence[Any]) -> Any:
    """The rows of several batches in one. Raises RuntimeError if their shapes do not fit."""
    rows = [count_rows(batch) for batch in batches]
    columns = iter(list(zip(*map(tensors_of, batches), strict=True)))

    def put(_: torch.Tensor) -> torch.Tensor:
        parts = next(columns)
        has_rows = all(part.dim() and len(part) == n for part, n in zip(parts, rows, strict=True))
        return torch.cat(parts) if has_rows else parts[0]

    return map_tensors(put, batches[0]) if len(batches) > 1 else batches[0]


def split_rows(tree: Any, pieces: int, piece: int) -> Any:
    """The rows of one of `pieces` pieces of a batch."""
    rows = count_rows(tree)
    return map_tensors(lambda t: t.chunk(pieces)[piece] if t.dim() and len(t) == rows else t, tree)


@torch.no_grad()
def prepare(case: Case, model: nn.Module, criterion: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Make a model comparable: no dropout, no constant parameters, operators that have float64; on rank 0 `weights`;
    and what the case asks for."""
    if callable(choose := getattr(model, "set_experts_implementation", None)):
        choose("eager")  # grouped products have no float64 on a CPU
    for module in model.modules():
        drops = _DROPS.search(type(module).__name__.lower())
        for name, value in list(vars(module).items()):
            if (isinstance(value, float) and _DROPS.search(name)) or (name == "p" and drops):
                setattr(module, name, 0.0)
    for name, tensor in named_tensors(model) if rank_and_world_size()[0] == 0 else ():
        tensor.copy_(weights[name])
    generator = torch.Generator().manual_seed(7)
    for param in model.parameters():
        if param.requires_grad and param.is_floating_point() and param.numel() > 1 and param.min() == param.max():
            noise = torch.randn(param.shape, generator=generator).to(param)
            param.add_(noise * NOISE * param.flatten()[0].abs().clamp_min(1))
    for module in (one for one in (model, criterion) if isinstance(one, nn.Module)):
        module.to(dtype=case.dtype)
    if case.eps:
        perturb(model, case.eps)


def perturb(model: nn.Module, eps: float) -> None:
    """Move the outputs of the embedding or convolution that is called first, or else of the first layer, by up to `eps`
    of themselves."""
    leaves = [module for module in model.modules() if not list(module.children())]
    inner: list[nn.Module] = [one for one in leaves if isinstance(one, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    generator, first = torch.Generator().manual_seed(5), list[nn.Module]()

    def move(layer: nn.Module, inputs: Any, output: Any) -> Any:
        first[:] = first or [layer]
        if layer is not first[0] or not isinstance(output, torch.Tensor):
            return output
        noise = torch.rand(output.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (output * (1 + eps * noise.to(output.device))).to(output.dtype)

    for layer in inner or [one for one in leaves if isinstance(one, nn.Linear)] or leaves:
        layer.register_forward_hook(move)


class Undropped(TorchFunctionMode):
    """A scope in which functions that drop activations return them; `bends`: gradients of others jump. With `lifts`
    casts to float32 go to float64."""

    def __init__(self, lifts: bool) -> None:
        super().__init__()
        self._lifts = lifts
        self.bends = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each function of torch."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":  # an attribute, most of all calls
            return func(*args, **kwargs)
        if "dropout" in name and args:
            return args[0]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:])
            kwargs = kwargs if len(args) > 4 else {**kwargs, "dropout_p": 0.0}
        self.bends |= _BENDS.search(name) is not None
        # Casts only: a pipeline sends integers as views in float32, and makes memory for them.
        casts = args and isinstance(args[0], torch.Tensor) and args[0].dtype != torch.float32 and name != "view"
        if self._lifts and casts:
            if func is torch.Tensor.float:
                return args[0].double()
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
