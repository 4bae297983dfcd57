"""PEFT: finds the original layers under LoRA's, so that tensor plans match them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...errors import InputError
from ..trial import comes_from

_LORA = {
    "colwise": {"base_layer": "{style}", "lora_B.*": "{style}"},
    "fused_colwise": {"base_layer": "{style}", "lora_B.*": "{style}"},
    "rowwise": {"base_layer": "{style}", "lora_A.*": "{style}", "lora_dropout.*": "sequence"},
}
"""The styles within a layer with LoRA, by that of the layer. LoRA on others stays whole, as their input and output."""


def base_model(model: Any) -> Any:
    """The model that PEFT has given adapters; `model` itself if it has none."""
    has_adapters = comes_from(model, ("peft.peft_model.PeftModel",), "get_base_model")
    return model.get_base_model() if has_adapters else model


def look_through(
    modules: Mapping[str, nn.Module], name: str, style: str, sequence_parallel: bool
) -> Iterator[tuple[str, str]]:
    """Names of modules and their styles: `name` and `style`, or what they become where PEFT has replaced the module.

    Raises:
        InputError: it has an adapter that needs whole weights (DoRA), or sequences.
    """
    layer: Any = modules[name]
    inside = {"": "{style}"}
    if comes_from(layer, ("peft.utils.other.ModulesToSaveWrapper",), "update"):
        inside = {"original_module": "{style}", "modules_to_save.*": "{style}"}
    elif comes_from(layer, ("peft.tuners.lora.layer.LoraLayer",), "scale_layer"):
        if sequence_parallel:
            raise InputError("LoRA's input is whole on each rank; set parallel.tensor.sequence_parallel=False")
        if layer.lora_variant:
            kind = type(next(iter(layer.lora_variant.values()))).__name__
            raise InputError(f"PEFT's {kind} needs whole weights; use plain LoRA, or data='fsdp' in place of tensor")
        inside = _LORA.get(style.partition("(")[0], {"base_layer": "{style}"})
    for own, _ in layer.named_modules():
        for pattern, text in inside.items():
            if fnmatchcase(own, pattern) and own.count(".") == pattern.count("."):
                yield ".".join(part for part in (name, own) if part), text.format(style=style)
