"""ZeRO stage 1: each data rank steps a shard of the weights, with optimizer state and masters for that shard only.

Gradients are reduce-scattered to the ranks that step them while backward runs, and new weights are all-gathered while
the rest of the update runs, or the next forward. If weights have the dtype of the reduction, this sends as many bytes
as the all-reduce of replicated data parallelism. Rajbhandari et al., "ZeRO" (2020), section 5.1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InputError, shorten
from ...options import Options
from ...utils.optimizer_state import parts_of, reject_other_state, repoint, steps_whole
from ...utils.param_shard import ParamShard, set_grad
from ...utils.tensors import in_memory_order, is_dense
from ...utils.torch_private import all_gather, foreach_copy_, foreach_zero_, reduce_scatter, storages
from ..buckets import Bucket, NothingSent, all_reduce, give_grads, make_buckets, read_together, round_up
from ..comm import gather_objects
from ..data_strategy import SCATTERED, DataStrategy, StrategyInputs, WithheldGradient
from ..reducer import Buffers, Reducer
from ..shard_spec import Placement

CHUNK = 128
"""A rank's chunk of a bucket is a multiple of this many elements (256 bytes in half precision, as in Megatron-LM), or
of a smaller power of two, so that it grows by at most 1/16."""


class Zero1Options(Options):
    """The keys of `parallel.data` under zero1."""

    overlap_param_gather: bool = False
    """All-gather new weights while the next forward runs, in temporary memory of all of them (Megatron-LM's name)."""


HIDDEN = 3
"""In this many first updates, weights are nan while they are on their way. Otherwise code that torch does not show, and
that reads them without waiting, would read old weights and train on."""


class Zero1(DataStrategy):
    """The strategy `zero1`: each data rank steps a shard of the weights, with its optimizer state and masters.

    Parameters that pipeline stages share get separate buckets, so that every stage shards them in the same way.

    Attributes:
        buckets: the buckets of the parameters that the optimizer holds.
    """

    cost = "each update sends the new weights to all data ranks"
    shards_state = True
    options = Zero1Options

    def __init__(self, inputs: StrategyInputs) -> None:
        super().__init__(inputs)
        self.publisher = self
        optimizer = inputs.optimizer
        held = {id(param) for param_group in optimizer.param_groups for param in param_group["params"]}
        mine = [shard for shard in inputs.shards if id(shard.param) in held]
        for shard in mine:
            if not is_dense(shard.param):  # a view of a larger tensor: they are split in memory order
                shard.param.data = shard.param.data.contiguous()

        parts = [part for part in parts_of(optimizer) if steps_whole(part)]
        wholes = {param for part in parts for group in part.param_groups for param in group["params"]} - {*inputs.tied}
        largest = max((param.numel() for param in wholes), default=0)

        def kind(param: nn.Parameter) -> Any:
            """Of one dtype also after a cast; frozen ones need not be sent; other stages also shard `tied` ones."""
            return id(param) if param in inputs.tied else (param.dtype, param.requires_grad, param in wholes)

        def room_for(param: nn.Parameter) -> int:
            """So that each rank can get one of the largest whole parameters, within limits."""
            ranks, itemsize = inputs.group_of(param).size(), inputs.reduce.dtype.itemsize
            return min(ranks * largest * itemsize, inputs.reduce.INFLIGHT_BYTES) if param in wholes else 0

        make = partial(SliceBucket, wholes=wholes, load=Counter())
        self.buckets = make_buckets(mine, inputs.reduce, inputs.group_of, make, kind, room_for)
        shard_of = {part.source: part for bucket in self.buckets for part in bucket.slices}
        self.shards = [shard_of.get(shard, shard) for shard in inputs.shards]
        self._pairs = [(shard, shard_of[shard], shard.param.stride()) for shard in mine]
        self._memory: list[torch.UntypedStorage] = []  # of the model's parameters, at the last `follow`
        own = {part.model_param: part for part in shard_of.values()}

        def cut(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
            """This rank's shard of a value of `param`'s optimizer state."""
            strided = torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)
            return own[param].part_of(strided).clone()

        repoint(optimizer, {param: part.param for param, part in own.items()}, cut)
        optimizer.register_load_state_dict_post_hook(reject_other_state)
        # In the order in which they are complete when an update steps the model's parameters in order.
        position = {shard: number for number, shard in enumerate(mine)}
        self._order = sorted(self.buckets, key=lambda bucket: max(position[shard] for shard in bucket.shards))
        self._left = deque(self._order)
        self._stepped: set[ParamShard] = set()
        self._inflight: deque[tuple[Any, SliceBucket, torch.Tensor]] = deque()
        self._updates = 0
        self._arrivals: Any = None
        if inputs.options.overlap_param_gather:
            from .late_params import Arrivals  # it imports torch.compile's machinery

            self._arrivals = Arrivals(inputs.model)

    @staticmethod
    def find_key_problems(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        is_whole = config.compile.enabled and config.compile.scope == "model"
        if config.parallel.data.overlap_param_gather and is_whole:
            words = "a model that is compiled as a whole needs all weights at once; use compile.scope='blocks'"
            yield "parallel.data.overlap_param_gather", words

    def make_reducer(self, shards: Sequence[ParamShard], buffers: Buffers, withholds: bool) -> Zero1Reducer:
        return Zero1Reducer(self, shards, buffers)

    def placement(self, shard: ParamShard, source: Placement) -> Placement:
        full = shard.model_param
        return source.run(full.shape, full.stride(), shard.start, shard.start + shard.param.numel())

    @property
    def text(self) -> str:
        late = "; new weights arrive during the next forward, in extra memory" if self._arrivals else ""
        return f", each data rank updates 1/{self.inputs.mean_over} of it (zero1{late})"

    # -- while training ----------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Rebind shards to parameters that have moved in memory, and copy shards with other memory back to it.

        Raises:
            InputError: the order of elements in memory has changed, but not that of masters and state.
        """
        memory = storages([shard.param for shard, _, _ in self._pairs])
        before, self._memory = self._memory or memory, memory
        if storages([part.param for _, part, _ in self._pairs]) == memory:
            return
        for (shard, part, strides), old in zip(self._pairs, before, strict=True):
            if shard.param.stride() != strides:
                self._memory = before
                raise InputError(
                    f"the memory format of {shard.name!r} was changed after initialize (channels_last?), but masters "
                    "and optimizer state keep the old order of elements; change it before initialize"
                )
            value = part.param.data if part.param.untyped_storage() is not old else None
            part.rebind_view()
            if value is not None:
                part.param.copy_(value)  # counted as a write

    def join(self, names: list[str]) -> list[str]:
        if self.inputs.context.pp_size == 1:  # else other stages have other shards
            self.inputs.context.agree_on_call("engine(...) after writes into engine.master_params()")
        return sorted({name for theirs in gather_objects(names, self.inputs.group) for name in theirs})

    def begin(self) -> None: ...  # only an update reads the shards

    def stepped(self, shards: Sequence[ParamShard]) -> None:
        """Gather each bucket that is complete with the new weights of `shards`."""
        self._stepped.update(shards)
        while self._left and all(p in self._stepped or not p.model_param.requires_grad for p in self._left[0].slices):
            self._gather(self._left.popleft())

    def finish(self) -> None:
        """Gather the other buckets, which have parameters without a gradient, and wait for those that the next forward
        cannot wait for."""
        for bucket in self._left:
            self._gather(bucket)
        self.arrive()  # those of before
        while self._inflight:
            work, bucket, flat = self._inflight[0]
            if self._overlaps(bucket):
                if self._updates < HIDDEN:
                    bucket.hide()
                self._arrivals.expect(bucket.params, partial(bucket.receive, work, flat))
                self._inflight.popleft()
            else:
                self._wait_oldest()
        self._left = deque(self._order)
        self._stepped.clear()
        self._updates += 1

    def _gather(self, bucket: SliceBucket) -> None:
        # The first is the same on all ranks. One rank's slices are all of the model's memory.
        if self._stepped.isdisjoint(bucket.slices) or bucket.group.size() == 1:
            return
        # Those that overlap the next forward all start before it, so that ranks start all collectives in one order.
        while self._inflight and not self._overlaps(bucket):
            if self.inputs.reduce.has_room([sent for _, sent, _ in self._inflight], bucket):
                break
            self._wait_oldest()
        work, flat = bucket.gather([part.param for part in bucket.slices])
        self._inflight.append((work, bucket, flat))

    def _overlaps(self, bucket: SliceBucket) -> bool:
        """Return True if its weights may be on their way after the update. (A replay of a CUDA graph runs no code of
        the host, which could wait.)"""
        if self._arrivals is None or not self._arrivals.can_wait(bucket.params):
            return False
        return not (bucket.params[0].is_cuda and torch.cuda.is_current_stream_capturing())

    def arrive(self, module: nn.Module | None = None) -> None:
        if self._arrivals is not None:
            self._arrivals.wait(None if module is None else module.parameters())

    def _wait_oldest(self) -> None:
        work, bucket, flat = self._inflight.popleft()
        work.wait()
        foreach_copy_(bucket.params, bucket.views(flat))


class SliceBucket(Bucket):
    """Parameters whose elements, in memory order, are split into one chunk per rank of their group.

    A rank steps all of some parameters, a slice of at most two, and nothing of the others. It holds a slice of each,
    often an empty one, so that the optimizer's groups are equal on all ranks.

    Args:
        wholes: parameters that optimizers step as a whole: a bucket of these has no others, and splits none, if chunks
            can be filled so that at most half of the bytes are padding. (`WholeSteps` puts the slices of others
            together.)
        load: elements of whole parameters that each rank has already.

    Attributes:
        slices: the slices of `shards` that this rank steps, in the same order.
        chunk: elements of a chunk.
    """

    def __init__(
        self,
        shards: list[ParamShard],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        wholes: Collection[nn.Parameter],
        load: Counter[int],
    ) -> None:
        size = group.size()
        by_rank = _share_out(shards, size, load) if shards[0].param in wholes else []
        super().__init__([shard for some in by_rank for shard in some] or shards, dtype, group)
        least = max(map(_padded, by_rank), default=-(-self.numel // size))
        self.chunk = round_up(least, min(CHUNK, 1 << max((least // 16).bit_length() - 1, 0)))
        if by_rank:
            starts = [(rank, some[:place]) for rank, some in enumerate(by_rank) for place in range(len(some))]
            self.offsets = [rank * self.chunk + _padded(before) for rank, before in starts]
        self.numel = self.chunk * size
        self.slices: list[ParamShard] = []
        self._cuts, end = list[int](), 0  # sizes in this rank's chunk: of a gap, of the first slice, of a gap, ...
        for shard, offset in zip(self.shards, self.offsets, strict=True):
            first, numel = group.rank() * self.chunk - offset, shard.param.numel()
            start, stop = (min(max(edge, 0), numel) for edge in (first, first + self.chunk))
            if start < stop:
                self._cuts += start - first - end, stop - start
                end = stop - first
            else:
                self._cuts += 0, 0
            memory = in_memory_order(shard.param.data)[start:stop]  # `.data`: writes are counted separately
            param = nn.Parameter(memory, requires_grad=shard.param.requires_grad)
            self.slices.append(ParamShard(shard.name, param, shard.weight * size, source=shard, start=start))
        self._cuts.append(self.chunk - end)

    def pack(self) -> torch.Tensor:
        return self._take_grads(self.numel)[0]

    def start(self, flat: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        """Start a reduce-scatter to the ranks that step them."""
        if self.group.size() == 1:
            self.sent = flat
            return NothingSent()
        self.sent = torch.empty(self.chunk, dtype=self.dtype, device=flat.device)
        return reduce_scatter(self.sent, flat, op=op, group=self.group, async_op=True)

    def assign_grads(self, received: torch.Tensor, unused: Collection[int]) -> None:
        """Add the reduced chunk to the gradients of `slices`; `unused`: shards without a gradient on any rank."""
        views = enumerate(zip(self.slices, self.split(received), strict=True))
        given = [(part.param, view) for index, (part, view) in views if index not in unused]
        held = [(param.grad, view) for param, view in given if param.grad is not None]
        give_grads([(param, view) for param, view in given if param.grad is None])
        if held:  # of a backward before, whose gradients were reduced already
            torch._foreach_add_([grad for grad, _ in held], [view for _, view in held])

    @cached_property
    def withheld(self) -> list[WithheldGradient]:
        """Placeholders for the gradients of the model's parameters."""
        return [WithheldGradient.of(shard.param, shard.name, SCATTERED) for shard in self.shards]

    def split(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """This rank's chunk, split into `slices`."""
        return list(chunk.split(self._cuts)[1::2])

    def gather(self, values: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """Start an all-gather of `values`, of one dtype, one for each of `slices`. `views` splits the result."""
        own = torch.empty(self.chunk, dtype=values[0].dtype, device=values[0].device)
        foreach_copy_(self.split(own), values)
        if gaps := [gap for gap in own.split(self._cuts)[::2] if len(gap)]:
            foreach_zero_(gaps)
        flat = torch.empty(self.numel, dtype=own.dtype, device=own.device)
        return all_gather(flat, own, group=self.group, async_op=True), flat

    def receive(self, work: Any, flat: torch.Tensor) -> None:
        """Wait for the result of `gather`, and copy it to the parameters. Not to `slices`, which have newer values if
        they were written since; and uncounted."""
        work.wait()
        if pairs := list(zip(self._others(self.params), self._others(self.views(flat)), strict=True)):
            foreach_copy_(*zip(*pairs, strict=True))

    def hide(self) -> None:
        """Make what other ranks step nan, until `receive`; uncounted."""
        for values in self._others(self.params):
            values.fill_(torch.nan)

    def _others(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Of tensors like `params` the memory that other ranks step."""
        for part, tensor in zip(self.slices, tensors, strict=True):
            memory, stop = tensor.data, part.start + part.param.numel()
            if part.param.numel() == 0:
                yield memory
            elif part.param.numel() < memory.numel():
                memory = in_memory_order(memory)
                yield from (memory[: part.start], memory[stop:])


def _numel(shards: Sequence[ParamShard]) -> int:
    return sum(shard.param.numel() for shard in shards)


def _padded(shards: Sequence[ParamShard]) -> int:
    return sum(round_up(shard.param.numel()) for shard in shards)


def _share_out(shards: Sequence[ParamShard], ranks: int, load: Counter[int]) -> list[list[ParamShard]]:
    """The shards that each rank steps as a whole: the largest first, each to the rank with the fewest elements. Empty
    if more than half of what is sent would be padding."""
    given: list[list[ParamShard]] = [[] for _ in range(ranks)]
    for shard in sorted(shards, key=lambda shard: -shard.param.numel()):
        min(enumerate(given), key=lambda pair: (_numel(pair[1]), load[pair[0]]))[1].append(shard)
    sizes = list(map(_numel, given))
    if max(sizes) * ranks > 2 * sum(sizes):
        return []
    load.update(dict(enumerate(sizes)))
    return given


class Zero1Reducer(Reducer):
    """Reduce-scatters gradients to the ranks that step them, once per optimizer step.

    A `Reducer` of zero1's shards: gradients arrive in the model's parameters, and end in the shards.

    Raises:
        InputError: parameters were added to the optimizer that are not sharded.
    """

    sums_once = True

    def __init__(self, strategy: Zero1, shards: Sequence[ParamShard], buffers: Buffers) -> None:
        self._strategy = strategy
        strategy.follow()  # weights were cast
        super().__init__(shards, buffers, strategy.inputs.group, strategy.inputs.reduce)

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        for shard in shards:
            shard.param.requires_grad_(shard.model_param.requires_grad)
        if new := [shard.name for shard in shards if shard.source is None]:
            raise InputError(f"{shorten(new)} joined the optimizer after initialize; add them before, or use replicate")
        super().set_params([shard.source for shard in shards if shard.source is not None])

    def open(self, last: bool) -> None:
        for shard in self._shards if self.state == "reduced" else ():
            shard.param.grad = None  # a placeholder
        super().open(last)

    def _arrived(self, bucket: Bucket, param: nn.Parameter) -> None:
        if hasattr(param, "_halfmesh_arrival"):  # its new weights are on their way: forward had old ones
            name = next(shard.name for shard in bucket.shards if shard.param is param)
            raise InputError(
                f"{name!r} has a gradient, but nothing waited for its new weights: your CUDA graph or C++ extension "
                "used the old ones. Call engine.train() before it, or remove parallel.data.overlap_param_gather"
            )
        super()._arrived(bucket, param)

    def _make_buckets(self) -> list[SliceBucket]:
        return [bucket for bucket in self._strategy.buckets if not set(bucket.shards).isdisjoint(self._shards)]

    def _receive(self, *asked: torch.Tensor) -> list[list[float]]:
        groups: dict[dist.ProcessGroup, list[SliceBucket]] = {}
        for bucket in self._buckets:
            groups.setdefault(bucket.group, []).append(bucket)
        works: list[Any] = []
        counts: list[tuple[SliceBucket, torch.Tensor]] = []  # for each shard the number of ranks that had a gradient
        for group, buckets in groups.items():
            had = [0.0 if index in b.absent else 1.0 for b in buckets for index in range(len(b.shards))]
            sums = torch.tensor(had).to(buckets[0].params[0].device, non_blocking=True)
            works.append(all_reduce(sums, group))
            counts += zip(buckets, sums.split([len(bucket.shards) for bucket in buckets]), strict=True)
        for work in (*(work for work, _ in self._inflight), *works):
            work.wait()
        self._inflight.clear()
        absent = {bucket: count for bucket, count in counts if bucket.absent}
        ranks = dict(zip(absent, read_together([*absent.values()]), strict=True))
        for bucket, _ in counts:
            bucket.assign_grads(bucket.sent, [index for index in bucket.absent if ranks[bucket][index] == 0])
            for part, grad in zip(bucket.slices, bucket.withheld, strict=True):
                if part.param.grad is not None:
                    set_grad(part.model_param, grad)
        return []
