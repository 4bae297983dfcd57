"""Checks that ranks have the same values, make the same calls, and succeed together. A failed one raises on all ranks.

`same_on_ranks` compares values; `SameCalls` the batches of ranks that compute together; `same_trained` what is trained;
`run_on_all_ranks` and `gather_results` do work on all of them; `broadcast_initial_state` lets them start equal.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn, optim

from ..distributed.env import RankNames, list_ranks
from ..errors import CheckpointError, HalfmeshError, InputError, bullet_list, shorten
from ..utils.tensors import dtype_name, tensors_of
from ..utils.torch_private import foreach_norms, has_no_memory
from .comm import gather_objects, is_simulated

if TYPE_CHECKING:
    from .mesh import ParallelContext

T = TypeVar("T")
ADVICE = (
    "freeze and unfreeze the same parameters on every rank; draw what to freeze with the same seed on all of them, as "
    "in random.Random(0)"
)

# -- values --------------------------------------------------------------------------------------------------------


def digest(tree: Any) -> bytes:
    """The digest of dtypes, shapes and bits of the tensors in `tree`; without tensors, of its repr (nan equals nan)."""
    found, tensors = hashlib.sha256(), tensors_of(tree)
    for tensor in tensors:
        add_tensor(found, tensor)
    if not tensors:
        found.update(repr(tree).encode())
    return found.digest()[:16]


def add_tensor(found: Any, tensor: torch.Tensor) -> None:
    """Add `tensor` to a digest of hashlib; of a sparse, a nested one or one without memory only dtype and shape."""
    found.update(describe_form(tensor).encode())
    if _has_values(tensor) and tensor.numel():
        found.update(as_bytes(tensor).numpy())


def _has_values(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` has elements in memory that can be compared one by one."""
    return tensor.layout == torch.strided and not tensor.is_nested and not has_no_memory(tensor)


