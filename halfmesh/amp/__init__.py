"""Precision: the number format of each tensor, and the update from scaled gradients to new weights.

Read in this order:
    recipe          a precision mode as plain values
    plugin          the contract of a mode; naive_amp, torch_amp, apex_amp: the modes; apex_backend: an installed apex
    precision       casts the model, and runs it and the criterion in a recipe's formats; o1: apex's lists for that
    float8          products of linear layers in float8; float8_weight: a weight that was gathered in float8
    convert         applies a recipe to a model and its optimizer, and takes it back; in between, state dicts have
                    full precision
    optimizer       an update, from a loss to new weights. Below it:
    master_weights  fp32 masters in the user's optimizer, and the full precision of tensors that are not trained
    split_masters   masters that have memory during an update only
    loss_scaler     how a scale moves, the seed of backward, and several losses
    grad_norm       norm and overflow, the same on all ranks
    stepper         calls `optimizer.step()`, with which implementation
    step_result     the host's view of an update, and the end of a run with too many skipped updates

It imports `utils`, `options` and `errors` only, never `parallel`: it reaches other ranks by an all-reduce it is given.
"""

from .plugin import AMP_PLUGINS, AMP_TYPE, AMPPlugin, Composes

__all__ = ["AMP_PLUGINS", "AMP_TYPE", "AMPPlugin", "Composes"]
