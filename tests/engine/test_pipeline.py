"""An engine whose model is cut into stages: its loop, losses, outputs and state are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.parallel.reducer import Reducer
from tests.support.models import CLASSES, FEATURES, difference, make_data, make_engine, make_loader, sgd
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

SCHEDULES = {"gpipe": {}, "1f1b": {}, "interleaved": {"chunks": 2}}


class Deep(nn.Sequential):
    """A row of layers, with dropout and BatchNorm where they are wanted."""

    def __init__(self, *between: nn.Module, seed: int = 0) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, 16), *between, nn.LayerNorm(16), nn.GELU()]
        super().__init__(*layers, nn.Linear(16, CLASSES))


def pipe(size: int = 2, microbatches: int = 2, **options: Any) -> dict[str, Any]:
    more = {key: options.pop(key) for key in list(options) if key not in PIPELINE_KEYS}
    return {"parallel": {"pipeline": {"size": size, "microbatches": microbatches, **options}}, **more}


PIPELINE_KEYS = ("schedule", "chunks", "partition", "non_split", "keep_outputs", "eval_outputs", "balance")


def make(config: dict[str, Any], model: nn.Module | None = None, **options: Any) -> halfmesh.Engine:
    return make_engine(config, model=Deep() if model is None else model, **options)


def step(engine: halfmesh.Engine, x: Any, y: Any) -> tuple[Any, Any, Any]:
    """One microbatch of the README's loop: output, loss, and what step returned."""
    engine.zero_grad()
    output = engine(x)
    loss = engine.criterion(output, y)
    engine.backward(loss)
    return output, loss, engine.step()


def whole(engine: halfmesh.Engine) -> dict[str, torch.Tensor]:
    """The model's state after the engine is closed."""
    engine.close()
    return {name: value.detach().clone() for name, value in engine.model.state_dict().items()}


# -- losses and accumulation -----------------------------------------------------------------------------------------


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


CRITERIA = {
    "mean": nn.functional.cross_entropy,
    "sum": summed,
    "weighted": lambda output, target: (summed(output, target), len(target)),
}


def joined_losses(rank: int, world_size: int) -> dict[str, Any]:
    """2 stages x 2 data ranks, cycles of 2 batches; weighted ones are of different size."""
    found: dict[str, Any] = {}
    x, y = make_data(32)
    for reduction, criterion in CRITERIA.items():
        engine = make(pipe(loss_reduction=reduction, gradient_accumulation=2), criterion=criterion)
        even = ((0, 4), (4, 8)), ((8, 12), (12, 16))
        uneven = ((0, 6), (6, 10)), ((10, 12), (12, 16))
        losses = []
        for begin in (0, 16):
            for part in (uneven if reduction == "weighted" else even)[engine.context.dp_rank]:
                piece = slice(begin + part[0], begin + part[1])
                _, loss, _ = step(engine, x[piece], y[piece])
                value = loss.value()
                losses.append([float(v) for v in value] if reduction == "weighted" else value.item())
        found[reduction] = losses, whole(engine)
    return found


def test_microbatches_accumulation_and_data_ranks_join_their_losses():
    results = run_ranks(joined_losses, 4)
    x, y = make_data(32)
    for reduction in CRITERIA:
        model = Deep()
        optimizer = sgd(model.parameters())
        for begin in (0, 16):
            optimizer.zero_grad()
            output, target = model(x[begin : begin + 16]), y[begin : begin + 16]
            if begin == 0:
                first = summed(model(x[:4]), y[:4]).item()
            total = summed(output, target)
            (total if reduction == "sum" else total / 16).backward()
            optimizer.step()
        for result in results:
            assert difference(result[reduction][1], model) < 1e-6
            if reduction != "weighted":  # of the first batch of the first data rank, on both of its stages
                expected = first if reduction == "sum" else first / 4
                assert results[0][reduction][0][0] == pytest.approx(expected, rel=1e-6)
        stages = [(results[0], results[2]), (results[1], results[3])]
        assert all(first[reduction][0] == second[reduction][0] for first, second in stages)
    assert [weight for _, weight in results[0]["weighted"][0]] == [6, 4, 6, 4]
    assert [weight for _, weight in results[1]["weighted"][0]] == [2, 4, 2, 4]