def describe_form(tensor: torch.Tensor) -> str:
    """The layout, dtype and shape: "float32 of shape [2, 3]"."""
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} "
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{layout}{dtype_name(tensor.dtype)} of shape {shape}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as one dim of bytes, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same_on_ranks(tree: Any, group: dist.ProcessGroup | None = None, what: str = "") -> bool:
    """Return True if all ranks of `group` (None: all ranks) have the same `tree`, by `digest`. All of them together.

    Args:
        what: raise InputError with this message where they do not; "{ranks}" in it are those that differ from the first
            rank of the group.
    """
    everyone = gather_objects(digest(tree), group)
    others = [index for index, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others and what:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        raise InputError(what.replace("{ranks}", list_ranks(ranks[index] for index in others)))
    return not others


def same_trained(names: Sequence[str], trained: bytes, group: dist.ProcessGroup | None, ranks: RankNames) -> None:
    """Raise InputError if the ranks of `group` (None: all) train different parameters: gradients of different layers
    would be summed.

    Args:
        names: of the parameters.
        trained: one byte per parameter: 1 if it is trained on this rank, else 0.
    """
    of_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    everyone = dict(zip(of_ranks, gather_objects(trained, group), strict=True))
    unlike = [index for index, said in enumerate(zip(*everyone.values(), strict=True)) if len(set(said)) > 1]
    if not unlike:
        return
    trains = [rank for rank, flags in everyone.items() if flags[unlike[0]]]
    freezes = [rank for rank in everyone if rank not in trains]
    more = f" (the first of {len(unlike)} parameters that differ)" if len(unlike) > 1 else ""
    raise InputError(
        f"requires_grad is not the same on all ranks: {names[unlike[0]]!r} is trained on {ranks.names(trains)} and "
        f"frozen on {ranks.names(freezes)}{more}; {ADVICE}"
    )


@torch.no_grad()
def norms(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of each tensor, in float64 [n] on `device`; -1 for nan, and 0 for all but plain tensors of floats."""
    held = list(tensors)
    plain = [type(t.detach()) is torch.Tensor and t.is_floating_point() for t in held]
    found = iter(foreach_norms([t.detach() for t, is_plain in zip(held, plain, strict=True) if is_plain]))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([zero, *(next(found).to(device) if is_plain else zero for is_plain in plain)])[1:].nan_to_num(-1)


def differ(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """For each of `values` [n], True if it differs between the ranks of `group` by more than the order of a sum."""
    ends = torch.stack([values, -values])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    return ends.sum(0) > 1e-8 * ends[0].abs()


# -- batches of ranks that compute together ------------------------------------------------------------------------


def is_checked(number: int) -> bool:
    """Return True if call `number` is checked: the first, the tenth, the hundredth and so on."""
    return str(number).rstrip("0") == "1"


class SameCalls:
    """Compares the model's inputs and outputs over the ranks of a group: in the first call, inputs also in the tenth,
    the hundredth and so on; training and evaluation count separately. Ranks with different inputs would silently mix
    them, and an output that is sharded is not the model's.

    Args:
        group: the ranks.
        what: their name in messages ("tensor group").
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group = group
        self._what = what
        self._inputs_seen: Counter[tuple[bool, str]] = Counter()
        self._outputs_seen: set[bool] = set()

    @torch.compiler.disable
    @torch.no_grad()
    def are_same(self, tree: Any, of: str, training: bool = True) -> bool:
        """Return True if all ranks have the same tensors in `tree`, or if this call, of its kind, is not checked."""
        self._inputs_seen[training, of] += 1
        is_due = is_checked(self._inputs_seen[training, of])
        return not is_due or same_on_ranks(tensors_of(tree), self._group)

    def compare_inputs(self, training: bool, args: Any, kwargs: Any, of: str = "inputs") -> None:
        """Raise InputError on all ranks if the inputs differ; `of`: their name in messages."""
        if not self.are_same((args, kwargs), of, training):
            raise InputError(
                f"the {self._group.size()} ranks of a {self._what} were given different {of}, but they compute one "
                "batch together; iterate engine.dataloader, or shard your loader by engine.context.dp_rank"
            )

    @torch.compiler.disable
    @torch.no_grad()
    def compare_outputs(self, training: bool, output: Any) -> None:
        """Raise InputError on all ranks if outputs differ by more than rounding."""
        if training in self._outputs_seen:
            return
        self._outputs_seen.add(training)
        tensors = [tensor for tensor in tensors_of(output) if not hasattr(tensor, "to_local")]  # sharded on purpose
        chunks = [chunk for t in tensors if _has_values(t) for chunk in (t, *t.detach().reshape(-1).chunk(7))]
        shapes, mine = [tuple(tensor.shape) for tensor in tensors], norms(chunks, torch.device("cpu")).tolist()
        everyone = gather_objects((shapes, mine), self._group)
        is_near = partial(math.isclose, rel_tol=2e-2, abs_tol=1e-6)  # equal up to rounding in bf16
        if not all(others == shapes and all(map(is_near, mine, theirs)) for others, theirs in everyone):
            raise InputError(
                f"the model's output differs between the ranks of a {self._what}: part of it is sharded. Give the last "
                "layer the style 'colwise_gather'; do not return what is between sharded layers (attention weights)"
            )


# -- work that all ranks do together -------------------------------------------------------------------------------


Failure = tuple[str, bool]
"""What an error says, and True if it is an InputError."""


def attempt(work: Callable[[], T]) -> tuple[T | None, Failure | None, Exception | None]:
    """The result of `work`; or the failure, to be told to the other ranks, with the error itself."""
    try:
        return work(), None, None
    except Exception as error:
        words = str(error) if isinstance(error, HalfmeshError) else f"{type(error).__name__}: {error}"
        return None, (words, isinstance(error, InputError)), error


def gather_results(context: ParallelContext, what: str, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank. Returns the result of each rank, on all of them.

    Args:
        what: the beginning of the error message: "saving to here failed".

    Raises:
        CheckpointError, InputError: it failed on some ranks; raised on all, with the reason of each.
    """
    result, failure, error = attempt(work)
    everyone: list[tuple[Any, T]] = gather_objects((failure, result))
    refuse_failures(context, what, {rank: failure for rank, (failure, _) in enumerate(everyone) if failure}, error)
    return [result for _, result in everyone]


def run_on_all_ranks(context: ParallelContext, what: str, work: Callable[[], T]) -> T:
    """As `gather_results`, but returns this rank's result, which is not sent."""
    done: list[T] = []
    gather_results(context, what, lambda: done.append(work()))
    return done[0]


def run_on_rank_zero(context: ParallelContext, what: str, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 alone. Returns its result on all ranks; arguments and errors as of `gather_results`."""
    return gather_results(context, what, lambda: work() if context.rank == 0 else None)[0]  # type: ignore[return-value]


def refuse_failures(context: ParallelContext, what: str, failures: dict[int, Failure], cause: Exception | None) -> None:
    """Raise the error of `gather_results` if there are `failures`, by rank; `cause` is this rank's."""
    if not failures:
        return
    kind = InputError if all(is_input for _, is_input in failures.values()) else CheckpointError
    reasons: dict[str, list[int]] = {}
    for rank, (words, _) in failures.items():
        reasons.setdefault(words, []).append(rank)
    if len(reasons) == 1 and len(failures) == context.size:
        raise kind(f"{what}: {next(iter(reasons))}") from cause
    names = context.rank_names
    raise kind(
        bullet_list(f"{what}:", (f"{names.names(ranks)}: {words}" for words, ranks in reasons.items()))
    ) from cause


# -- the start -----------------------------------------------------------------------------------------------------


def broadcast_initial_state(context: ParallelContext, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Overwrite weights, buffers and optimizer state on all ranks with rank 0's.

    Raises:
        InputError: the ranks hold models or optimizers of different shape; raised on all ranks.
    """
    if context.size == 1 or is_simulated():
        return
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout != torch.strided]
    if sparse:
        raise InputError(f"the buffers {shorten(sparse)} are sparse, which several ranks cannot share; make them dense")
    state = list(_state_tensors(optimizer))
    mine = {
        "the model's parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()],
        "the model's buffers": [(n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()],
        "the optimizer": [type(optimizer).__name__, *map(plain_settings, optimizer.param_groups)],
        "the optimizer's state": [(tuple(t.shape), str(t.dtype)) for t in state],
    }
    for what, value in mine.items():
        same_on_ranks(
            value,
            what=f"{what} must be the same on all ranks, but names, shapes, dtypes or settings on {{ranks}} differ "
            "from rank 0's; build the same model and optimizer on every rank",
        )
    names, trained = zip(*((name, param.requires_grad) for name, param in model.named_parameters()), strict=True)
    same_trained(names, bytes(trained), None, context.rank_names)
    # state_dict would miss non-persistent buffers, and parameters() alone would miss all buffers.
    for tensor in (*model.parameters(), *model.buffers(), *state):
        if not tensor.is_meta:  # a deferred tensor gets its value later
            context.broadcast(tensor)


def _state_tensors(optimizer: optim.Optimizer) -> Iterator[torch.Tensor]:
    """Tensors of the optimizer's state in the order of its parameters."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in optimizer.state:
                yield from (v for v in optimizer.state[param].values() if isinstance(v, torch.Tensor))


def plain_settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """The plain values of a parameter group. (Reprs of objects may have addresses, which differ between ranks.)"""
    values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
    return [(name, value) for name, value in sorted(values.items()) if name != "params" and is_plain(value)]


def is_plain(value: Any) -> bool:
    """Return True if `value` is a number, a string or None, or a tuple or list of these: equal if their reprs are."""
    return (
        value is None
        or isinstance(value, (int, float, str))
        or (isinstance(value, (tuple, list)) and all(map(is_plain, value)))
    )
