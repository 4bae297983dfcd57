"""What NonFiniteError says of the first inf or nan, in one process."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.engine.health.diagnosis import Diagnosis
from halfmesh.engine.health.last_batch import CHANGED, NO_LOSS, UNKNOWN
from halfmesh.parallel.pipeline.boundary import tensors_of
from tests.support.models import make_data

RAISE = {"on_nonfinite": "raise"}
TORCH = {"fp16": {"mode": "torch", "init_scale": 16.0}, **RAISE}
NAIVE = {"fp16": {"mode": "naive", "initial_scale": 16.0}, **RAISE}
O1 = {"fp16": {"mode": "apex", "opt_level": "O1", "max_loss_scale": 16.0}, **RAISE}


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Root(nn.Module):
    """Its value at 0 is finite, its derivative is not."""

    def forward(self, x):
        return (x * 0).abs().sqrt()


class Block(nn.Module):
    """`between` is done by its own forward, between two modules."""

    def __init__(self, *inner, between=None):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Sequential(*inner), nn.Linear(8, 8)
        self.between = between

    def forward(self, x):
        x = self.inner(self.first(x))
        return self.last(x if self.between is None else self.between(x))


def net(*inner, between=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(*inner, between=between), nn.Linear(8, 4))


def fail(model, config, *, x=None, criterion=nn.functional.cross_entropy, loss=None, before=None, batches=1):
    """The error of a run whose batches are all the same."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = halfmesh.initialize(model, optimizer, criterion, config=config, device="cpu")
    samples, y = make_data(4)
    if before is not None:
        with torch.no_grad():
            before(engine.model)
    loss = loss or (lambda engine, output: engine.criterion(output, y))
    error = None
    for _ in range(batches):
        engine.zero_grad()
        engine.backward(loss(engine, engine(samples if x is None else x)))
        try:
            engine.step()
        except halfmesh.NonFiniteError as raised:
            error = raised
    assert error is not None
    assert str(error.diagnosis) in str(error)
    return error


def fault_of(*args, **options):
    return fail(*args, **options).diagnosis.fault


# -- where it began --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [RAISE, TORCH, NAIVE, O1], ids=["fp32", "torch", "naive", "o1"])
def test_a_weight(config):
    def spoil(model):
        model[1].last.weight[2, 3] = float("nan")

    error = fail(net(), config, before=spoil)
    fault = error.diagnosis.fault
    assert (fault.kind, fault.name, fault.numbers.nan, fault.numbers.count) == ("weight", "1.last.weight", 1, 64)
    assert "the weight '1.last.weight', before the forward: 1 nan of 64 numbers" in str(error)
    assert "the model was bad before. Go on from an older checkpoint" in str(error)


def test_a_weight_that_half_precision_does_not_have():
    """Its master has it: the model's own is inf."""

    def grow(model):
        model[1].last.weight[2, 3] = 1e6

    fault = fault_of(net(), NAIVE, before=grow)
    assert (fault.kind, fault.numbers.inf, fault.dtype) == ("weight", 1, torch.float16)


@pytest.mark.parametrize("config", [RAISE, TORCH, NAIVE, O1], ids=["fp32", "torch", "naive", "o1"])
def test_the_batch(config):
    x, _ = make_data(4)
    x[1, 2], x[1, 3] = float("inf"), float("nan")
    error = fail(net(), config, x=x)
    assert "the batch: argument 'input' of the model holds 1 inf and 1 nan of 32 numbers" in str(error)
    assert "look at the data" in error.diagnosis.advice


def test_a_batch_that_half_precision_does_not_have():
    error = fail(net(), NAIVE, x=torch.full((4, 8), 1e6))
    assert "what the model was given, in float16, by the cast of a batch that is finite: 32 inf of 32" in str(error)
    assert "scale the inputs" in error.diagnosis.advice


@pytest.mark.parametrize("config", [TORCH, NAIVE], ids=["torch", "naive"])
def test_an_activation_in_fp16(config):
    error = fail(net(Times(1e4), Times(1e4)), config)
    fault = error.diagnosis.fault
    assert (fault.kind, fault.name, fault.layer, fault.dtype) == ("output", "1.inner.1", "Times", torch.float16)
    assert 1e3 < fault.inputs < 65504
    assert "float16 ends at 65504" in str(error)
    assert "use bf16" in error.diagnosis.advice
    assert ("torch.autocast" in error.diagnosis.advice) == (config is TORCH)


