"""What tests of several files here need."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """Memory that nobody has filled, which may hold zeros by chance, holds nan."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
