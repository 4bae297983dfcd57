"""convert_to_amp(): precision alone, for a training loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn, optim

from . import compat, inputs
from .amp.convert import convert
from .amp.plugin import AMP_PLUGINS, AMP_TYPE
from .amp.rules import UpdateRules
from .converted import AMPCriterion, AMPModel, AMPOptimizer
from .errors import IncompatibleConfigError, InputError, bullet_list
from .key_checks import recipe_of
from .shard import OneRank, ParamShard


def convert_to_amp(
    model: nn.Module,
    optimizer: optim.Optimizer,
    criterion: Callable[..., Any] | None = None,
    mode: AMP_TYPE | str = AMP_TYPE.TORCH,
    amp_config: Mapping[str, Any] | None = None,
    *,
    dtype: str = "float16",
) -> tuple[AMPModel, AMPOptimizer, Callable[..., Any] | None]:
    """Convert a model, its optimizer and a criterion to mixed precision, without engine, config file or process group.

        model, optimizer, criterion = convert_to_amp(model, optimizer, criterion, mode="naive")
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            optimizer.backward(loss)  # in place of loss.backward()
            optimizer.step()

    The model stays on its device and is cast in place; the optimizer's groups are re-pointed where fp32 masters are
    kept, so schedulers may be built on either optimizer. For data parallelism wrap the returned model in
    DistributedDataParallel: the ranks then judge the same averaged gradients.

    Args:
        model: in fp32 (mode NAIVE also takes its own half precision), on the device where it trains.
        optimizer: a torch optimizer over `model.parameters()`.
        criterion: called as before; it runs in the precision's forward scope.
        mode: "torch", "naive", "apex" or another registered mode.
        amp_config: the mode's own keys, as in `fp16 = dict(...)`.
        dtype: "float16" or "bfloat16".

    Raises:
        ConfigError: a wrong mode, or mistakes in `amp_config`.
        IncompatibleConfigError: a mode that cannot run in this dtype or on this device.
        InputError: arguments of the wrong kind.
    """
    from .config.load import load_config  # pydantic: only when there is a config to read

    keys = {name: key for key, name in compat.HALF_DTYPES.items()}
    if dtype not in keys:
        raise InputError(f"dtype={dtype!r} is not a half precision; allowed: {', '.join(map(repr, keys))}")
    if not isinstance(amp_config or {}, Mapping):
        raise InputError(f"amp_config={amp_config!r} is not a dict; write for example dict(opt_level='O2')")
    own = dict(amp_config or {})
    if "mode" in own:
        raise InputError(f"amp_config has mode={own['mode']!r}, but mode={str(mode)!r} was given; leave it out")
    config = load_config({keys[dtype]: {"mode": mode, **own}})
    assert config.precision is not None
    recipe, backend = recipe_of(config), AMP_PLUGINS.get(config.precision.mode).backend(config.precision.options)
    problems = list(inputs.find_model_problems(model, recipe, config.precision.mode))
    if not problems:
        problems += inputs.find_optimizer_problems(optimizer, model, recipe)
    problems += inputs.find_criterion_problems(criterion)
    if problems:
        raise InputError(bullet_list(f"{len(problems)} problem(s) in what was passed to convert_to_amp:", problems))
    device = next(model.parameters()).device
    compat.raise_for(compat.check(config, 1, device.type))
    unfit = [inputs.find_device_problem(device, recipe), backend.find_problem(device)]
    if any(unfit):
        raise IncompatibleConfigError([problem for problem in unfit if problem])
    shards = [ParamShard(name, param) for name, param in model.named_parameters()]
    update = convert(model, optimizer, shards, recipe, OneRank(), UpdateRules(), cast=backend.cast_model)
    precision = backend.precision(recipe, device)
    wrapped = None if criterion is None else AMPCriterion(criterion, precision)
    return AMPModel(model, precision), AMPOptimizer(update, precision), wrapped
