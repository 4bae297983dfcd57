"""The user's model and a batch of its inputs, as a function builds them."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError, did_you_mean
from ..utils.tensors import count_rows, map_tensors

_LIBRARIES = str(Path(torch.__file__).parents[1]), f"{Path(__file__).parents[1]}{os.sep}", sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Built:
    """The result of a builder.

    Attributes:
        batches: inputs and targets of each; empty if unknown. Inputs are a tensor, a tuple of positional arguments, or
            a dict of named ones; without a criterion targets are None.
        criterion: None if the model computes its loss.
    """

    model: nn.Module
    batches: Sequence[tuple[Any, Any]]
    criterion: Callable[..., Any] | None

    @property
    def rows(self) -> int:
        """The size of the first batch; 0 if there is none."""
        return count_rows(self.batches[0][0], none=0) if self.batches else 0

    def with_rows(self, rows: int) -> Built:
        """The same model with the first batch only, of `rows` rows."""
        now = self.rows

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != now or rows == now:
                return tensor
            return tensor.new_zeros((rows, *tensor.shape[1:]))

        return replace(self, batches=[map_tensors(resize, self.batches[0])])


def call_of(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Positional and named arguments of the model, whose `inputs` are a tensor, a tuple, or a dict of named ones."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def build_model(reference: str, batch: Sequence[str] = ()) -> Built:
    """Call the function that `reference` ("package.module:build", "timm:NAME") names, inside a dry run.

    `build()` returns the model; or (model, inputs); or (model, (inputs, targets), criterion), as in
    `criterion(model(inputs), targets)`. The shapes in `batch` replace its inputs; then its criterion is not used, whose
    targets belong to the other inputs.

    Raises:
        InputError: the function does not exist, fails, or returns something else.
    """
    how = "in a simulation, where tensors have no values: build the model without loading weights"
    built = call_builder(find_function(reference), f"--model {reference}", how)
    return replace(built, batches=[(tuple(map(read_tensor, batch)), None)], criterion=None) if batch else built


def call_builder(build: Callable[[], Any], name: str, how: str) -> Built:
    """The result of `build()`, if it can be trained.

    Args:
        name: of `build` in messages, such as "--model package.module:build".
        how: the form of the call, in messages.

    Raises:
        InputError: it fails, or returns something else.
    """
    try:
        made = build()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{name}: it raised {type(error).__name__}: {error} ({_where(error)}). It is called without "
            f"arguments, {how}"
        ) from error
    model, given, criterion, *more = (*(made if isinstance(made, tuple) else (made,)), None, None)
    batches = [] if given is None else given if isinstance(given, list) else [given]
    if criterion is None:
        batches = [(batch, None) for batch in batches]
    is_complete = callable(criterion) and bool(batches) and all(isinstance(b, tuple) and len(b) == 2 for b in batches)
    if not isinstance(model, nn.Module) or any(m is not None for m in more) or not (criterion is None or is_complete):
        kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
        raise InputError(
            f"{name}: it returned {f'({kinds})' if isinstance(made, tuple) else kinds}; return the model (a "
            "torch.nn.Module), or (model, inputs), or (model, (inputs, targets), criterion). The second element may be "
            "a list of batches"
        )
    return Built(model, batches, criterion)


def _where(error: Exception) -> str:
    """The line of the user's own code that `error` comes from; of a library's, if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *_LIBRARIES))]
    return "{0.filename}:{0.lineno}".format((own or frames)[-1])


def read_tensor(text: str) -> torch.Tensor:
    """Zeros of the shape and dtype that `text` ("8,2048:int64") gives.

    Raises:
        InputError: it gives none.
    """
    shape, _, dtype = text.partition(":")
    try:
        return torch.zeros([int(size) for size in shape.split(",")], dtype=getattr(torch, dtype or "float32"))
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise InputError(
            f"--batch {text} is not a shape and dtype ({error}); write --batch 8,2048:int64 (first the rows of one "
            "data rank; the dtype is float32 by default)"
        ) from error


ROWS, TOKENS = 8, 1024
"""Of the batch that is made for a library's model: rows, and tokens in each."""


def build_timm(name: str) -> Any:
    """timm's model of that name, with a batch of images and labels."""
    import timm

    model: Any = timm.create_model(name)
    images = torch.randn(ROWS, *model.pretrained_cfg["input_size"])
    return model, (images, torch.randint(model.num_classes, (ROWS,))), nn.CrossEntropyLoss()


def build_hf(path: str) -> Any:
    """The model that a config.json of Hugging Face describes (or its folder), with a batch of its inputs; its loss, if
    it takes labels."""
    import transformers

    if path.endswith(".json") and not os.path.isfile(path):  # else it would be looked for on the hub
        raise InputError(f"--model hf:{path}: there is no such file")
    config: Any = transformers.AutoConfig.from_pretrained(path)
    config.use_cache = config.get_text_config().use_cache = False  # for generation; recomputation would fill it again
    kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
    model: Any = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    text = config.get_text_config()
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.randn(ROWS, config.num_channels, config.image_size, config.image_size)}
        labels = torch.randint(config.num_labels, (ROWS,))
    else:
        length = min(getattr(text, "max_position_embeddings", TOKENS), TOKENS)
        inputs = {model.main_input_name: torch.randint(text.vocab_size, (ROWS, length))}
        per_row = "SequenceClassification" in kind.__name__
        labels = torch.randint(config.num_labels, (ROWS,)) if per_row else inputs[model.main_input_name].clone()
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    return model, inputs | ({"labels": labels} if takes_labels else {})


LIBRARIES = {"timm": build_timm, "hf": build_hf}
"""Prefixes of references, as in "timm:vit_base_patch16_224" and "hf:llama/config.json"."""


def find_function(reference: str, option: str = "--model") -> Callable[..., Any]:
    """The function that `reference` names, which `option` of a command was given: "package.module:name", or a model of
    `LIBRARIES`.

    Raises:
        InputError: there is none.
    """
    module_name, _, name = reference.partition(":")
    if option == "--model" and name and module_name in LIBRARIES:
        return partial(LIBRARIES[module_name], name)
    if not module_name or not name:
        also = ", or a model as timm:NAME or hf:config.json" if option == "--model" else ""
        raise InputError(f"{option} {reference}: name a function as package.module:function{also}")
    here = os.getcwd()
    if here not in sys.path:  # as with python -m
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(
            f"{option} {reference}: importing {module_name} raised {type(error).__name__}: {error} (looked for in "
            f"{here} and in the installed packages)"
        ) from error
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, nn.Module):
        functions = [key for key, value in vars(module).items() if callable(value)]
        what = "is not a function" if hasattr(module, name) else f"does not exist{did_you_mean(name, functions)}"
        raise InputError(f"{option} {reference}: {module_name}.{name} {what}; name a function of a module's top level")
    return found
