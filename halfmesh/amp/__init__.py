"""Precision: the number format of each tensor, and the update from scaled gradients to new weights.

Read in this order:
    recipe          a precision mode as plain values
    plugin          the base class of modes; naive_amp, torch_amp, apex_amp: the modes; apex_backend: an installed apex
    precision       casts the model, and runs it and the criterion in a recipe's formats; o1: apex's lists for that
    float8          products of linear layers in float8; float8_weight: a weight that was gathered in float8
    convert         applies a recipe to a model and its optimizer, and undoes it; in between, state dicts have full
                    precision
    optimizer       an update, from a loss to new weights. Below it:
    master_weights  fp32 masters in the user's optimizer, and the full precision of tensors that are not trained
    split_masters   masters that take memory only during an update
    loss_scaler     changes a loss scale, and scales the seed of backward, for one or several losses
    grad_norm       norm and overflow, equal on all ranks
    stepper         chooses an implementation of `optimizer.step()` and calls it
    step_result     the result of an update, and the end of a run with too many skipped updates

It imports only `utils`, `options` and `errors`, never `parallel`: its callers pass the number of ranks.
"""

from .plugin import AMP_PLUGINS, AMP_TYPE, AMPPlugin, Composes

__all__ = ["AMP_PLUGINS", "AMP_TYPE", "AMPPlugin", "Composes"]
