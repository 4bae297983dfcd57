"""What has to stand in the files of a checkpoint, so that nothing has changed when something else is found there.

Whoever can write the folder can make checksums fit; damage within a file that was written wrongly shows here, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..errors import CheckpointError, show


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return (type(value) is float and abs(value) < 2.0**128) or (type(value) is int and abs(value) < 2**63)


def _text(value: Any) -> bool:
    return type(value) is str


def _optional(form: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or not list(find_misfits(value, form))


def _all(form: Any) -> Callable[[Any], bool]:
    """A dict of texts to values of a form."""
    return lambda value: (
        type(value) is dict and all(_text(key) and not list(find_misfits(item, form)) for key, item in value.items())
    )


def _anything(value: Any) -> bool:
    return True


def _generator(value: Any) -> bool:
    """The state of one of torch's."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1


def _cpu_generator(value: Any) -> bool:
    return _generator(value) and _works(lambda: torch.Generator().set_state(value))


def _python_random(value: Any) -> bool:
    def tried() -> None:
        version, internal, gauss = value
        random.Random().setstate((version, tuple(internal), gauss))

    return _works(tried)


def _numpy_random(value: Any) -> bool:
    def tried() -> None:
        name, keys, *rest = value
        np.random.RandomState().set_state((name, keys.numpy().astype(np.uint32), *rest))

    return _works(tried)


def _works(tried: Callable[[], object]) -> bool:
    try:
        tried()
    except Exception:  # whatever a generator says to what is no state
        return False
    return True


_RANDOM = {
    "python": _python_random,
    "numpy": _numpy_random,
    "torch": _cpu_generator,
    "cuda": _optional(_generator),
}
_GENERATORS = [_generator]
_START = {"random": _RANDOM, "generators": _GENERATORS}
_PLACE = {
    "share": lambda value: type(value) is tuple and len(value) == 2 and _text(value[0]) and _count(value[1]),
    "generators": _GENERATORS,
    "next_epoch": _count,
    "epoch": lambda value: type(value) is int and -1 <= value < 2**63,
    "trained": _count,
    "finished": lambda value: type(value) is bool,
    "start": lambda value: value == {} or not list(find_misfits(value, _START)),
    "fetches": lambda value: (
        type(value) is dict
        and all(_count(key) and not list(find_misfits(item, _RANDOM)) for key, item in value.items())
    ),
}
COMMON = {
    "global_step": _count,
    "scalers": [{"scale": _number, "max_scale": _number, "growth_tracker": _count, "hysteresis_left": _count}],
    "skips": {"in_a_row": _count, "skipped": _count},
    "lr_scheduler": _optional(_all(_anything)),
    "lr_class": _optional(_text),
    "optimizer": _text,
    "groups": [{"params": [_text]}],
    "plain_state": _all(_all(_anything)),
    "extras": _all(_anything),
}
OWN = {
    "random": {**_RANDOM, "rank": _count, "model": _optional(_generator), "host": _optional(_RANDOM)},
    "dataloader": _optional(_PLACE),
    "attached": _all(lambda value: type(value) is dict),
}
"""Of `common.pt`, and of `rank-00000.pt`. More than that may be there."""
_LATER = frozenset({"attached"})
"""What older checkpoints do not have."""


def find_misfits(value: Any, form: Any, where: str = "") -> Iterator[str]:
    """Where `value` is not of a form: a dict of what has to be there, a list of the form of all items, or a test."""
    if isinstance(form, dict):
        if type(value) is not dict:
            yield f"{where or 'all of it'} is {show(value, 80)}"
            return
        for key, inner in form.items():
            if key in value:
                yield from find_misfits(value[key], inner, f"{where}.{key}".lstrip("."))
            elif key not in _LATER:
                yield f"{where}.{key} is missing".lstrip(".")
    elif isinstance(form, list):
        if type(value) is not list:
            yield f"{where} is {show(value, 80)}"
            return
        for index, item in enumerate(value):
            yield from find_misfits(item, form[0], f"{where}[{index}]")
    elif not form(value):
        yield f"{where} is {show(value, 80)}"


def refuse_misfits(name: str, value: Any, form: Any) -> None:
    """Raise CheckpointError if the content of the file `name` is not of a form."""
    misfit = next(find_misfits(value, form), None)
    if misfit is not None:
        raise CheckpointError(f"{name} holds something else than was saved ({misfit}); take another checkpoint")


def refuse_metadata(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError if `.metadata` does not fit itself or the files, of which `sizes` has the bytes: memory is
    made for what it says."""
    try:
        problem = next(_find_in_metadata(metadata, sizes), None)
    except Exception as error:  # things of any kind may stand in each field
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise CheckpointError(f".metadata does not fit the files ({problem}); take another checkpoint")


def _find_in_metadata(metadata: Metadata, sizes: Mapping[str, int]) -> Iterator[str]:
    total = 0
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, BytesStorageMetadata):
            continue
        if not _text(name) or not isinstance(tensor, TensorStorageMetadata):
            yield f"{show(name, 80)} is no tensor"
            return
        boxes = [_volume(chunk, tensor.size) for chunk in tensor.chunks]
        if None in boxes or sum(box or 0 for box in boxes) != _product(tensor.size):
            yield f"the parts of {name} are not all of it"
            return
        total += _product(tensor.size) * tensor.properties.dtype.itemsize
        for chunk in tensor.chunks:
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            if not (_count(info.offset) and _count(info.length)):
                yield f"{name} is at {show(info.offset, 80)}"
            elif info.offset + info.length > sizes[info.relative_path]:
                yield f"{name} is beyond the end of {info.relative_path}"
    if total > sum(sizes.values()):
        yield f"its tensors take {total} bytes, which are not there"


def _product(size: Any) -> int:
    return math.prod(int(length) for length in size)


def _volume(chunk: ChunkStorageMetadata, size: torch.Size) -> int | None:
    """How many elements a box has; None: it is not within the tensor."""
    box = list(zip(chunk.offsets, chunk.sizes, size, strict=True))
    return _product(chunk.sizes) if all(_count(at) and n >= 0 and at + n <= all_ for at, n, all_ in box) else None
