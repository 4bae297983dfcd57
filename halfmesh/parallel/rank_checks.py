"""Checks that ranks have the same values, make the same calls, and succeed together. A failed one raises on all ranks.

`same_on_ranks` compares values; `SameCalls` the batches of ranks that compute together; `same_trained` what is trained;
`NamedCalls` which call of the engine the ranks make; `run_on_all_ranks` and `gather_results` do work on all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ..distributed.env import RankNames, list_ranks
from ..distributed.failures import ANSWER_S
from ..errors import CheckpointError, HalfmeshError, InputError, bullet_list
from ..utils.log import get_logger
from ..utils.tensors import dtype_name, tensors_of
from ..utils.torch_private import foreach_norms, has_no_memory
from .objects import gather_objects

if TYPE_CHECKING:
    from .mesh import ParallelContext

T = TypeVar("T")
_log = get_logger(__name__)
ADVICE = (
    "freeze and unfreeze the same parameters on every rank; draw what to freeze with the same seed on all of them, as "
    "in random.Random(0)"
)
LOOK_S = 0.5
"""Seconds between two checks for ranks that have ended."""
PATIENCE_S = 10.0
"""Seconds after which a warning names the ranks that are missing."""

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
    others = [place for place, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others and what:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        raise InputError(what.replace("{ranks}", list_ranks(ranks[place] for place in others)))
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
                "batch together; iterate engine.dataloader, or shard a loader of your own by engine.context.dp_rank of "
                "engine.context.dp_size, and draw with the same seed what the loop itself draws (mixup)"
            )

    @torch.compiler.disable
    @torch.no_grad()
    def compare_outputs(self, training: bool, output: Any) -> None:
        """Raise InputError on all ranks if outputs differ by more than rounding."""
        if training in self._outputs_seen:
            return
        self._outputs_seen.add(training)
        mine = [(tuple(tensor.shape), _norms_of_parts(tensor)) for tensor in tensors_of(output)]
        if not all(_is_near(mine, theirs) for theirs in gather_objects(mine, self._group)):
            raise InputError(
                f"the model's output differs between the ranks of a {self._what}: part of it is sharded. Give the last "
                "layer the style 'colwise_gather' if it has 'colwise'; do not return what is between sharded layers "
                "(hidden states under sequence_parallel, attention weights)"
            )


def _norms_of_parts(tensor: torch.Tensor) -> tuple[float, ...]:
    """Norms of a tensor and of seven chunks of it, to distinguish two tensors."""
    if not _has_values(tensor) or not tensor.is_floating_point():
        return ()
    flat = tensor.detach().reshape(-1).float()
    return tuple(float(torch.linalg.vector_norm(part)) for part in (flat, *flat.chunk(7)))


def _is_near(mine: list[Any], theirs: list[Any]) -> bool:
    """Return True if shapes are equal, and finite norms are equal up to rounding in bf16."""
    if [shape for shape, _ in mine] != [shape for shape, _ in theirs]:
        return False
    pairs = [pair for (_, a), (_, b) in zip(mine, theirs, strict=True) for pair in zip(a, b, strict=True)]
    return all(math.isclose(a, b, rel_tol=2e-2, abs_tol=1e-6) for a, b in pairs if math.isfinite(a + b))


# -- calls of the engine -------------------------------------------------------------------------------------------


class NamedCalls:
    """Compares the collective calls of one engine over its ranks, by name, before anything is sent: the messages of
    `if rank == 0: engine.save(...)` would mix with those of training on the other ranks. It uses the store of the
    process group, and no collective.

    Args:
        name: the engine's, the same on all ranks.
        timeout_s: the seconds that a rank waits for the other ranks.
        told: the last word of each other rank that has told one: see `FailureWatch.told`.
    """

    def __init__(self, name: str, rank: int, size: int, timeout_s: float, told: Callable[[], dict[int, str]]) -> None:
        group: Any = dist.group.WORLD
        store = group.get_group_store().clone()  # a separate connection: the other one may be blocked in a wait
        self._store = dist.PrefixStore(f"halfmesh/calls/{name}", store)
        self._rank, self._size = rank, size
        self._timeout_s = timeout_s
        self._told = told
        self._number = 0

    def agree_on(self, call: str) -> None:
        """Return when all ranks make this `call`.

        Raises:
            InputError: some make another call, have ended, or make none within the timeout.
            ConnectionResetError: some have failed.
        """
        self._number += 1
        everyone = f"everyone_{self._number}"
        self._store.set(f"call_{self._rank}", f"{self._number} {call}")
        if self._store.add(f"came_{self._number}", 1) == self._size:  # the last one reads the calls of all
            said = [self._store.get(f"call_{rank}").decode().partition(" ")[2] for rank in range(self._size)]
            self._store.set(everyone, json.dumps(said))
        self._wait_for(everyone, call)
        calls: dict[str, list[int]] = {}
        for rank, theirs in enumerate(json.loads(self._store.get(everyone))):
            calls.setdefault(theirs, []).append(rank)
        if len(calls) > 1:
            (first, ranks), *rest = calls.items()
            others = ", and ".join(f"{other} on {list_ranks(theirs)}" for other, theirs in rest)
            raise InputError(
                f"{first} was called on {list_ranks(ranks)}, and {others}; call each on every rank, in the same order"
            )

    def _wait_for(self, key: str, call: str) -> None:
        begun, pause, look, silent_since, has_warned = time.monotonic(), 0.001, LOOK_S, 0.0, False
        while not self._store.check([key]):  # no `wait`: torch prints each time that it ends without the key
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            waited = time.monotonic() - begun
            if waited < look:
                continue
            look = waited + LOOK_S
            told = self._told()
            failed = [rank for rank, word in told.items() if word == "failed"]
            if failed:  # the report of failures has the reason
                raise ConnectionResetError(f"{call}: connection reset by peer: {list_ranks(failed)} failed meanwhile")
            missing = list(filter(self._is_missing, range(self._size)))
            if any(told.get(rank, "running") != "running" for rank in missing):
                silent = [rank for rank in missing if rank not in told]
                if not silent:
                    raise self._refuse(call, "ended, or waited elsewhere, without it")
                silent_since = silent_since or waited
                if waited > silent_since + ANSWER_S:  # killed? the report of failures names them
                    lost = f"no answer from {list_ranks(silent)}"
                    raise ConnectionResetError(f"{call}: connection reset by peer: {lost}")
            if waited > self._timeout_s:
                raise self._refuse(call, f"did not within {self._timeout_s:g} s (config key timeout)")
            if waited > PATIENCE_S and not has_warned:
                has_warned = True
                _log.warning(
                    "%s waits for %s to call it, too, since %g s; if it is called on some ranks only, call it on all",
                    call,
                    list_ranks(filter(self._is_missing, range(self._size))),
                    PATIENCE_S,
                    ranks=None,
                )

    def _is_missing(self, rank: int) -> bool:
        key = f"call_{rank}"
        return not (self._store.check([key]) and self._store.get(key).decode().startswith(f"{self._number} "))

    def _refuse(self, call: str, why: str) -> InputError:
        missing = [rank for rank in range(self._size) if self._is_missing(rank)]
        here = sorted({*range(self._size)}.difference(missing))
        return InputError(
            f"{call} was called on {list_ranks(here)} only; call it on every rank, without an `if` around it: which "
            f"rank writes is chosen inside ({list_ranks(missing)} {why})"
        )


# -- work that all ranks do together -------------------------------------------------------------------------------


def gather_results(
    context: ParallelContext, what: str, work: Callable[[], T], group: dist.ProcessGroup | None = None
) -> list[T]:
    """Do `work` on every rank. Returns the result of each rank, on all of them.

    Args:
        what: the beginning of the error message: "saving to here failed".
        group: of all ranks, for a thread that runs during training; None: torch's default one.

    Raises:
        CheckpointError, InputError: it failed on some ranks; raised on all, with the reason of each.
    """
    result, error, failure = None, None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
        words = str(error) if isinstance(error, HalfmeshError) else f"{type(error).__name__}: {error}"
        failure = words, isinstance(error, InputError)
    everyone = gather_objects((failure, result), group)
    failures = {rank: failure for rank, (failure, _) in enumerate(everyone) if failure is not None}
    if failures:
        raise _join(context, what, failures) from error
    return [result for _, result in everyone]


def run_on_all_ranks(context: ParallelContext, what: str, work: Callable[[], T]) -> T:
    """As `gather_results`, but returns this rank's result, which is not sent."""
    done: list[T] = []
    gather_results(context, what, lambda: done.append(work()))
    return done[0]


def run_on_rank_zero(
    context: ParallelContext, what: str, work: Callable[[], T], group: dist.ProcessGroup | None = None
) -> T:
    """Do `work` on rank 0 alone. Returns its result on all ranks; arguments and errors as of `gather_results`."""
    return gather_results(context, what, lambda: work() if context.rank == 0 else None, group)[0]  # type: ignore[return-value]


def _join(context: ParallelContext, what: str, failures: dict[int, tuple[str, bool]]) -> HalfmeshError:
    kind = InputError if all(is_input for _, is_input in failures.values()) else CheckpointError
    reasons: dict[str, list[int]] = {}
    for rank, (words, _) in failures.items():
        reasons.setdefault(words, []).append(rank)
    if len(reasons) == 1 and len(failures) == context.size:
        return kind(f"{what}: {next(iter(reasons))}")
    names = context.rank_names
    return kind(bullet_list(f"{what}:", (f"{names.names(ranks)}: {words}" for words, ranks in reasons.items())))