def big_batches(rank: int, world_size: int) -> dict[str, Any]:
    """The same 16 samples as accumulated batches, as microbatches, and both."""
    x, y = make_data(16)
    found = {}
    for accumulation, microbatches in ((1, 4), (2, 4), (4, 2), (8, 1)):
        config = pipe(schedule="gpipe", microbatches=microbatches, gradient_accumulation=accumulation)
        engine = make(config | {"clip_grad_norm": 0.5})
        norms = []
        for _ in range(3):
            for inputs, targets in zip(x.chunk(accumulation), y.chunk(accumulation), strict=True):
                _, _, result = step(engine, inputs, targets)
            norms.append(result.grad_norm)
        found[accumulation, microbatches] = norms, whole(engine)
    return found


def test_accumulation_times_microbatches_is_the_big_batch():
    first, second = run_ranks(big_batches, 2)
    model, (x, y) = Deep(), make_data(16)
    optimizer, norms = sgd(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    for how, (found, weights) in first.items():
        assert found == second[how][0]
        assert found == pytest.approx(norms, rel=1e-5)
        assert difference(weights, model) < 1e-6


# -- reading ---------------------------------------------------------------------------------------------------------


def readings(rank: int, world_size: int) -> dict[str, Any]:
    """Each rank reads in another pattern: none may wait for another."""
    engine = make(pipe(keep_outputs=True))
    x, y = make_data(8)
    read: list[Any] = []
    for number in range(4):
        output, loss, _ = step(engine, x, y)
        if rank == number % 2:
            read.append((number, loss.item(), output.argmax(1).tolist()))
    engine.eval()
    late = float(loss), [output[i].sum().item() for i in range(8)]
    engine.close()
    return {"read": read, "late": late}


def test_reading_on_one_rank_does_not_hang():
    first, second = run_ranks(readings, 2, timeout=60)
    assert [number for number, *_ in first["read"]] == [0, 2]
    assert [number for number, *_ in second["read"]] == [1, 3]
    assert first["late"] == second["late"]
    model, (x, y) = Deep(), make_data(8)
    assert first["read"][0][1] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-6)
    assert first["read"][0][2] == model(x).argmax(1).tolist()


