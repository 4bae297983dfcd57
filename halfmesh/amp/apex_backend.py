"""`backend="apex"`: an installed apex.amp does the casts of O0 to O3, and halfmesh does the rest of the mode.

All private names of apex that halfmesh uses are in this file.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .precision import Precision
from .recipe import Recipe

DEVICES = frozenset({"cuda"})


class ApexPrecision(Precision):
    """apex.amp, called with the keys of a config's `fp16`.

    O1: in the scopes of `autocast` and `backward`, apex's replacements are patched over torch's functions, for the
    whole process: a model that runs in another thread in the meantime is also cast.
    """

    def __init__(self, recipe: Recipe, device: torch.device, keys: Mapping[str, Any]) -> None:
        super().__init__(recipe, device)
        self.casts = None  # apex uses its own lists
        self._keys = keys
        # By module or class, and name: torch's function and apex's replacement of it.
        self._functions: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def __deepcopy__(self, memo: Any) -> ApexPrecision:
        return self  # a copy of a converted model; modules, which are among the keys, cannot be copied

    def find_problem(self) -> str | None:
        problem = None
        if self.device.type not in DEVICES:
            problem = f"apex.amp takes CUDA tensors only, and the device is {self.device}; train on a GPU"
        try:
            importlib.import_module("apex.amp")
        except Exception as error:  # any error of a broken build
            problem = (
                f"apex.amp cannot be imported ({type(error).__name__}: {error}); build it from "
                "https://github.com/NVIDIA/apex at tag 25.05 or earlier (later ones have no amp, and the package named "
                "apex on PyPI is another project)"
            )
        return problem and f"backend='apex': {problem}; or use backend='native', which needs no apex"

    def cast_model(self, model: nn.Module, excluded: Collection[int] = ()) -> None:
        """Cast `model` by apex; under O1 also let apex make its replacements of torch's functions.

        apex checks its argument: a model in fp32 on a GPU.
        """
        amp: Any = importlib.import_module("apex.amp")
        names = ("opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "cast_model_outputs")
        keys = {name: self._keys[name] for name in names}
        for name in ("cast_model_type", "cast_model_outputs"):
            keys[name] = getattr(torch, keys[name]) if keys[name] else keys[name]
        rnn_functions = vars(nn.modules.rnn)["_VF"]
        hooks = {module: set(module._state_dict_hooks) for module in model.modules()}
        verbosity = self._keys["verbosity"] if self._keys["verbosity"] > 1 else 0  # halfmesh logs the scale itself
        # In a list, whose forward apex replaces: inputs and outputs are cast by Precision, which a deepcopy survives.
        amp.initialize(nn.ModuleList([model]), verbosity=verbosity, **keys)
        for module, known in hooks.items():  # apex's give rounded weights; halfmesh's will give the masters
            for key in set(module._state_dict_hooks) - known:
                del module._state_dict_hooks[key]
        if self.recipe.autocast:
            handle = amp._amp_state.handle
            handle._enable_caching = False  # since torch 1.10 an IndexError where a weight is used twice
            # Last first: of a function that was replaced twice the first original stays.
            for owner, name, original in reversed(handle._all_wrappers):
                self._functions[owner, name] = original, getattr(owner, name)
            self._functions[nn.modules.rnn, "_VF"] = rnn_functions, vars(nn.modules.rnn)["_VF"]
            for (owner, name), (original, _) in self._functions.items():
                setattr(owner, name, original)

    @contextmanager
    def autocast(self, enabled: bool = True) -> Iterator[None]:
        replace = enabled and self.recipe.autocast
        before = [(owner, name, getattr(owner, name)) for owner, name in self._functions]
        for (owner, name), pair in self._functions.items():
            setattr(owner, name, pair[replace])
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    backward = autocast

    def criterion(self, criterion: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`criterion` may be a function of torch itself, such as F.cross_entropy: then its replacement is called."""
        replacements = (new for original, new in self._functions.values() if original is criterion)
        return self.run_in_autocast(next(replacements, criterion), *args, **kwargs)