def test_an_activation_in_fp32():
    error = fail(net(Times(1e30), Times(1e30)), RAISE)
    assert "the output of '1.inner.1' (Times), in float32" in str(error)
    assert error.diagnosis.fault.numbers.inf == 32
    assert "bf16" not in error.diagnosis.advice


def test_the_reach_of_weights_is_told():
    def grow(model):
        model[1].last.weight.fill_(6e4)

    fault = fault_of(net(), TORCH, before=grow)
    assert (fault.kind, fault.name) == ("output", "1.last")
    assert fault.weights == pytest.approx(6e4)


def test_operations_between_modules():
    error = fail(net(between=lambda x: x / 0), RAISE)
    fault = error.diagnosis.fault
    assert (fault.kind, fault.name) == ("between", "1.last")
    words = "what '1.last' (Linear) was given, in float32, made by operations in the forward of '1' (Block)"
    assert words in str(error)


def test_operations_after_the_last_module():
    class Ends(Block):
        def forward(self, x):
            return super().forward(x) / 0

    model = nn.Sequential(Ends(), nn.Linear(8, 4))
    error = fail(model, RAISE)
    assert error.diagnosis.fault.name == "0"
    assert "what the modules within it return is finite, it comes from operations in its own forward" in str(error)


@pytest.mark.parametrize("config", [RAISE, TORCH, NAIVE], ids=["fp32", "torch", "naive"])
def test_a_backward(config):
    error = fail(net(Root()), config)
    fault = error.diagnosis.fault
    assert (fault.kind, fault.name, fault.numbers.nan) == ("gradient", "1.first", 32)
    assert fault.around == ("'1.inner.0' (Root)",)
    assert "the gradient of the output of '1.first' (Linear)" in str(error)
    assert "made by the backward of '1.inner.0' (Root)" in str(error)
    assert "sqrt(x + 1e-12)" in error.diagnosis.advice


def test_the_backward_of_the_criterion():
    def criterion(output, y):
        return (output * 0).abs().sqrt().sum()

    error = fail(net(), RAISE, criterion=criterion)
    assert error.diagnosis.fault.around == ("the criterion",)
    assert "the gradient of the output of '2' (Linear), in float32, made by the backward of the criterion" in str(error)


def test_the_backward_of_the_criterion_after_a_cast():
    """Under NAIVE the criterion is given another tensor than the model has made."""

    def criterion(output, y):
        return (output * 0).abs().sqrt().sum()

    assert "the gradient of what the criterion was given" in str(fail(net(), NAIVE, criterion=criterion))


def test_the_loss():
    def criterion(output, y):
        return (output.softmax(-1) * 0).log().mean()

    error = fail(net(), RAISE, criterion=criterion)
    assert error.diagnosis.fault.kind == "loss"
    assert "the value of the criterion, in float32: 1 inf of 1 numbers" in str(error)


def test_targets():
    def criterion(output, y):
        return (output * y).sum()

    y = torch.full((4, 1), float("nan"))
    error = fail(net(), RAISE, criterion=criterion, loss=lambda engine, output: engine.criterion(output, y))
    assert "what the criterion was given besides the model's output holds 4 nan of 4 numbers" in str(error)


@pytest.mark.parametrize("config", [TORCH, NAIVE], ids=["torch", "naive"])
def test_a_gradient_of_a_weight_that_the_scale_makes_too_large(config):
    """Those of activations fit: the sum over samples does not."""
    key = "init_scale" if config is TORCH else "initial_scale"
    config = {**config, "fp16": {**config["fp16"], key: 2.0**15}}
    x = torch.full((4, 8), 8.0)
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    error = fail(model, config, x=x, criterion=lambda output, y: output.sum())
    fault = error.diagnosis.fault
    assert (fault.kind, fault.name) == ("parameter", "0.weight")
    assert "leaves float16: let the loss scale fall further" in error.diagnosis.advice


def test_nothing_is_found_where_random_numbers_decide():
    class Once(nn.Module):
        calls = 0

        def forward(self, x):
            Once.calls += 1
            return x / 0 if Once.calls == 1 else x

    error = fail(net(Once()), RAISE)
    assert error.diagnosis.fault is None
    assert "no inf or nan was met when the last batch was computed once more" in str(error)
    assert "an earlier microbatch" in error.diagnosis.advice


