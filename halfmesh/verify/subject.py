"""The user's model, batches, criterion and optimizer, built again in each process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.overrides import TorchFunctionMode

from ..dry_run.model_spec import call_builder, find_function
from ..engine.deferred import materialize, named_tensors
from ..engine.recording import recording_of
from ..errors import InputError
from ..utils.log import rank_and_world_size
from ..utils.tensors import count_rows, map_tensors, tensors_of

if TYPE_CHECKING:
    from .run import Case, Given

Batch = tuple[Any, tuple[Any, ...]]
"""Inputs, and the criterion's arguments after the output: the targets, or none."""
NOISE = 0.02
"""Of parameters that are constant, relative to the constant or 1: behind zeros and ones mistakes hide."""
_DROPS = re.compile(r"drop(?!less)")
_DRAWS = re.compile(
    r"^(rand|randn|randint|randperm|bernoulli|multinomial|normal|poisson|exponential|uniform|rrelu)(_|$)"
)
_BENDS = re.compile(r"relu|^hard|threshold|max_pool|^(topk|argmax|round)")


@dataclass
class Subject:
    """A model and how it is trained. `batches`: one, of which rows are drawn; or several, which are used in turn."""

    model: nn.Module
    batches: Sequence[Batch]
    criterion: Callable[..., Any]
    optimizer: Callable[[Any], optim.Optimizer]

    def batch(self, case: Case, update: int, call: int, calls: int) -> Batch:
        """Part `call` of `calls` of an update's batch: of several chunks, or of one the rows of a microbatch."""
        own, parts = case.chunks // calls, calls // case.chunks
        if parts > 1:
            batch = split_rows(self._chunk(case, update, call // parts), parts, call % parts)
        else:
            batch = join([self._chunk(case, update, call * own + chunk) for chunk in range(own)])
        return map_tensors(lambda tensor: tensor.to(case.device), batch)

    def _chunk(self, case: Case, update: int, chunk: int) -> Batch:
        """What a data rank takes at once. Of several batches the next, else rows, as many as microbatches need."""
        number = update * case.chunks + chunk
        if len(self.batches) > 1:
            return self.batches[number % len(self.batches)]
        whole = count_rows(self.batches[0])
        rows = -(-whole // case.microbatches) * case.microbatches
        # By chance, so that chunks have unequally many of what a loss ignores; but no two have the same rows.
        order = torch.randint(whole, (rows,), generator=torch.Generator().manual_seed(number))
        order[order == number % whole] = order[0] = (number + 1) % whole
        return map_tensors(lambda t: t[order.to(t.device)] if t.dim() and len(t) == whole else t, self.batches[0])


def make_subject(given: Given, case: Case, weights: Mapping[str, torch.Tensor] | None = None) -> Subject:
    """Call the user's functions; `weights`: see `prepare`. Raises InputError if they return what cannot be trained."""
    build, optimizer = given.build, given.optimizer
    torch.manual_seed(rank_and_world_size()[0])  # ranks but the first keep the weights that they build: rank 0's count
    name = f"--model {build}" if isinstance(build, str) else getattr(build, "__qualname__", "build")
    built = call_builder(find_function(build) if isinstance(build, str) else build, name, "for real")
    model, criterion = built.model, built.criterion
    if not built.batches:
        raise InputError(
            f"{name}: it returned no batch to train on; return (model, inputs) or (model, (inputs, targets), criterion)"
        )
    materialize(model)
    tensors = [*(tensor for _, tensor in named_tensors(model)), *tensors_of(built.batches)]
    if any(tensor.is_meta or recording_of(tensor) is not None for tensor in tensors):
        raise InputError(
            f"{name}: its model or batch has no values; build the model under halfmesh.deferred_init(), not on the "
            "meta device, and the batch outside of it"
        )
    prepare(case, model, criterion, weights)
    batches = [(inputs, () if criterion is None else (targets,)) for inputs, targets in built.batches]
    if isinstance(optimizer, str):
        optimizer = find_function(optimizer, "--optimizer")
    sgd = optimizer or (lambda params: optim.SGD(params, lr=0.05, momentum=0.9))
    return Subject(model, batches, criterion or own_loss, sgd)


def own_loss(output: Any) -> torch.Tensor:
    """The model's own loss where it returns one, else the mean square of its first output."""
    floats = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    if not floats:
        raise InputError("the model returned no floating-point tensor, so there is no loss for the backward")
    return floats[0] if floats[0].dim() == 0 else F.mse_loss(floats[0], torch.zeros_like(floats[0]))


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating-point tensors in `dtype`."""
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
def prepare(case: Case, model: nn.Module, criterion: Any, weights: Mapping[str, torch.Tensor] | None) -> None:
    """Make a model comparable: no dropout, no constant parameters, operators that have float64; on rank 0 `weights`, if
    there are some; and what the case asks for."""
    if callable(choose := getattr(model, "set_experts_implementation", None)):
        choose("eager")  # grouped products have no float64 on a CPU
    for module in model.modules():
        drops = _DROPS.search(type(module).__name__.lower())
        for name, value in list(vars(module).items()):
            if (isinstance(value, float) and _DROPS.search(name)) or (name == "p" and drops):
                setattr(module, name, 0.0)
    generator = torch.Generator().manual_seed(7)
    for param in model.parameters():
        if param.requires_grad and param.is_floating_point() and param.numel() > 1 and param.min() == param.max():
            noise = torch.randn(param.shape, generator=generator).to(param)
            param.add_(noise * NOISE * param.flatten()[0].abs().clamp_min(1))
    if weights is not None and rank_and_world_size()[0] == 0:
        for name, tensor in named_tensors(model):
            tensor.copy_(weights[name])
    for module in (one for one in (model, criterion) if isinstance(one, nn.Module)):
        module.to(dtype=case.dtype)
    if case.eps:
        perturb(model, case.eps)


def perturb(model: nn.Module, eps: float) -> None:
    """Move the outputs of the embedding or convolution that is called first, or else of the first layer, by up to `eps`
    of themselves."""
    kinds: list[tuple[type, ...]] = [(nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.Linear,), (nn.Module,)]
    leaves = [module for module in model.modules() if not list(module.children())]
    some = next(found for kind in kinds if (found := [module for module in leaves if isinstance(module, kind)]))
    generator, first = torch.Generator().manual_seed(5), list[nn.Module]()

    def move(layer: nn.Module, inputs: Any, output: Any) -> Any:
        first[:] = first or [layer]
        if layer is not first[0] or not isinstance(output, torch.Tensor):
            return output
        noise = torch.rand(output.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (output * (1 + eps * noise.to(output.device))).to(output.dtype)

    for layer in some:
        layer.register_forward_hook(move)


class Undropped(TorchFunctionMode):
    """A scope in which functions that drop activations return them; others that draw random numbers are named in
    `drawn`, and those whose gradients jump in `bends`. With `lifts` casts to float32 go to float64."""

    def __init__(self, lifts: bool) -> None:
        super().__init__()
        self._lifts = lifts
        self.drawn: dict[str, None] = {}
        self.bends: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each function of torch."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name and args:
            return args[0]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:])
            kwargs = kwargs if len(args) > 4 else {**kwargs, "dropout_p": 0.0}
        elif _DRAWS.match(name):
            self.drawn[name] = None
        elif _BENDS.search(name):
            self.bends[name] = None
        if self._lifts:
            if func is torch.Tensor.float:
                return args[0].double()
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
