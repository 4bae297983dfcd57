"""`global_batch_size`: how many batches make up an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import IncompatibleConfigError

if TYPE_CHECKING:
    from . import Config


def batch_size(loader: Any) -> int | None:
    """Samples that a DataLoader gives at a time; None if it does not say."""
    loader = getattr(loader, "loader", loader)  # of an IterableDataset that is read in strides
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def accumulate(config: Config, size: int | None, data_ranks: int) -> Config:
    """`config` with `gradient_accumulation` set from its `global_batch_size`; unchanged if it has none.

    Args:
        size: samples of a batch on each data rank.

    Raises:
        IncompatibleConfigError: `global_batch_size` is no multiple of `size` x `data_ranks`, `gradient_accumulation` is
            given and says otherwise, or `size` is not known.
    """
    total, given = config.global_batch_size, config.gradient_accumulation
    if total is None:
        return config
    if size is None:
        raise _refused(
            f"{total}: how many batches that is follows from the loader's batch size, and there is no dataloader that "
            "has one; give initialize a DataLoader with batch_size, or set gradient_accumulation instead"
        )
    together = size * data_ranks
    what = f"batch size {size} x {data_ranks} data rank(s)"
    if total % together:
        below, above = total // together * together, (total // together + 1) * together
        near = f"{below} or {above}" if below else str(above)
        raise _refused(f"{total} is no multiple of {what} = {together}; set it to {near}, or change the batch size")
    length = total // together
    if "gradient_accumulation" in config.model_fields_set and given != length:
        raise _refused(
            f"{total}, but {what} x gradient_accumulation={given} makes {together * given} samples; remove one of the "
            f"two keys, or set gradient_accumulation={length}"
        )
    return config.model_copy(update={"gradient_accumulation": length})


def _refused(message: str) -> IncompatibleConfigError:
    return IncompatibleConfigError([f"global_batch_size: {message}"])
