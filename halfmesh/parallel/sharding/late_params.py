"""Parameters whose new values are still on their way from other ranks: the first use of one waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import Any

import torch
from torch import nn

from ...utils.tensors import tensors_of
from ...utils.torch_private import is_compiled, without_observers, without_subclasses


class LateParameter(nn.Parameter):
    """The class of a parameter while its value is on its way. torch calls `__torch_function__` for every function that
    gets such a parameter. That call waits, and the parameter becomes an ordinary one again."""

    _halfmesh_arrival: Arrival

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_NO_VALUE:
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        for tensor in tensors_of((args, kwargs)):
            if type(tensor) is cls and (arrival := getattr(tensor, "_halfmesh_arrival", None)) is not None:
                arrival.wait()
        return func(*args, **(kwargs or {}))

    # torch tells of a copy, or of pickling, only after it has read the class.

    def __deepcopy__(self, memo: Any) -> Any:
        self._halfmesh_arrival.wait()
        return self.__deepcopy__(memo)  # an ordinary parameter's

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._halfmesh_arrival.wait()
        return self.__reduce_ex__(protocol)


_GETTERS = ("grad", "grad_dtype", "requires_grad", "shape", "dtype", "device", "is_leaf", "is_cuda")
_SETTERS = ("grad", "grad_dtype")
_READ_NO_VALUE = {getattr(torch.Tensor, name).__get__ for name in _GETTERS}
_READ_NO_VALUE |= {getattr(torch.Tensor, name).__set__ for name in _SETTERS}


class Arrival:
    """Values of `params` that are on their way."""

    def __init__(
        self, params: Sequence[nn.Parameter], owners: Iterable[nn.Module], receive: Callable[[], None]
    ) -> None:
        self.params = params
        self._receive = receive
        self._lock = RLock()  # a thread goes on when another one has received them
        self._hooks = [module.register_forward_pre_hook(self.wait) for module in owners]
        for param in params:
            param.__class__ = LateParameter
            param._halfmesh_arrival = self  # type: ignore[attr-defined]

    @torch.compiler.disable
    def wait(self, *_: Any) -> None:
        """Wait for the values. (On a GPU the host goes on; what it starts from now on waits.) If that is interrupted,
        they are still on their way. Also a hook, which is given a module and its inputs."""
        with self._lock:
            if not self.params:
                return
            with without_observers(), torch.no_grad():  # of what uses the weights
                self._receive()
            for hook in self._hooks:
                hook.remove()
            for param in self.params:
                param.__class__ = nn.Parameter
                del param._halfmesh_arrival  # type: ignore[attr-defined]
            self.params, self._receive = (), lambda: None  # which frees what was received


class Arrivals:
    """Values of the parameters of `model` that are on their way, in groups. The first of these waits for one:

    - a torch function that is given one of its parameters;
    - a module that owns one, before its forward: the module may call a C++ extension, of which torch does not tell;
    - `wait`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[nn.Parameter, list[nn.Module]] = {}
        closed = set[nn.Parameter]()
        for module in model.modules():
            for param in dict.fromkeys(module.parameters(recurse=False)):
                self._owners.setdefault(param, []).append(module)
            if isinstance(module, torch.jit.ScriptModule) or is_compiled(module):  # neither calls the hooks within
                closed.update(module.parameters())
        self._open = {param for param in self._owners if type(param) is nn.Parameter} - closed
        self._expected: list[Arrival] = []

    def can_wait(self, params: Iterable[nn.Parameter]) -> bool:
        """Return True if all that may use `params` can wait for them."""
        return self._open.issuperset(params)

    def expect(self, params: Sequence[nn.Parameter], receive: Callable[[], None]) -> None:
        """New values of `params` are on their way. `receive` waits for them and copies them there, uncounted: the write
        counts now, so that a backward whose forward had the old values is rejected."""
        torch.autograd.graph.increment_version(params)
        owners = dict.fromkeys(owner for param in params for owner in self._owners[param])
        self._expected.append(Arrival(params, owners, receive))

    def wait(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Wait for all, or for those with one of `params`."""
        if not self._expected:
            return
        wanted = None if params is None else set(params)
        for arrival in self._expected:
            if wanted is None or not wanted.isdisjoint(arrival.params):
                arrival.wait()
        self._expected = [arrival for arrival in self._expected if arrival.params]
