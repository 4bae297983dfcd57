"""Styles that divide a layer's features, vocabulary or heads over a tensor group."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from ..modules import comes_from
from ..shard_spec import Split
from . import collectives
from .layers import ColwiseConv1D, ColwiseLinear, RowwiseConv1D, RowwiseLinear, TensorAxis, VocabEmbedding
from .style import Style, change, divide_attributes, find_undivided


class Colwise(Style):
    """A Linear (or transformers' Conv1D) by its output features, which stay divided for a `rowwise` layer to take.

    Attributes:
        blocks: how many projections are fused into one weight, one below the other; each is divided by itself.
        gathers: whether the output is made whole.
    """

    blocks = 1
    gathers: ClassVar[bool] = False
    opens_fork = True

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        if (problem := _not_linear(module)) is not None:
            yield problem
        else:
            yield from find_undivided("output features", module.weight.shape[_outputs(module)], size, self.blocks)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        bias = {} if module.bias is None else {"bias": Split(0, self.blocks)}
        return {"weight": Split(_outputs(module), self.blocks), **bias}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        new, count = (ColwiseConv1D, "nf") if is_conv1d(module) else (ColwiseLinear, "out_features")
        change(module, new, axis=axis, in_region=in_region, gathers=self.gathers)
        divide_attributes(module, (count,), axis.size)
        return ()


class FusedColwise(Colwise):
    """`colwise` of several projections in one weight (qkv: 3, gate and up: 2).

    Args:
        blocks: how many.
    """

    def __init__(self, blocks: int | str) -> None:
        self.blocks = int(blocks)
        if self.blocks < 1:
            raise ValueError(f"{blocks} projections cannot be fused; give 1 or more")


class ColwiseGather(Colwise):
    """`colwise` whose output is made whole: for a head."""

    gathers = True
    opens_fork = False


class Rowwise(Style):
    """A Linear (or transformers' Conv1D) by its input features, after a `colwise` one. Its output is summed, and whole.

    Attributes:
        splits_input: whether the input is whole, too.
    """

    splits_input: ClassVar[bool] = False

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        if (problem := _not_linear(module)) is not None:
            yield problem
        else:
            yield from find_undivided("input features", module.weight.shape[1 - _outputs(module)], size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return {"weight": Split(1 - _outputs(module))}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        new, count = (RowwiseConv1D, "nx") if is_conv1d(module) else (RowwiseLinear, "in_features")
        change(module, new, axis=axis, in_region=in_region, splits=self.splits_input)
        divide_attributes(module, (count,), axis.size)
        return ()

    def partial(self, module: Any, in_region: bool) -> Iterable[nn.Parameter]:
        return () if module.bias is None or not in_region else (module.bias,)  # added to a divided sequence


class RowwiseSplit(Rowwise):
    """`rowwise` whose input is whole."""

    splits_input = True


class Vocab(Style):
    """An Embedding by its vocabulary, or the Linear head that turns features back into it (its output is made whole).

    A weight that both share stays shared. An embedding may work on what nn.Embedding returns (Gemma's scales it).
    """

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        kind = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
        kind = type(module) if _only_extends_embedding(type(module)) else kind
        if (problem := _not_plain(module, kind)) is not None:
            yield problem
            return
        for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, setting, None):
                yield f"{setting} is set, which is not defined for part of the vocabulary; leave it out"
        yield from find_undivided("vocabulary entries", module.weight.shape[0], size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return ColwiseGather().splits(module) if isinstance(module, nn.Linear) else {"weight": Split(0)}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        if isinstance(module, nn.Linear):
            return ColwiseGather().install(module, axis, in_region)
        extends = _only_extends_embedding(type(module))
        new = _divided_kind(type(module)) if extends else VocabEmbedding
        change(module, new, axis=axis, in_region=in_region)
        divide_attributes(module, ("num_embeddings",), axis.size)
        return ()


class EmbeddingFeatures(Style):
    """An Embedding by its features, which stay divided: a number for each head (relative positions)."""

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        if (problem := _not_plain(module, nn.Embedding)) is not None:
            yield problem
            return
        if module.max_norm is not None:
            yield "max_norm is set, which is not defined for part of the features; leave it out"
        yield from find_undivided("features", module.weight.shape[1], size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return {"weight": Split(1)}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        divide_attributes(module, ("embedding_dim",), axis.size)
        return ()


class EmbeddingGather(EmbeddingFeatures):
    """`embedding_features` whose output is made whole."""

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        super().install(module, axis, in_region)
        return [module.register_forward_hook(lambda _, args, output: collectives.gather(output, -1, axis.group))]


class Heads(Style):
    """The module's numbers that count heads (or features of all heads) become this rank's.

    `heads()` says that there is nothing to count: the module takes the number from its activations' shape.

    Args:
        attributes: names of whole numbers of the module.
    """

    def __init__(self, *attributes: str) -> None:
        self.attributes = attributes

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        for attribute in self.attributes:
            count = getattr(module, attribute, None)
            if not isinstance(count, int):
                yield f"it has no whole number named {attribute!r} (found: {count!r})"
            else:
                yield from find_undivided(attribute, count, size)

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        divide_attributes(module, self.attributes, axis.size)
        return ()


class ConfigHeads(Style):
    """A number of heads in the model's `config` is divisible. Its modules take it from their activations' shape.

    Args:
        name: of the number.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        yield from find_undivided(f"config.{self._name}", getattr(module.config, self._name), size)


class Rows(Style):
    """Parameters of the module's own that have an entry, or a row, for each head: attention sinks.

    Args:
        names: of these parameters.
    """

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        for name in self._names:
            yield from find_undivided(f"rows of {name}", getattr(module, name).shape[0], size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return dict.fromkeys(self._names, Split(0))


class LatentKeys(Style):
    """The whole layer of latent attention (DeepSeek) whose last output features are the keys' rotary part. All heads
    use these as they are, so each rank gives its heads' part of their gradient; the other features go through a
    `colwise` layer, which sums that by itself.

    Args:
        rotary: how many these features are.
    """

    def __init__(self, rotary: int | str) -> None:
        self._rotary = int(rotary)

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        def share(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            latent, keys = output.split([output.shape[-1] - self._rotary, self._rotary], -1)
            return torch.cat([latent, axis.copy_to_tp(keys)], -1)

        return [module.register_forward_hook(share)]


class Off(Style):
    """Attributes of the module that are switched off: short cuts that go round its divided layers.

    Args:
        attributes: their names.
    """

    def __init__(self, *attributes: str) -> None:
        self._attributes = attributes

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        for name in self._attributes:
            if hasattr(module, name):
                setattr(module, name, False)
        return ()


def _only_extends_embedding(kind: type[nn.Module]) -> bool:
    """Whether `kind` works on what nn.Embedding's forward returns, and reads of the weight its dtype at most."""
    if not issubclass(kind, nn.Embedding) or kind.forward is nn.Embedding.forward:
        return False
    code = inspect.getsource(kind.forward)
    return "super().forward(" in code and re.search(r"\bweight\b(?!\.(dtype|device)\b)", code) is None


def _divided_kind(kind: type[nn.Module]) -> type[VocabEmbedding]:
    """`kind`, whose super().forward is that of an embedding that is divided."""
    divided: type[VocabEmbedding] = type(kind.__name__, (kind, VocabEmbedding), {})
    return divided


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, whole or divided: a linear layer whose weight is [in, out]."""
    divided = isinstance(module, (ColwiseConv1D, RowwiseConv1D))
    return divided or comes_from(module, ("transformers.pytorch_utils.Conv1D",))


def _outputs(module: nn.Module) -> int:
    """The dimension of the weight that counts the output features."""
    return 1 if is_conv1d(module) else 0


def _not_linear(module: nn.Module) -> str | None:
    return _not_plain(module, type(module) if is_conv1d(module) else nn.Linear)


def _not_plain(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Why `module` does not compute what `kind` computes from parameters of its own."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward or "forward" in vars(module):
        return (
            f"it is a {type(module).__name__}, and this style is for torch.nn.{kind.__name__}; choose another style, "
            "or leave it whole"
        )
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if "weight" not in own or (getattr(module, "bias", None) is not None and "bias" not in own):
        return "its weight or bias is computed from others (parametrized, pruned), and cannot be cut; undo that first"
    return None
