"""Each script trains in five layouts as it did before its conversion, and only the config differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.ranks import run_ranks

from . import word_model
from .layouts import WORLD_SIZES, config

pytestmark = pytest.mark.distributed


class Script(NamedTuple):
    """A script before and after its conversion. Both return losses and trained weights."""

    train_plain: Callable[[], Any]
    train: Callable[[dict[str, Any]], Any]
    plan: Any
    partition: Any


LSTM = partial(word_model.train_plain, "lstm"), partial(word_model.train, "lstm")
TRANSFORMER = partial(word_model.train_plain, "transformer"), partial(word_model.train, "transformer")
SCRIPTS = {
    "word_model lstm": Script(*LSTM, word_model.LSTM_PLAN, word_model.LSTM_PARTITION),
    "word_model transformer": Script(*TRANSFORMER, "auto", word_model.TRANSFORMER_PARTITION),
}


def train_on_ranks(rank, world_size, name, layout):
    script = SCRIPTS[name]
    return script.train(config(layout, script.plan, script.partition))


@pytest.fixture(scope="module", params=SCRIPTS)
def name_and_result(request):
    return request.param, SCRIPTS[request.param].train_plain()


@pytest.mark.promise("existing scripts")
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.sends) if name.startswith("pipeline") else name for name in WORLD_SIZES],
)
def test_trains_as_before_the_conversion(name_and_result, layout):
    name, (losses, weights) = name_and_result
    ranks = run_ranks(train_on_ranks, WORLD_SIZES[layout], name, layout)
    trained = torch.tensor([found for found, _ in ranks]).mean(0)  # a data rank has the losses of its own samples
    torch.testing.assert_close(trained, torch.tensor(losses), rtol=2e-5, atol=1e-5)
    for _, found in ranks:
        torch.testing.assert_close(found, weights, rtol=1e-4, atol=2e-5)
