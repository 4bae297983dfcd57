"""inf and nan in training without a loss scale: told at the next look, counted from the first, on all ranks."""

import logging

import pytest
import torch
from torch import nn

from halfmesh.errors import NonFiniteError
from tests.support.models import make_data, make_engine
from tests.support.ranks import here, run_ranks

CONFIGS = {
    "fp32": {},
    "naive_bf16": {"bf16": {"mode": "naive"}},
    "clipped": {"clip_grad_norm": 1.0},
    "accumulated": {"gradient_accumulation": 2},
}
LAYOUTS = {
    "dp": {"parallel": {"data": "replicate"}},
    "zero1": {"parallel": {"data": "zero1"}, "bf16": {"mode": "naive"}},
    "pipeline": {"parallel": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["2"]}}},
}


def run_into_nan(config, first=5, is_bad=lambda context: True):
    """The loss of one batch of update `first` is nan, on the ranks of which `is_bad`. Returns the update that raised,
    its error, and by update what was warned of."""
    factor, told, update = [1.0], [], 0
    x, y = make_data(4)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def criterion(output, y):
        return nn.functional.cross_entropy(output.float(), y) * factor[0]

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append((update, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("halfmesh").addHandler(handler)
    engine = make_engine(config, model=model, criterion=criterion, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    try:
        for update in range(1, 60):
            for batch in range(engine.config.gradient_accumulation):
                bad = update == first and batch == 0 and is_bad(engine.context)
                factor[0] = float("nan") if bad else 1.0
                engine.backward(engine.criterion(engine(here(x)), here(y)))
                engine.step()
    except NonFiniteError as error:
        return update, error, [(at, text) for at, text in told if "on_nonfinite='auto'" in text]
    finally:
        logging.getLogger("halfmesh").removeHandler(handler)
        engine.close()
    raise AssertionError("it never ended")


@pytest.mark.promise("monitoring the loss scale, inf and nan")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_nan_is_told_soon_and_counted(name):
    update, error, told = run_into_nan(CONFIGS[name])
    assert [at for at, _ in told] == [8], "once, at the next look"
    assert told[0][1].startswith("the loss or the gradient norm was inf or nan in 4 consecutive updates, which were")
    assert update == 54
    assert str(error).startswith("50 updates in a row had inf or nan in their gradients (max_consecutive_skips=50)")
    assert error.diagnosis.began == 5
    assert "has been inf or nan since update 5, not skipped" in str(error)
    assert "bf16" not in str(error).replace("bfloat16", "")


def test_nan_from_the_first_update_on():
    update, error, told = run_into_nan({}, first=1)
    assert (update, [at for at, _ in told], error.diagnosis.began) == (50, [1], 1)
    assert "resume from an older checkpoint" in error.diagnosis.advice


def nan_on_ranks(rank, world_size):
    """The nan is on the last data rank."""

    def is_last(context):
        return context.dp_rank == context.dp_size - 1

    found = {}
    for name, config in LAYOUTS.items():
        update, error, told = run_into_nan(config, is_bad=is_last)
        told = [(at, text.partition(" or nan in ")[2][:2].strip()) for at, text in told]
        found[name] = (update, error.diagnosis.began), told
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_nan_on_one_rank_ends_all_together():
    for rank, found in enumerate(run_ranks(nan_on_ranks, 2)):
        for name, (ended, told) in found.items():
            late = name == "pipeline" and rank == 0
            assert (ended, told) == ((54, 5), [(50, "46")] if late else [(8, "34"[rank])]), name