class Named(nn.Module):
    """Several inputs and outputs of different kinds; integers and a mask pass from stage to stage."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(10, FEATURES)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.middle = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids, features, table, scale=None, *, mask=None):
        x = self.words(ids).mean(1) + features @ table
        rounded = (x * 10).long()
        y = self.first(x).relu() + x
        if mask is not None:
            y = y * mask[:, None]
        y = self.middle(y) + rounded % 3
        if scale is not None:
            y = y * scale
        return {"scores": self.last(y + x), "rounded": rounded, "extra": (y.detach().sum(1), 7)}


NAMED_INPUTS = {
    "ids": torch.arange(24).view(8, 3) % 10,
    "features": make_data(8)[0],
    "table": torch.eye(FEATURES) * 0.5,
    "scale": torch.tensor(2.0),
    "mask": torch.tensor([1.0, 0.0] * 4),
}


def named_criterion(output: Any, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return nn.functional.cross_entropy(output["scores"], target, weight=weight)


def named(rank: int, world_size: int) -> dict[str, Any]:
    """Calls of several kinds and shapes, in turn."""
    config = pipe(partition=("first", "middle", "last"), chunks=2, schedule="interleaved", keep_outputs=True)
    config["parallel"]["pipeline"]["non_split"] = ("table", "weight")
    engine = make(config, Named(), criterion=named_criterion)
    y, given = make_data(8)[1], NAMED_INPUTS
    weight = torch.arange(1.0, CLASSES + 1)
    calls = [
        (y, ("ids", "features", "table"), (), {}),
        (y[:4], ("ids", "features", "table", "scale"), (), {"weight": weight}),
        (y, ("ids", "features"), ("table", "mask"), {}),
        (y, (), tuple(given), {"weight": weight}),
        (y, ("ids", "features", "table"), (), {}),
    ]
    seen = []
    for target, args, kwargs, more in calls:
        rows = len(target)
        cut = {n: v if n in ("table", "scale") else v[:rows] for n, v in given.items()}
        engine.zero_grad()
        output = engine(*(cut[n] for n in args), **{n: cut[n] for n in kwargs})
        loss = engine.criterion(output, target, **more)
        engine.backward(loss)
        engine.step()
        seen.append((loss.item(), output.value()))
    engine.eval()
    evaluated = engine(*(given[n] for n in ("ids", "features", "table")))
    return {"seen": seen, "evaluated": evaluated, "weights": whole(engine)}


def test_several_inputs_keywords_trees_integers_and_shapes():
    results = run_ranks(named, 2)
    model, y, given = Named(), make_data(8)[1], NAMED_INPUTS
    optimizer, weight = sgd(model.parameters()), torch.arange(1.0, CLASSES + 1)
    expected = []
    names = [("ids", "features", "table"), ("ids", "features", "table", "scale"), ("ids", "features", "table", "mask")]
    for rows, which, weighted in ((8, 0, 0), (4, 1, 1), (8, 2, 0), (8, None, 1), (8, 0, 0)):
        inputs = {n: given[n] for n in (given if which is None else names[which])}
        optimizer.zero_grad()
        losses, outputs = [], []
        for part in range(2):  # a weighted mean is not the mean of halves
            rows_of = slice(part * rows // 2, (part + 1) * rows // 2)
            cut = {n: v if n in ("table", "scale") else v[rows_of] for n, v in inputs.items()}
            outputs.append(model(**cut))
            losses.append(named_criterion(outputs[-1], y[rows_of], weight if weighted else None))
        (sum(losses) / 2).backward()
        optimizer.step()
        expected.append((sum(losses).item() / 2, outputs))
    for result in results:
        for (loss, output), (wanted, outputs) in zip(result["seen"], expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5)
            torch.testing.assert_close(output["scores"], torch.cat([o["scores"] for o in outputs]).detach())
            assert torch.equal(output["rounded"], torch.cat([o["rounded"] for o in outputs]))
            torch.testing.assert_close(output["extra"][0], torch.cat([o["extra"][0] for o in outputs]))
            assert output["extra"][1] == 7
        assert difference(result["weights"], model) < 1e-6
        wanted = model.eval()(*(given[n] for n in ("ids", "features", "table")))
        torch.testing.assert_close(result["evaluated"]["scores"], wanted["scores"].detach())
        assert torch.equal(result["evaluated"]["rounded"], wanted["rounded"])


# -- evaluation ------------------------------------------------------------------------------------------------------


def evaluations(rank: int, world_size: int) -> dict[str, Any]:
    x, y = make_data(12)
    found: dict[str, Any] = {}
    for outputs in ("all", "last"):
        for schedule, options in SCHEDULES.items():
            engine = make(pipe(schedule=schedule, eval_outputs=outputs, **options), Deep(nn.BatchNorm1d(16)))
            before = copy.deepcopy(engine.model.state_dict())
            engine.eval()
            seen = [engine(x[:rows]) for rows in (5, 12, 1)]
            engine.train()
            with torch.no_grad():
                running = engine(x)
            after_training_mode = engine.model.state_dict()
            changed = [n for n, v in before.items() if not torch.equal(v, after_training_mode[n])]
            step(engine, x, y)
            engine.eval()
            if outputs == "all" or engine.context.is_last_stage:
                loss = engine.criterion(engine(x[:3]), y[:3]).item()
                values = [v.clone() for v in seen], running.clone(), loss
            else:
                with pytest.raises(halfmesh.InputError) as direct:
                    seen[0].argmax()
                with pytest.raises(halfmesh.InputError) as through:
                    engine.criterion(seen[0], y[:5])
                engine(x[:3])
                values = str(direct.value), str(through.value)
            engine.close()
            found[outputs, schedule] = values, changed
    return found


def test_evaluation_gives_outputs_at_once():
    first, second = run_ranks(evaluations, 2)
    x, _ = make_data(12)
    for (outputs, schedule), (values, changed) in second.items():
        model = Deep(nn.BatchNorm1d(16)).eval()
        torch.testing.assert_close(values[0], [model(x[:rows]).detach() for rows in (5, 12, 1)])
        torch.testing.assert_close(values[1], model.train()(x).detach())
        assert set(changed) <= {"3.running_mean", "3.running_var", "3.num_batches_tracked"}
        if outputs == "all":
            assert values[2] == pytest.approx(first[outputs, schedule][0][2], abs=0)
    for (outputs, _), (values, _) in first.items():
        if outputs == "all":
            torch.testing.assert_close(values[0], second[outputs, "gpipe"][0][0])
        else:
            assert all("only the ranks with the last stage have the output" in message for message in values)


# -- layers that look at the batch ------------------------------------------------------------------------------------


def statistics(rank: int, world_size: int) -> dict[str, Any]:
    x, y = make_data(16)
    found = {}
    for schedule, options in SCHEDULES.items():
        engine = make(pipe(microbatches=4, schedule=schedule, **options), Deep(nn.BatchNorm1d(16)))
        untouched = {n: v.clone() for n, v in engine.model.named_buffers()}
        engine(x), engine(x[:8])  # without backward nothing runs
        same = all(torch.equal(v, dict(engine.model.named_buffers())[n]) for n, v in untouched.items())
        for _ in range(3):
            step(engine, x, y)
        found[schedule] = same, whole(engine)
    return found


def test_batch_norm_sees_the_microbatches_and_nothing_else():
    results = run_ranks(statistics, 2)
    model, (x, y) = Deep(nn.BatchNorm1d(16)), make_data(16)
    optimizer = sgd(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        for inputs, targets in zip(x.chunk(4), y.chunk(4), strict=True):
            (nn.functional.cross_entropy(model(inputs), targets) / 4).backward()
        optimizer.step()
    for result in results:
        for untouched, weights in result.values():
            assert untouched
            assert difference(weights, model) < 1e-6
            assert weights["3.num_batches_tracked"] == 12


class Recorded(nn.Dropout):
    """Keeps its masks."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if type(x) is torch.Tensor:  # not a tensor without memory
            self.masks.append((output != 0).detach())
        return output