def test_buffers_are_told_of():
    """Statistics are nan after a batch that holds nan, and it does not end with the batch."""
    x, _ = make_data(4)
    x[0, 0] = float("nan")
    error = fail(net(nn.BatchNorm1d(8)), RAISE, x=x)
    assert error.diagnosis.fault.kind == "input"
    assert "the buffers 1.inner.0.running_mean, 1.inner.0.running_var hold inf or nan now" in str(error)


# -- modules that are computed again, or compiled --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpoint": {"patterns": ["1"]}},
        {"compile": {"backend": "eager", "scope": "model", "fullgraph": True}},
        {"activation_checkpoint": {"patterns": ["1"]}, "compile": {"backend": "eager", "scope": "blocks"}},
    ],
    ids=["checkpoint", "compile", "both"],
)
@pytest.mark.parametrize("inner", [Times(float("inf")), Root()], ids=["forward", "backward"])
def test_computed_again_or_compiled(options, inner):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(), Block(inner), nn.Linear(8, 4))
    if "activation_checkpoint" in options:
        options = {**options, "activation_checkpoint": {"patterns": ["1", "2"]}}
    fault = fault_of(model, {**RAISE, **options})
    found = (fault.kind, fault.name) if fault.kind == "output" else (fault.kind, *fault.around)
    assert found in [("output", "2.inner.0"), ("gradient", "'2.inner.0' (Root)")]


# -- losses of all kinds ---------------------------------------------------------------------------------------------


class OwnLoss(nn.Module):
    def __init__(self, form, inner):
        super().__init__()
        self.form, self.layer, self.inner = form, nn.Linear(8, 4), inner

    def forward(self, x):
        logits = self.inner(self.layer(x))
        loss = logits.sum()
        return {"loss": loss, "dict": {"logits": logits, "loss": loss}, "tuple": (loss, logits)}[self.form]


@pytest.mark.parametrize("form", ["loss", "dict", "tuple"])
def test_a_model_with_its_own_loss(form):
    def own(engine, output):
        return {"loss": lambda: output, "dict": lambda: output["loss"], "tuple": lambda: output[0]}[form]()

    fault = fault_of(OwnLoss(form, Root()), RAISE, criterion=None, loss=own)
    assert (fault.kind, fault.around) == ("gradient", ("'inner' (Root)",))


@pytest.mark.parametrize(
    "loss",
    [
        lambda engine, output: engine.criterion(output["logits"]),
        lambda engine, output: engine.criterion(target=None, output=output["logits"]),
        lambda engine, output: engine.criterion(output["logits"][:, :3].reshape(2, -1)),
        lambda engine, output: engine.criterion(output["logits"].view(-1)),
        lambda engine, output: engine.criterion(output),
    ],
    ids=["item", "keyword", "reshaped", "view", "whole"],
)
def test_what_of_the_output_the_criterion_is_given(loss):
    def criterion(output, target=None):
        return (output["logits"] if isinstance(output, dict) else output).sum()

    error = fail(OwnLoss("dict", Root()), RAISE, criterion=criterion, loss=loss)
    if error.diagnosis.fault is None:
        assert error.diagnosis.notes == (NO_LOSS,)  # a copy, which the loop made
    else:
        assert error.diagnosis.fault.around == ("'inner' (Root)",)
        assert error.diagnosis.notes == ()


def test_a_view_of_the_output_has_the_same_gradient():
    seen = []

    def criterion(output):
        output.register_hook(lambda grad: seen.append(grad.clone()))
        seen.append(output.detach().clone())
        return (output * torch.arange(output.numel()).view_as(output)).sum() * float("nan")

    fail(net(), RAISE, criterion=criterion, loss=lambda engine, output: engine.criterion(output.t()[1:3]))
    (value, grad), (value2, grad2) = seen[:2], seen[2:]
    assert torch.equal(value, value2)
    assert grad.shape == grad2.shape == (2, 4)


def test_a_loss_that_the_loop_computes():
    error = fail(net(Root()), RAISE, criterion=None, loss=lambda engine, output: output.sum())
    assert error.diagnosis.fault is None
    assert error.diagnosis.notes == (NO_LOSS,)
    forward = fail(net(Times(float("nan"))), RAISE, criterion=None, loss=lambda engine, output: output.sum())
    assert forward.diagnosis.fault.name == "1.inner.0"


