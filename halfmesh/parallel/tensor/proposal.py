"""A tensor plan for a model that no registered plan knows, from the sizes of its layers."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from .feature_styles import Colwise, Rowwise
from .plans import caller, generalise

_PROJECTION = re.compile(r"(to_?|w_?|c_|fc_?|lin_?)?(q|k|v|kv|qkv|query|key|value)s?(_?(proj|lin|linear|layer))?", re.I)
_FUSED = (1, 2, 3)
"""So many projections may be in one weight: gate and up, or q, k and v."""


@dataclass(frozen=True)
class _Layer:
    """A linear layer: how many features it takes and gives."""

    name: str
    takes: int
    gives: int

    @property
    def projects(self) -> bool:
        """Whether it is named like a projection of attention."""
        return _PROJECTION.fullmatch(self.name.rpartition(".")[2]) is not None


def propose(model: nn.Module, size: int) -> dict[str, str]:
    """Patterns of module names with styles: of linear layers that belong together the last is `rowwise`, those before
    it are `colwise`. Empty if there are none. A guess: what stands between them is not known.

    Args:
        size: ranks, which have to divide the features.
    """
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    tops: dict[str, str] = {}
    for top, layers in _linear_layers(model, modules).items():
        row = type(modules[top]).forward is nn.Sequential.forward
        for before, last in _groups(layers, row):
            times = {layer.name: max(1, layer.gives // last.takes) for layer in before}
            counts = _head_counts(modules[top], last.takes)
            sizes = [last.takes, *(layer.gives // times[layer.name] for layer in before), *counts.values()]
            if any(count % size for count in sizes):
                continue
            new = {top: f"heads({', '.join(counts)})"} if counts else {}
            new |= {name: f"fused_colwise({k})" if k > 1 else "colwise" for name, k in times.items()}
            new[last.name] = "rowwise"
            styles |= new
            tops |= dict.fromkeys(new, top)
    return {_pattern(name, tops[name], styles, modules): style for name, style in styles.items()}


def _pattern(name: str, top: str, styles: Mapping[str, str], modules: Iterable[str]) -> str:
    """The most general one that matches `name`, in the module `top`, and nothing of another style."""
    for pattern in (generalise(name), generalise(top) + name[len(top) :]):
        if all(styles.get(other) == styles[name] for other in modules if fnmatchcase(other, pattern)):
            return pattern
    return name


def write(plan: Mapping[str, str], size: int) -> str:
    """`plan` as it can be pasted into a config, and what the model's forward has to do for it."""
    lines = ",\n".join(f"        {pattern!r}: {style!r}" for pattern, style in plan.items())
    text = (
        "This one fits the sizes of its layers, and is tried out numerically before the first update:\n"
        f"    parallel = dict(tensor=dict(size={size}, plan={{\n{lines},\n    }}))\n"
        f"    Between a 'colwise' and a 'rowwise' layer, forward sees 1 / {size} of the features. Sizes have to be -1 "
        "there (view(B, T, -1, head_dim), chunk(3, -1))"
    )
    heads = next((style for style in plan.values() if style.startswith("heads(")), None)
    if heads is None:
        return text
    width = next((name for name in heads[6:-1].split(", ") if not counts_heads(name)), None)
    whole = f": after `B, T, C = x.size()` write `C = self.{width}`" if width else ""
    return (
        f"{text}, or come from what {heads!r} makes this rank's. The width of the input stays whole{whole}. To leave "
        "attention as it is, leave its patterns out"
    )


def _linear_layers(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, list[_Layer]]:
    """Those with weights of their own, in order, by the module that calls them."""
    owners = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    found: dict[str, list[_Layer]] = defaultdict(list)
    for name, module in modules.items():
        fits = name and not [*Colwise().find_problems(module, 1), *Rowwise().find_problems(module, 1)]
        if fits and owners[id(module.weight)] == 1:
            weight = module.get_parameter("weight").shape
            gives = Colwise().splits(module)["weight"].dim
            found[caller(modules, name)].append(_Layer(name, weight[1 - gives], weight[gives]))
    return found


def _groups(layers: list[_Layer], row: bool) -> Iterator[tuple[list[_Layer], _Layer]]:
    """Layers that take the same, and one that takes what they give; from the last backwards.

    Args:
        row: each takes what the one before it gives (nn.Sequential).
    """
    left = list(layers)
    while left:
        last, before = left.pop(), list[_Layer]()
        while left and _belongs(left[-1], before, last, row):
            before.insert(0, left.pop())
        if before:
            yield before, last


def _belongs(layer: _Layer, before: list[_Layer], last: _Layer, row: bool) -> bool:
    if before and (row or layer.takes != before[0].takes):
        return False
    if layer.projects and (not before or before[0].projects):  # fewer heads of keys than of queries are possible
        return last.takes % layer.gives == 0 or layer.gives in (k * last.takes for k in _FUSED)
    if before and (before[0].projects or layer.takes == layer.gives):  # one after the other, as likely
        return False
    return layer.gives in (k * last.takes for k in _FUSED)


def _head_counts(module: nn.Module, width: int) -> dict[str, int]:
    """If `module` counts heads: its numbers that do, and those that are the width of all of them."""
    numbers = {name: value for name, value in vars(module).items() if type(value) is int}
    heads = {name: value for name, value in numbers.items() if counts_heads(name)}
    return heads | {name: value for name, value in numbers.items() if value == width} if heads else {}


def counts_heads(name: str) -> bool:
    """Whether an attention module's attribute of that name may count heads: num_heads, n_kv_heads, nhead, heads."""
    return "head" in name and not any(part in name for part in ("dim", "size", "width", "features"))