def masks(rank: int, world_size: int) -> dict[str, Any]:
    """2 stages x 2 data ranks, each with dropout of the same shape; one rank draws numbers of its own between."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(FEATURES, 16), Recorded(), nn.Linear(16, 16), Recorded(), nn.Linear(16, CLASSES))
    engine = make(pipe(partition=("2",)) | {"seed": 3}, model)
    x, y = make_data(8)
    for _ in range(2):
        if rank == 1:
            torch.rand(5)
        step(engine, x, y)
    outside = torch.rand(3)
    mine = model[1] if engine.context.pp_rank == 0 else model[3]
    return {"masks": mine.masks, "outside": outside}


def test_every_microbatch_stage_and_data_rank_drops_otherwise():
    results = run_ranks(masks, 4)
    flat = [mask.flatten().tolist() for result in results for mask in result["masks"]]
    assert len(flat) == 4 * 2 * 2
    assert all(first != second for i, first in enumerate(flat) for second in flat[:i])
    # What the user draws agrees over the stages of a data rank, and does not depend on the model.
    outside = [result["outside"] for result in results]
    assert torch.equal(outside[0], outside[2])
    assert not torch.equal(outside[0], outside[1])
    again = run_ranks(masks, 4)
    assert [m.tolist() for r in again for m in r["masks"]] == [m.tolist() for r in results for m in r["masks"]]


def masks_of_tensor_groups(rank: int, world_size: int) -> list[torch.Tensor]:
    """2 stages x 2 ranks of a tensor group, with dropout on activations that each of these has whole."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(FEATURES, 16), Recorded(), nn.Linear(16, 16), Recorded(), nn.Linear(16, CLASSES))
    config = pipe(partition=("2",))
    config["parallel"]["tensor"] = {"size": 2, "plan": {"0": "colwise_gather", "2": "colwise_gather"}}
    engine = make(config, model)
    for _ in range(2):
        if rank == 1:
            torch.rand(5)
        step(engine, *make_data(8))
    return (model[1] if engine.context.pp_rank == 0 else model[3]).masks


