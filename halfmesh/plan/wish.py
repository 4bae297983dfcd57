"""What is to be planned."""

from __future__ import annotations

from dataclasses import dataclass

from ..compat import DEVICES
from ..errors import InputError, did_you_mean
from .candidates import DEFAULT_MODES

MOST_RANKS = 2**14
MOST_ROWS = 2**24
"""A dry run makes the groups of all ranks, and fsdp a piece of each parameter for each data rank: with thousands
of them it takes minutes. Rows up to so many have a few hundred divisors at most."""


@dataclass(frozen=True)
class Wish:
    """A model, the devices, and what there is to choose from.

    Attributes:
        model, batch: see `subject.make`.
        world_size: ranks, a device each.
        limit: bytes that a device has.
        node: devices of a node.
        rows: that an update takes, over all ranks; None: as many as the model's batch has, on each rank.
        modes: precisions to choose from, see `candidates.read_modes`.
        device: cuda or cpu.
        top: layouts that are listed.

    Raises:
        InputError: a number is below 1, or beyond MOST_RANKS or MOST_ROWS; or there is no such device.
    """

    model: str
    world_size: int
    limit: int
    batch: tuple[str, ...] = ()
    node: int = 8
    rows: int | None = None
    modes: tuple[str, ...] = DEFAULT_MODES
    device: str = "cuda"
    top: int = 8

    def __post_init__(self) -> None:
        numbers = {
            "world-size": self.world_size,
            "gpus-per-node": self.node,
            "global-batch": self.rows,
            "top": self.top,
        }
        for option, number in numbers.items():
            if number is not None and number < 1:
                raise InputError(f"--{option} {number}: it must be at least 1")
        for option, most in (("world-size", MOST_RANKS), ("global-batch", MOST_ROWS)):
            if (numbers[option] or 0) > most:
                raise InputError(
                    f"--{option} {numbers[option]}: at most {most:,}, or the search would not end; plan less"
                )
        if self.device not in DEVICES:
            near = did_you_mean(self.device, DEVICES)
            raise InputError(f"--device {self.device}: allowed: {', '.join(DEVICES)}{near}")
