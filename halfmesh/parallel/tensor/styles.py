"""The tensor styles: each shards one module by its features, heads, vocabulary or the sequence."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from ...errors import InputError
from .. import collectives
from ..registries import TENSOR_STYLES
from ..shard_spec import Split
from ..trial import comes_from
from . import layers
from .colwise import SEQUENCE_DIM
from .layers import TensorAxis


class Style:
    """The base class of tensor styles: a style shards one module. The defaults do nothing.

    Attributes:
        is_region: True if the module gathers the sequence at its input (sequence parallelism). Layers in it then do not
            copy their input, and they reduce-scatter their output.
        opens_fork: True if modules that follow it within the parent module work on sharded features.
        attributes: the names of integers of the module that are divided by the number of ranks.
    """

    is_region: ClassVar[bool] = False
    opens_fork: ClassVar[bool] = False
    attributes: tuple[str, ...] = ()

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        """Yield the reasons why `module` cannot be sharded over `size` ranks in this way."""
        yield from ()

    def splits(self, module: nn.Module) -> dict[str, Split]:
        """Return how each direct parameter of the module that is sharded is split, by name."""
        return {}

    def partial(self, module: Any, in_region: bool) -> Iterable[nn.Parameter]:
        """Return the replicated parameters that work on this rank's shard of the activations. Their gradients are
        summed over the ranks."""
        return ()

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        """Make `module` work with its parameters, which are shards now. This may change its class and add hooks. A
        `ShardedLayer` gets its attributes afterwards."""


def parse_style(text: str) -> Style:
    """Return the style that `text` names: "colwise", "fused_colwise(3)", "heads(num_heads, attn_dim)".

    Raises:
        RegistryError: no style has this name.
        InputError: the style does not take these arguments.
    """
    name, _, given = text.strip().removesuffix(")").partition("(")
    arguments = [part.strip() for part in given.split(",") if part.strip()]
    kind: type[Style] = TENSOR_STYLES.get(name)
    try:
        return kind(*arguments)
    except (TypeError, ValueError) as error:
        raise InputError(f"the style {text!r} does not take these arguments: {error}") from error


# -- features ----------------------------------------------------------------------------------------------------------


class Colwise(Style):
    """Shards the output features of a Linear (or transformers' Conv1D). Its output stays sharded for a `rowwise` layer.

    Attributes:
        blocks: the number of projections that one weight stacks. Each is split separately.
        gathers: True if the output is gathered.
        keeps_logits: True if it is not gathered in training.
    """

    blocks = 1
    gathers: ClassVar[bool] = False
    keeps_logits: ClassVar[bool] = False
    opens_fork = True

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        return _find_weight_problems(module, nn.Linear, "output features", _out_dim(module), size, self.blocks)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        bias = {} if module.bias is None else {"bias": Split(0, self.blocks)}
        return {"weight": Split(_out_dim(module), self.blocks), **bias}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        _convert_linear(module, layers.ColwiseLinear, gathers=self.gathers, keeps_logits=self.keeps_logits)


class FusedColwise(Colwise):
    """`colwise` for several projections that one weight stacks (qkv: 3, gate and up: 2).

    Args:
        blocks: the number of projections.
    """

    def __init__(self, blocks: int | str) -> None:
        self.blocks = int(blocks)


class ColwiseGather(Colwise):
    """`colwise`, and gathers the output. Use it for a head."""

    gathers = True
    opens_fork = False


class VocabParallel(ColwiseGather):
    """`colwise_gather` for the head of a language model. In training its logits stay sharded over the vocabulary, for
    torch's cross entropy."""

    keeps_logits = True


class Rowwise(Style):
    """Shards the input features of a Linear (or Conv1D) after a `colwise` one, and all-reduces the output.

    Attributes:
        splits_input: True if the input is replicated, so that each rank takes its shard of it.
    """

    splits_input: ClassVar[bool] = False

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        return _find_weight_problems(module, nn.Linear, "input features", 1 - _out_dim(module), size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return {"weight": Split(1 - _out_dim(module))}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        _convert_linear(module, layers.RowwiseLinear, splits=self.splits_input)

    def partial(self, module: Any, in_region: bool) -> Iterable[nn.Parameter]:
        return () if module.bias is None or not in_region else (module.bias,)  # added to this rank's tokens


class RowwiseSplit(Rowwise):
    """`rowwise` for a replicated input."""

    splits_input = True


class Vocab(Style):
    """Shards the vocabulary of an Embedding, or of a Linear head (and gathers the head's output). A weight that both
    share stays shared. The embedding may change the output of `nn.Embedding`, as Gemma's does, which scales it."""

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        kind = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
        kind = type(module) if _extends_embedding(module) else kind
        return _find_weight_problems(module, kind, "vocabulary entries", 0, size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return ColwiseGather().splits(module) if isinstance(module, nn.Linear) else {"weight": Split(0)}

    def install(self, module: Any, axis: TensorAxis, in_region: bool) -> None:
        if isinstance(module, nn.Linear):
            ColwiseGather().install(module, axis, in_region)
        elif _extends_embedding(module):  # its forward calls super().forward: that of the sharded embedding then
            module.__class__ = type(type(module).__name__, (type(module), layers.VocabEmbedding), {})
        else:
            module.__class__ = layers.VocabEmbedding


class EmbeddingFeatures(Style):
    """Shards the features of an Embedding that has one per head (relative positions). The output stays sharded."""

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        return _find_weight_problems(module, nn.Embedding, "features", 1, size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return {"weight": Split(1)}


class EmbeddingGather(EmbeddingFeatures):
    """`embedding_features`, and gathers the output."""

    def install(self, module: Any, axis: TensorAxis, in_region: bool) -> None:
        module.register_forward_hook(lambda _, args, output: collectives.gather(output, -1, axis.group))


class Heads(Style):
    """Divides attributes that count heads (or the features of all heads) by the number of ranks.

    Args:
        attributes: the names of these attributes, which are integers.
    """

    def __init__(self, *attributes: str) -> None:
        self.attributes = attributes

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        for attribute in self.attributes:
            count = getattr(module, attribute, None)
            if not isinstance(count, int):
                yield f"it has no whole number named {attribute!r} (found: {count!r})"
            else:
                yield from _find_indivisible(attribute, count, size)


class ConfigHeads(Style):
    """Checks that the number of ranks divides a number of heads in the model's `config`. The modules take the number of
    heads from the shape.

    Args:
        name: the name of the number in the `config`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        yield from _find_indivisible(f"config.{self._name}", getattr(module.config, self._name), size)


class Rows(Style):
    """Shards direct parameters of the module that have one entry, or one row, per head (attention sinks).

    Args:
        names: the names of these parameters.
    """

    def __init__(self, *names: str) -> None:
        self._names = names

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return dict.fromkeys(self._names, Split(0))


class LatentKeys(Style):
    """An unsharded layer of latent attention (DeepSeek) whose last output features are the rotary part of the keys.
    Each rank uses them for its heads, so this style sums their partial gradients. The `colwise` layer that follows sums
    the gradients of the other features.

    Args:
        rotary: the number of rotary features.
    """

    def __init__(self, rotary: int | str) -> None:
        self._rotary = int(rotary)

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        def share(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            latent, keys = output.split([output.shape[-1] - self._rotary, self._rotary], -1)
            return torch.cat([latent, axis.copy_to_tp(keys)], -1)

        module.register_forward_hook(share)
        module.has_partial_gradients = True  # type: ignore[assignment]  # of what it returns, for `halfmesh verify`


class Off(Style):
    """Sets attributes of the module to False, to switch off fast paths that would bypass its sharded layers.

    Args:
        attributes: the names of these attributes.
    """

    def __init__(self, *attributes: str) -> None:
        self._attributes = attributes

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        for name in self._attributes:
            setattr(module, name, False)


# -- sequences ---------------------------------------------------------------------------------------------------------


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Sequence(Style):
    """Keeps parameters replicated that work on this rank's shard of the activations: norms and dropout between sharded
    layers (sequence parallelism), or a norm over each head's features. Dropout draws different numbers on each rank."""

    def partial(self, module: Any, in_region: bool) -> Iterable[nn.Parameter]:
        return module.parameters()

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        for layer in module.modules():
            if isinstance(layer, _DROPOUT):
                layer.register_forward_pre_hook(lambda layer, _: axis.fork.open() if layer.training else None)
                layer.register_forward_hook(lambda *_: axis.fork.close(), always_call=True)


class SequenceBegin(Style):
    """Shards activations [batch, sequence, ...] along the sequence, starting with the input of this module."""

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        def split(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            length = args[0].shape[SEQUENCE_DIM]
            if length % axis.size:
                fix = "pad it, or set sequence_parallel=False"
                raise InputError(f"tensor={axis.size} does not divide the sequence length {length}; {fix}")
            return collectives.split(args[0], SEQUENCE_DIM, axis.group), *args[1:]

        module.register_forward_pre_hook(split)


class SequenceEnd(Sequence):
    """`sequence`, and gathers this module's output."""

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        super().install(module, axis, in_region)
        module.register_forward_hook(lambda _, args, output: collectives.gather(output, SEQUENCE_DIM, axis.group))


class Region(Style):
    """Gathers the sequence at the input of a module between sharded sequences, so that its layers can shard features.

    Args:
        argument: the name of the argument with the activations, if they are passed by name. By default they are the
            first positional argument.
    """

    is_region = True

    def __init__(self, argument: str = "") -> None:
        self._argument = argument

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (axis.gather_sequence(args[0]), *args[1:]), kwargs
            return args, {**kwargs, self._argument: axis.gather_sequence(kwargs[self._argument])}

        module.register_forward_pre_hook(gather, with_kwargs=True)


class Attention(Style):
    """Shards the heads of a `torch.nn.MultiheadAttention`. Its `out_proj` must be `rowwise`."""

    opens_fork = True
    attributes = ("num_heads",)

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        if wrong := _other_forward(module, nn.MultiheadAttention):
            yield from wrong
        elif module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            yield "this style does not support kdim, vdim, add_bias_kv and add_zero_attn; leave it whole"
        else:
            yield from _find_indivisible("heads", module.num_heads, size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        names = ("in_proj_weight", "in_proj_bias")
        return {name: Split(0, 3) for name in names if getattr(module, name) is not None}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> None:
        module.__class__ = layers.ShardedAttention


# -- helpers -----------------------------------------------------------------------------------------------------------


def _find_indivisible(what: str, count: int, size: int, blocks: int = 1) -> Iterator[str]:
    """A message if `count` of `what`, in `blocks` blocks, cannot be split into `size` equal shards."""
    if count % (blocks * size):
        each = f" in {blocks} blocks" if blocks > 1 else ""
        allowed = [n for n in range(1, count + 1) if count % (blocks * n) == 0]
        can_be = f"; tensor can be {', '.join(map(str, allowed[:8]))}" if allowed else ""
        yield f"{count} {what}{each} are not divisible by tensor={size}{can_be}"


def _convert_linear(module: Any, layer: type[layers.ColwiseLinear | layers.RowwiseLinear], **attributes: Any) -> None:
    transposed = _is_conv1d(module)
    module.__class__ = layer
    vars(module).update(attributes, transposed=transposed)
    module.out_features, module.in_features = (module.weight.t() if transposed else module.weight).shape


def _extends_embedding(module: nn.Module) -> bool:
    """Return True if its class uses nn.Embedding's forward, and reads at most the dtype of the weight."""
    kind = type(module)
    if not issubclass(kind, nn.Embedding) or kind.forward is nn.Embedding.forward:
        return False
    code = inspect.getsource(kind.forward)
    return "super().forward(" in code and re.search(r"\bweight\b(?!\.(dtype|device)\b)", code) is None


def _is_conv1d(module: nn.Module) -> bool:
    """Return True if it is transformers' Conv1D: a linear layer whose weight is [in, out]."""
    return comes_from(module, ("transformers.pytorch_utils.Conv1D",))


def _out_dim(module: nn.Module) -> int:
    """The dimension of the weight that counts the output features."""
    return 1 if _is_conv1d(module) else 0


def _other_forward(module: Any, kind: type[nn.Module]) -> list[str]:
    """A message if the forward of `module` is not that of `kind`."""
    if type(module).forward is kind.forward and "forward" not in vars(module):
        return []
    name = f"torch.nn.{kind.__name__}"
    return [f"it is a {type(module).__name__}, but this style is for {name}; choose another, or leave it whole"]


def _find_weight_problems(
    module: Any, kind: type[nn.Module], what: str, dim: int, size: int, blocks: int = 1
) -> Iterator[str]:
    """The reasons why `dim` of the weight of `module`, a `kind`, cannot be sharded."""
    if wrong := _other_forward(module, type(module) if kind is nn.Linear and _is_conv1d(module) else kind):
        yield from wrong
        return
    for setting in ("max_norm", "scale_grad_by_freq", "sparse"):  # of an embedding
        if getattr(module, setting, None):
            yield f"{setting} is set, which does not work on a shard of the weight; remove it"
    yield from _find_indivisible(what, module.weight.shape[dim], size, blocks)
