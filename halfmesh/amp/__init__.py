"""Precision: which number format each tensor has, and how scaled gradients become new weights.

Read in this order:
    recipe          a precision mode as plain values
    plugin          what a mode is; naive_amp, torch_amp, apex_amp: the three; apex_backend: casts of an installed apex
    precision       runs model and criterion in a recipe's formats; o1: apex's lists for that
    float8          products of linear layers in float8; float8_weight: a weight that comes in float8
    convert         applies a recipe to a model and its optimizer, and takes it back; in between, state dicts have
                    full precision
    optimizer       the path of an update, from a loss to new weights. Below it:
    master_weights  what the user's optimizer holds; originals: full precision of what it does not hold
    optimizer_state  what its state dict holds of each parameter, and of optimizers inside it
    loss_scales     what backward begins with; loss_scaler: how a scale moves; multi_loss: several losses
    grad_norm       norm and overflow, on all ranks the same
    stepper         calls `optimizer.step()`; fused: with which implementation
    step_result     what the host gets to know; skip_counter: when a run ends
    gradient_watch  warnings

It imports `utils`, `options` and `errors` only, never `parallel`: other ranks are an all-reduce that it is given.
"""

from .plugin import AMP_PLUGINS, AMP_TYPE, AMPPlugin, Composes

__all__ = ["AMP_PLUGINS", "AMP_TYPE", "AMPPlugin", "Composes"]