def test_a_tensor_group_drops_alike_in_each_stage():
    first, second, third, fourth = run_ranks(masks_of_tensor_groups, 4)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(third, fourth, rtol=0, atol=0)
    assert all(not torch.equal(mask, other) for mask in first for other in third)


def unfreezes(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The first stage is trained from the third update on, the last until then."""
    model = Deep()
    model[0].requires_grad_(False)
    kept = list(model[0].parameters()), list(model[-1].parameters())
    engine = make(pipe(), model)
    x, y = make_data(8)
    for number in range(4):
        if number == 2:
            for param in kept[0]:
                param.requires_grad_(True)
            for param in kept[1]:
                param.requires_grad_(False)
        step(engine, x, y)
    return whole(engine)


def test_parameters_are_frozen_and_unfrozen_on_the_way():
    model, (x, y) = Deep(), make_data(8)
    optimizer = sgd(model.parameters())
    model[0].requires_grad_(False)
    for number in range(4):
        if number == 2:
            model[0].requires_grad_(True), model[-1].requires_grad_(False)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for weights in run_ranks(unfreezes, 2):
        assert difference(weights, model) < 1e-6


# -- ragged batches --------------------------------------------------------------------------------------------------


def tails(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for schedule, options in SCHEDULES.items():
        config = pipe(microbatches=4, schedule=schedule, gradient_accumulation=2, **options)
        engine = make(config, loader=make_loader(22, 8), eval_dataloader=make_loader(22, 5))
        losses = []
        for _ in range(2):
            for x, y in engine.dataloader:
                losses.append(step(engine, x, y)[1].item())
        engine.eval()
        seen = sum(len(engine(x)) for x, _ in engine.eval_dataloader)
        found[schedule] = losses, seen, whole(engine)
    engine = make(pipe(microbatches=4, schedule="interleaved", chunks=2))
    x, y = make_data(8)
    with pytest.raises(halfmesh.InputError) as error:
        engine(x[:3])
    step(engine, x, y)
    return found | {"message": str(error.value)}


def test_ragged_last_batches_are_run_in_other_microbatches_or_refused():
    results = run_ranks(tails, 2)
    x, y = make_data(22)
    for schedule in SCHEDULES:
        model, expected = Deep(), []
        optimizer = sgd(model.parameters())
        for _ in range(2):
            for cycle in ((slice(0, 8), slice(8, 16)), (slice(16, 22),)):
                optimizer.zero_grad()
                for piece in cycle:
                    loss = nn.functional.cross_entropy(model(x[piece]), y[piece])
                    (loss / len(cycle)).backward()
                    expected.append(loss.item())
                optimizer.step()
        for result in results:
            losses, seen, weights = result[schedule]
            assert losses == pytest.approx(expected, rel=1e-5)
            assert seen == 22
            assert difference(weights, model) < 1e-6
    assert results[0]["message"] == results[1]["message"]
    assert "a batch of 3 samples cannot be split into 4 microbatches" in results[0]["message"]
    assert "drop_last=True" in results[0]["message"]


# -- state and collectives -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A weight in the first and the last stage."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.middle = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, FEATURES)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def resumes(rank: int, world_size: int) -> dict[str, Any]:
    x, _ = make_data(8)
    y = x.roll(1, 0)
    found: dict[str, Any] = {}
    for mode in ({}, {"bf16": {"mode": "naive"}}):
        config = pipe(partition=("middle",)) | mode
        options = {"criterion": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)}
        engine = make(config, Tied(rank), **options)
        names = sorted(engine.model.state_dict())
        for _ in range(2):
            step(engine, x, y)
        saved = copy.deepcopy(engine.state_dict())
        for _ in range(2):
            step(engine, x, y)
        tied = engine.state_dict()["model"]["first.weight" if engine.context.pp_rank == 0 else "last.weight"].clone()
        expected = whole(engine)
        held = [len(group["params"]) for group in engine.optimizer.param_groups], len(engine.optimizer.state)
        other = make(config, Tied(rank + 5), **options)
        other.load_state_dict(saved)
        for _ in range(2):
            step(other, x, y)
        resumed = whole(other)
        third = make(config, Tied(9), **options)
        third.model.load_state_dict(expected)
        found["bf16" if mode else "fp32"] = {
            "names": names,
            "same": all(torch.equal(expected[n], resumed[n]) for n in expected),
            "tied": tied,
            "whole": expected,
            "held": held,
            "loaded": all(torch.equal(v, expected[n]) for n, v in third.state_dict()["model"].items()),
        }
        third.close()
        third = make(config, Tied(9), **options)
        elsewhere = saved | {"layout": saved["layout"] | {"pp_rank": 1 - third.context.pp_rank}}
        with pytest.raises(halfmesh.InputError, match=r"the state holds part 0 of 1 \(tensor\) of stage"):
            third.load_state_dict(elsewhere)
        third.close()
    return found


def test_state_resumes_and_is_given_back_whole():
    first, second = run_ranks(resumes, 2)
    for mode in ("fp32", "bf16"):
        both = ["first.weight", "last.weight"]  # one weight, under both of its names
        assert first[mode]["names"] == sorted(["count", "first.bias", *both])
        assert second[mode]["names"] == sorted(["last.bias", "middle.bias", "middle.weight", *both])
        assert first[mode]["same"]
        assert second[mode]["same"]
        assert first[mode]["loaded"]
        assert second[mode]["loaded"]
        assert torch.equal(first[mode]["tied"], second[mode]["tied"])
        assert first[mode]["whole"].keys() == Tied().state_dict().keys()
        assert all(torch.equal(v, second[mode]["whole"][n]) for n, v in first[mode]["whole"].items())
        assert first[mode]["held"] == second[mode]["held"] == ([5], 5)


def sends(rank: int, world_size: int) -> dict[str, Any]:
    """What was sent when backward ended, and what remained; all-reduces over the data ranks are counted."""
    x, y = make_data(8)
    found = {}
    for schedule, options in SCHEDULES.items():
        config = pipe(microbatches=4, schedule=schedule, gradient_accumulation=2, **options)
        config["parallel"]["data"] = {"bucket_mb": 1e-4}  # a bucket for each parameter
        engine = make(config)
        counts, inner = [], Reducer.finish

        def finish(self: Reducer, inner: Any = inner, counts: list[Any] = counts) -> None:
            before = self.collectives
            inner(self)
            counts.append((before, self.collectives, self.bytes_reduced))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reducer, "finish", finish)
            for _ in range(4):
                step(engine, x, y)
        own = list(engine.model.parameters())
        found[schedule] = counts, len(own), sum(p.numel() + 1 for p in own) * 4
        engine.close()
    return found


def test_gradients_are_reduced_in_the_last_backward_once_per_update():
    for result in run_ranks(sends, 4):
        for counts, params, size in result.values():
            # The last bucket is sent when backward is over: no gradient comes after it.
            assert counts == [(params * n - 1, params * n, size * n) for n in (1, 2)]


def traffic(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank sends in one update: to other stages, and to all."""
    x, y = make_data(8)
    found = {}
    modes = {"fp32": {}, "torch": {"bf16": {"mode": "torch"}}, "naive": {"bf16": {"mode": "naive"}}}
    for name, mode in modes.items():
        engine = make(pipe(microbatches=4, clip_grad_norm=1.0) | mode)
        step(engine, x, y)
        sent: list[int] = []
        collectives: list[tuple[str, int]] = []

        class Recorded(dist.P2POp):
            def __init__(self, op: Any, tensor: torch.Tensor, *args: Any, sent: Any = sent, **kwargs: Any) -> None:
                super().__init__(op, tensor, *args, **kwargs)
                if op is dist.isend:
                    sent.append(tensor.numel() * tensor.element_size())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "P2POp", Recorded)
            for call in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list"):
                inner = getattr(dist, call)

                def record(
                    tensor: Any, *args: Any, call: Any = call, inner: Any = inner, to: Any = collectives, **kw: Any
                ):
                    to.append((call, tensor.numel() * tensor.element_size()))
                    return inner(tensor, *args, **kw)

                patch.setattr(dist, call, record)
            step(engine, x, y)[1].item()
        found[name] = sent, collectives
        engine.close()
    return found


