"""Handles: before backward every use says what to do, afterwards they are used like what they stand for."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfmesh.engine.handles import Elsewhere, Handle, HandleError, PipelineLoss, PipelineOutput, find_handles, replace
from halfmesh.errors import InputError

X = torch.ones(())
USES = {
    "item": lambda h: h.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "f-string": lambda h: f"{h:.3f}",
    "str.format": lambda h: "{}".format(h),  # noqa: UP032
    "add": lambda h: h + 1,
    "radd": lambda h: 1 + h,
    "sum": lambda h: sum([h, h]),
    "sub": lambda h: h - 1,
    "rsub": lambda h: 1 - h,
    "mul": lambda h: h * 2,
    "rmul": lambda h: 2 * h,
    "tensor times": lambda h: X * h,
    "times tensor": lambda h: h * X,
    "div": lambda h: h / 2,
    "rdiv": lambda h: 1 / h,
    "floordiv": lambda h: h // 2,
    "mod": lambda h: h % 2,
    "pow": lambda h: h**2,
    "rpow": lambda h: 2**h,
    "neg": lambda h: -h,
    "abs": abs,
    "less": lambda h: h < 1,
    "at most": lambda h: h <= 1,
    "greater": lambda h: h > 1,
    "at least": lambda h: h >= 1,
    "equal": lambda h: h == 1,
    "not equal": lambda h: h != 1,
    "tensor equal": lambda h: h == X,
    "detach": lambda h: h.detach(),
    "dtype": lambda h: h.dtype,
    "isnan": torch.isnan,
    "isfinite": lambda h: torch.isfinite(h).all(),
    "stack": lambda h: torch.stack([h, h]),
    "into a sum": lambda h: torch.zeros(()).add_(h),
    "exp": torch.exp,
    "numpy": np.asarray,
    "float of numpy": lambda h: np.float32(h),
}
OF_OUTPUTS = {
    "matmul": lambda h: h @ torch.ones(3, 2),
    "rmatmul": lambda h: torch.ones(2, 2) @ h,
    "rmatmul of a list": lambda h: [1] @ h,
    "argmax": lambda h: h.argmax(1),
    "index": lambda h: h[0],
    "unpack": lambda h: [*h],
    "length": len,
    "contains": lambda h: 1 in h,
    "logits": lambda h: h.logits,
    "shape": lambda h: h.shape,
    "cross_entropy": lambda h: F.cross_entropy(h, torch.zeros(2, dtype=torch.int64)),
    "module": lambda h: nn.Linear(3, 2)(h),
    "softmax": lambda h: F.softmax(h, 1),
    "cat": lambda h: torch.cat([h, h]),
    "setitem": lambda h: h.__setitem__(0, 1),
    "in place": lambda h: h.__iadd__(1),
}


def loss() -> PipelineLoss:
    return PipelineLoss(PipelineOutput(None), None)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_loss_before_backward(use):
    with pytest.raises(HandleError, match=r"the loss is not computed before engine.backward\(loss\)"):
        use(loss())


@pytest.mark.parametrize("use", (USES | OF_OUTPUTS).values(), ids=USES | OF_OUTPUTS)
def test_an_output_before_backward(use):
    with pytest.raises(HandleError, match=r"the output of engine\(...\) is not computed before .*keep_outputs=True"):
        use(PipelineOutput(None))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_output_that_another_rank_has(use):
    with pytest.raises(HandleError, match=r"only the ranks with the last stage have the output.*is_last_stage"):
        use(Elsewhere())


@pytest.mark.parametrize("name", [name for name in USES if name != "float of numpy"])
def test_a_loss_after_backward_is_what_it_stands_for(name):
    handle, value = loss(), torch.tensor(0.75)
    handle.settle(lambda: value)
    found, expected = USES[name](handle), USES[name](value)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    else:
        assert np.all(found == expected)


@pytest.mark.parametrize("name", [name for name in OF_OUTPUTS if name not in ("logits", "rmatmul of a list")])
def test_a_kept_output_is_what_it_stands_for(name):
    handle, value = PipelineOutput(None), torch.rand(2, 3)
    if name == "rmatmul":
        value = torch.rand(2, 3)
    handle.settle(lambda: value.clone())
    torch.manual_seed(0)
    found = OF_OUTPUTS[name](handle)
    torch.manual_seed(0)
    expected = OF_OUTPUTS[name](value.clone())
    assert repr(found) == repr(expected)


def test_other_kinds_of_outputs():
    pair, named = PipelineOutput(None), PipelineOutput(None)
    pair.settle(lambda: (torch.ones(2), torch.zeros(3)))
    named.settle(lambda: {"logits": torch.ones(2)})
    first, second = pair
    assert (first.sum(), second.sum(), len(pair)) == (2, 0, 2)
    assert named["logits"].sum() == 2
    assert pair.value()[0] is pair.value()[0]


def test_a_weighted_loss_is_a_pair():
    handle = loss()
    handle.settle(lambda: (torch.tensor(6.0), torch.tensor(3.0)))
    total, weight = handle
    assert total / weight == 2


def test_values_are_asked_for_once_and_late():
    calls, handle = [], loss()
    handle.settle(lambda: calls.append(1) or torch.tensor(1.0))
    assert handle.is_ready
    assert not calls
    assert handle.item() == float(handle) == 1
    assert calls == [1]


def test_printing_never_fails():
    assert repr(loss()) == str(loss()) == "<PipelineLoss: not computed yet>"
    handle = loss()
    handle.settle(lambda: torch.tensor(1.0))
    assert repr(handle) == "tensor(1.)"


def test_an_output_that_was_not_kept():
    handle = PipelineOutput(None)
    handle.drop()
    with pytest.raises(HandleError, match=r"the output of engine.* was not kept: set parallel = dict"):
        handle.argmax(1)


def test_the_models_own_loss():
    with pytest.raises(HandleError, match=r"own loss .output.loss. is on the last stage.*engine.criterion\(output"):
        _ = PipelineOutput(None).loss
    with pytest.raises(
        HandleError, match=r"loss.backward\(\) does not run the pipeline; write engine.backward\(loss\)"
    ):
        loss().backward()


def test_python_finds_what_it_looks_for():
    handle = PipelineOutput(None)
    assert not hasattr(handle, "logits")
    assert not hasattr(handle, "__len_hint__")
    assert copy.copy(handle) is not handle
    assert {handle: 1}[handle] == 1
    assert isinstance(pickle.loads(pickle.dumps(PipelineOutput(None))), PipelineOutput)
    assert issubclass(HandleError, (InputError, TypeError, AttributeError))


def test_handles_are_found_and_replaced_in_trees():
    a, b = PipelineOutput(None), loss()
    tree = {"x": [a, 1], "y": (b, {"z": a})}
    assert list(map(id, find_handles(tree))) == [id(a), id(b), id(a)]
    assert find_handles([1, "a", torch.ones(1)]) == []
    changed = replace(tree, a, 5)
    assert changed["x"] == [5, 1]
    assert changed["y"][0] is b
    assert changed["y"][1] == {"z": 5}
    assert isinstance(a, Handle)