def test_a_loss_that_the_loop_changes():
    y = torch.zeros(4, dtype=torch.long)
    error = fail(net(Root()), RAISE, loss=lambda engine, output: engine.criterion(output, y) * 2)
    assert error.diagnosis.fault.around == ("'1.inner.0' (Root)",)
    assert error.diagnosis.notes == (CHANGED,)


def test_weighted_losses():
    def criterion(output, y):
        return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)

    error = fail(net(Root()), {**RAISE, "loss_reduction": "weighted"}, criterion=criterion)
    assert error.diagnosis.fault.around == ("'1.inner.0' (Root)",)


def test_several_losses():
    config = {"fp16": {"mode": "apex", "opt_level": "O1", "num_losses": 2, "max_loss_scale": 16.0}, **RAISE}
    model = net(Root())
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, config=config, device="cpu"
    )
    x, y = make_data(4)
    engine.backward(engine(x).sum() * 0 + model[0](x).float().sum(), 0)
    engine.backward(engine.criterion(engine(x), y), 1)
    with pytest.raises(halfmesh.NonFiniteError) as caught:
        engine.step()
    assert caught.value.diagnosis.fault.around == ("'1.inner.0' (Root)",)
    assert caught.value.diagnosis.scales == ((16.0, 1),)


# -- the course of the scale, and what can go wrong ------------------------------------------------------------------


def test_the_course_of_the_scale():
    config = {"fp16": {"mode": "torch", "init_scale": 16.0}, "max_consecutive_skips": 4}
    error = fail(net(Times(float("inf"))), config, batches=4)
    assert error.diagnosis.scales == ((16.0, 1), (8.0, 1), (4.0, 1), (2.0, 1))
    assert (error.diagnosis.skipped, error.diagnosis.updates) == (3, 3)
    assert str(error).startswith("4 updates in a row had gradients with inf or nan (max_consecutive_skips=4)")
    assert "3 of the 3 updates before this one were skipped" in str(error)
    assert "loss scale: 16 -> 8 -> 4 -> 2\n" in str(error)


def test_a_long_course_is_shortened():
    scales = tuple((2.0**n, 1 + (n == 16)) for n in range(16, -4, -1))
    text = str(Diagnosis(scales, 0, 0, None, (), None, ""))
    assert "loss scale: 65536 (2 updates) -> 32768 -> 16384 -> 8192 -> (12 more) -> 1 -> 0.5 -> 0.25 -> 0.125" in text


def test_a_replay_that_fails_does_not_hide_the_error():
    class Twice(nn.Module):
        calls = 0

        def forward(self, x):
            Twice.calls += 1
            if Twice.calls > 1:
                raise KeyError("no more data")
            return x / 0

    error = fail(net(Twice()), RAISE)
    assert str(error).startswith("gradients hold inf or nan; the first parameter with a non-finite gradient is")
    assert "the last batch was not computed once more: KeyError: 'no more data'" in str(error)
    assert error.diagnosis.fault is None
    assert "Traceback" in error.__notes__[0]
    assert "look for inf or nan in the batch" in error.diagnosis.advice


