"""DeepSpeed's keys about the loss scale, batch sizes and ZeRO, whose values mean something else here."""

from __future__ import annotations

from typing import Any

from .outcome import Converted, NotUnderstood, Outcome, Rule, UnreadableError, Without, flag, number, one_of, whole
from .source import Source


def is_on(source: Source, section: str) -> bool:
    return source.get(f"{section}.enabled") is True


def unless_on(source: Source, section: str) -> Outcome | None:
    """What a key of a section comes to that is off; None: the section is on."""
    if is_on(source, section):
        return None
    if source.has(f"{section}.enabled") and source.get(f"{section}.enabled") is not False:
        return NotUnderstood(f"whether {section} is on is not known: write {section}.enabled")
    return Without(f"{section} is off, so this key has no effect")


def zero_stage(source: Source) -> int:
    value = source.get("zero_optimization.stage", 0)
    return value if value in (1, 2, 3) and type(value) is int else 0


def stages(source: Source) -> int:
    return source.whole("pipeline.stages", 1)


def data_ranks(source: Source) -> int | None:
    """The data ranks, where they are known."""
    if source.world_size is None:
        return None
    return max(1, source.world_size // (stages(source) * source.whole("tensor_parallel.autotp_size", 1)))


def switch(section: str, mode: str) -> Rule:
    def do(value: Any, source: Source) -> Outcome:
        if not flag(value):
            return Converted(says=f"{section} is off, as by default")
        return Converted({f"{section}.mode": mode})

    return Rule(do)


def scaler(key: str, kind: Any = number) -> Rule:
    """A key of the dynamic loss scale."""

    def do(value: Any, source: Source) -> Outcome:
        if (off := unless_on(source, "fp16")) is not None:
            return off
        if source.get("fp16.loss_scale", 0) not in (0, None):
            return Without("loss_scale is static, so this key has no effect")
        read = kind(value)
        return Converted({f"fp16.{key}": read})

    return Rule(do)


def power(value: Any) -> float:
    power = whole(value)
    if not 0 <= power <= 64:
        raise UnreadableError(f"{value!r} is not a power of 2 between 0 and 64")
    return 2.0**power


def loss_scale(value: Any, source: Source) -> Outcome:
    if (off := unless_on(source, "fp16")) is not None:
        return off
    scale = number(value)
    return Converted({"fp16.loss_scale": float(scale) if scale else "dynamic"})


def micro_batch(value: Any, source: Source) -> Outcome:
    size = whole(value)
    if stages(source) > 1:
        cycle = source.whole("gradient_accumulation_steps", 1)
        look = f"in a pipeline a loader's batch is cut into {cycle} microbatches: {size * cycle} rows on each data rank"
        return Converted({"BATCH_SIZE": size * cycle}, look=look)
    return Converted({"BATCH_SIZE": size}, look="a constant of your own: give it to your DataLoader as batch_size")


def accumulation(value: Any, source: Source) -> Outcome:
    count = whole(value)
    if stages(source) > 1:
        return Converted({"parallel.pipeline.microbatches": count})
    return Converted({"gradient_accumulation": count})


def train_batch(value: Any, source: Source) -> Outcome:
    """train_batch_size = micro batch x accumulation x data ranks."""
    total, ranks = whole(value), data_ranks(source)
    known = {
        "train_micro_batch_size_per_gpu": source.get("train_micro_batch_size_per_gpu"),
        "gradient_accumulation_steps": source.get("gradient_accumulation_steps"),
    }
    micro, cycle = known.values()
    if type(micro) is int and type(cycle) is int and micro > 0 and cycle > 0:
        if total % (micro * cycle) or (ranks is not None and total != micro * cycle * ranks):
            count = "the" if ranks is None else ranks
            return NotUnderstood(f"{total} is not {micro} x {cycle} x {count} data ranks, as DeepSpeed asks for")
        return Converted(says=f"{micro} x {cycle} x the data ranks: it follows")
    if ranks is None:
        return NotUnderstood("it is divided over the data ranks, whose number is not known: give --world-size")
    if total % ranks:
        return NotUnderstood(f"{total} is not divisible by {ranks} data ranks")
    each = total // ranks
    if stages(source) > 1:
        if cycle is None:
            return NotUnderstood("how many microbatches a pipeline has is gradient_accumulation_steps: it is missing")
        return Converted({"BATCH_SIZE": each}, look=f"{total} / {ranks} data ranks; a batch is cut into microbatches")
    if type(micro) is int and micro > 0:
        return derived(each, micro, "gradient_accumulation", f"{total} / ({micro} x {ranks} data ranks)")
    if type(cycle) is int and cycle > 0:
        return derived(each, cycle, "BATCH_SIZE", f"{total} / ({cycle} x {ranks} data ranks)")
    return Converted({"BATCH_SIZE": each}, look=f"{total} / {ranks} data ranks, for your DataLoader")


def derived(each: int, by: int, key: str, how: str) -> Outcome:
    if each % by:
        return NotUnderstood(f"{how} is not a whole number")
    return Converted({key: each // by}, look=f"{how}" + ("; for your DataLoader" if key == "BATCH_SIZE" else ""))


def zero(value: Any, source: Source) -> Outcome:
    stage = whole(value)
    if stage not in (0, 1, 2, 3):
        raise UnreadableError(f"{value!r} is not one of the stages 0, 1, 2 and 3")
    if stage == 0:
        return Converted(says="each data rank has all, as by default")
    look = "stage 2 divides gradients, too; zero1 gives the same numbers with whole gradients" if stage == 2 else ""
    return Converted({"parallel.data.strategy": "fsdp" if stage == 3 else "zero1"}, look=look)


def offload(what: str) -> Rule:
    def do(value: Any, source: Source) -> Outcome:
        device = one_of(value, {"none": None, "cpu": "cpu", "nvme": "nvme"})
        if device is None:
            return Converted(says=f"{what} stay on the device")
        if device == "nvme":
            return Without("nothing is put on disks here; cpu_offload is nearest, under fsdp")
        if zero_stage(source) != 3:
            return Without("without stage 3 nothing is put into host memory here; fsdp with cpu_offload does it")
        look = "parameters, gradients and optimizer state all wait in host memory"
        return Converted({"parallel.data.cpu_offload": True}, look=look)

    return Rule(do)


def world_size(source: Source) -> int | None:
    """The ranks that the three batch sizes ask for, where all are there."""
    sizes = [
        source.whole(name, 0)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ]
    total, micro, cycle = sizes
    if not all(sizes) or total % (micro * cycle):
        return None
    return total // (micro * cycle) * stages(source) * source.whole("tensor_parallel.autotp_size", 1)