def test_what_is_sent_in_an_update():
    """Activations once forward and their gradients once back, the loss, and one verdict with the norm."""
    for result in run_ranks(traffic, 2):
        for mode, size in {"fp32": 4, "torch": 4, "naive": 2}.items():
            sent, collectives = result[mode]
            assert sent == [2 * 16 * size] * 4
            assert collectives == [("broadcast", 16), ("all_reduce", 8)]


def joins_later(rank: int, world_size: int) -> dict[str, Any]:
    """The middle layer is trained from the third update on, in a group of its own."""
    return train_late(lambda model, optimizer: make(pipe(), model, optimizer=optimizer), rank)


def train_late(build: Any, rank: int = 0) -> dict[str, Any]:
    model, (x, y) = Deep(), make_data(8)
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[-1].parameters()], lr=0.01)
    engine = build(model, optimizer)
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        if engine is not None:
            step(engine, x, y)
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for param in {*model.parameters()} - {p for group in optimizer.param_groups for p in group["params"]}:
            param.grad = None
        optimizer.step()
    if engine is not None:
        engine.close()
    state = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in model.named_parameters()}
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return {"groups": groups, "state": state, "weights": {n: v.clone() for n, v in model.state_dict().items()}}


def test_parameters_join_the_optimizer_later():
    expected = train_late(lambda model, optimizer: None)
    for result in run_ranks(joins_later, 2):
        assert result["groups"] == expected["groups"]
        torch.testing.assert_close(result["weights"], expected["weights"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(result["state"], expected["state"], rtol=1e-4, atol=1e-7)


def raises(rank: int, world_size: int) -> str:
    """The criterion fails on the last stage, of which the first hears when the connection closes."""

    def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise LookupError("no such class")

    engine = make(pipe(), criterion=criterion)
    if engine.context.is_last_stage:
        with pytest.raises(LookupError, match=r"^no such class$"):
            step(engine, *make_data(8))
        return "raised"
    with pytest.raises(RuntimeError):
        step(engine, *make_data(8))
    return "lost"


def test_errors_of_a_stage_are_raised_as_they_are():
    assert run_ranks(raises, 2, timeout=30) == ["lost", "raised"]


def idle_stages(rank: int, world_size: int) -> dict[str, Any]:
    """Stages with nothing to train, and one without parameters; the loss overflows once."""
    x, y = make_data(8)
    found = {}
    layers: Iterator[Any] = iter(())
    for name, frozen in (("first", (0,)), ("middle", (2,)), ("last", (5,)), ("none", ())):
        layers = (nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.GELU(), nn.Linear(16, CLASSES))
        torch.manual_seed(0)
        model = nn.Sequential(*layers)
        for layer in model:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        for index in frozen:
            model[index].requires_grad_(False)
        factors = iter([1.0, torch.inf, 1.0])
        criterion = Factored()
        config = pipe(4, 4, partition=("2", "4", "5"), fp16={"mode": "torch", "init_scale": 64.0}, clip_grad_norm=0.1)
        engine = make(config, model, criterion=criterion)
        results = []
        for criterion.factor in factors:
            result = step(engine, x, y)[2]
            results.append((result.skipped, result.loss_scale, result.grad_norm))
        found[name] = results, whole(engine)
    return found


class Factored:
    factor: float = 1.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) * self.factor


def test_stages_without_trainable_parameters_share_the_verdict():
    results = run_ranks(idle_stages, 4)
    for name in ("first", "middle", "last", "none"):
        steps = [result[name][0] for result in results]
        assert [(skipped, scale) for skipped, scale, _ in steps[0]] == [(False, 64), (True, 64), (False, 32)]
        assert all(repr(other) == repr(steps[0]) for other in steps)
        assert 0 < steps[0][0][2] < 10
        weights = [result[name][1] for result in results]
        assert all(torch.equal(v, other[n]) for other in weights for n, v in weights[0].items())
    assert dist.is_initialized() is False