def test_nothing_that_goes_wrong_in_a_diagnosis_hides_the_error(monkeypatch):
    def fails(*args):
        raise ZeroDivisionError("in the words")

    monkeypatch.setattr("halfmesh.engine.health.diagnosis.make_diagnosis", fails)
    model = net(Times(float("inf")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, config=RAISE, device="cpu")
    x, y = make_data(4)
    engine.backward(engine.criterion(engine(x), y))
    with pytest.raises(halfmesh.NonFiniteError, match="gradients hold inf or nan") as caught:
        engine.step()
    assert caught.value.diagnosis is None
    assert "ZeroDivisionError: in the words" in caught.value.__notes__[0]


def test_only_the_last_sixty_updates_are_told_of():
    config = {"fp16": {"mode": "torch", "init_scale": 2.0**10, "growth_interval": 1}, **RAISE}
    model = nn.Sequential(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = halfmesh.initialize(model, optimizer, lambda output: output.sum(), config=config, device="cpu")
    for _ in range(70):
        engine._update.losses.first.scale.fill_(float(2 + engine.global_step))
        engine.backward(engine.criterion(engine(torch.ones(1, 8))))
        engine.step()
    engine.backward(engine.criterion(engine(torch.full((1, 8), float("inf")))))
    with pytest.raises(halfmesh.NonFiniteError) as caught:
        engine.step()
    scales = [scale for scale, _ in caught.value.diagnosis.scales]
    assert scales[:-1] == [float(2 + step) for step in range(10, 70)]
    assert caught.value.diagnosis.updates == 60


def test_in_evaluation_mode_it_is_not_computed():
    def loss(engine, output):
        value = engine.criterion(output, torch.zeros(4, dtype=torch.long))
        engine.eval()
        return value

    error = fail(net(Times(float("inf"))), RAISE, loss=loss)
    assert "was not computed once more: the model is in evaluation mode; call engine.train() first" in str(error)


def test_the_last_microbatch_is_the_one_that_is_computed():
    config = {**RAISE, "gradient_accumulation": 2}
    error = fail(net(Times(float("inf"))), config, batches=2)
    assert error.diagnosis.fault.name == "1.inner.0"


def test_closing_forgets_the_batch():
    model = net()
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, config={}, device="cpu"
    )
    x, y = make_data(4)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert engine._seen.call[0][0] is x
    assert engine._seen.output is None  # the batch is kept, what was made of it is not
    engine.close()
    assert engine._seen.call is None


class Several(nn.Module):
    """Returns what `form` says."""

    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(8, 4), form

    def forward(self, x):
        logits = self.layer(x)
        return {"tensor": logits, "tuple": (logits.sum(), logits), "loss": logits.sum()}[self.form]


LOOPS = {
    "criterion": ("tensor", lambda engine, output, y: engine.criterion(output, y)),
    "changed": ("tensor", lambda engine, output, y: 2 * engine.criterion(output, y)),
    "view": ("tensor", lambda engine, output, y: engine.criterion(output.view(2, -1)[:, :4], y[:2])),
    "item": ("tuple", lambda engine, output, y: engine.criterion(output[1], target=y)),
    "own item": ("tuple", lambda engine, output, y: output[0]),
    "own": ("loss", lambda engine, output, y: output),
    "computed": ("tensor", lambda engine, output, y: engine.criterion(output * 2, y)),
    "by hand": ("tensor", lambda engine, output, y: output.sum()),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_evaluation_frees_the_graph_and_a_report_is_the_same(name, retain_graph):
    form, loss = LOOPS[name]
    model = Several(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.functional.cross_entropy
    engine = halfmesh.initialize(model, optimizer, criterion, config={"bf16": {"mode": "torch"}}, device="cpu")
    x, y = make_data(4)
    root = torch.ones(8, requires_grad=True)
    output = engine(x * root)
    value = loss(engine, output, y)
    engine.backward(value, retain_graph=retain_graph)
    engine.step()
    made = [weakref.ref(t) for t in [value, *(output if form == "tuple" else [output])]]
    report = engine.precision_report()
    del output, value
    with torch.inference_mode():
        engine.eval()
    engine.eval()
    assert [ref() for ref in made if ref() is not None] == []
    kept = tensors_of([engine._seen.call, engine._seen.criterion])
    assert [tensor for tensor in kept if tensor.grad_fn is not None] == []
    engine.train()
    assert engine.precision_report() == report


@pytest.mark.parametrize("end", ["eval", "close"])
def test_a_forward_alone_is_freed(end):
    model = Several("tensor")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, config={}, device="cpu")
    x, y = make_data(4)
    saved = []

    def pack(tensor):
        held = Held(tensor.detach())  # an output that holds its own graph is never freed
        saved.append(weakref.ref(held))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        engine.criterion(engine(x)[:, :2], y % 2)
    assert None not in [ref() for ref in saved]
    getattr(engine, end)()
    assert [ref() for ref in saved] == [None] * len(saved)


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


def test_evaluation_between_the_criterion_and_backward():
    def loss(engine, output):
        value = engine.criterion(output, torch.zeros(4, dtype=torch.long))
        engine.eval()
        engine.train()
        return value

    error = fail(net(Times(float("inf"))), RAISE, loss=loss)
    assert error.diagnosis.fault.name == "1.inner.0"
    assert error.diagnosis.notes == (UNKNOWN,)
