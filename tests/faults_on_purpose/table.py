"""All faults."""

from __future__ import annotations

from . import users
from .checkpoint import CHECKPOINT, FLOAT8_FAULTS
from .data import DATA_FAULTS, SHARDED
from .fault import Fault, In, user
from .layouts import DATA, GPT_CONTEXT, GPT_TENSOR, GRADIENT, LOSS, MLP_TENSOR, OTHERWISE, TWICE, after, before, grad
from .norm import NORM_AND_SCALE
from .pipeline import PIPELINE
from .shared_batches import CONTEXT, EXPERT_FAULTS
from .tensor import TENSOR
from .update import ACTIVATIONS, SEVERAL_OPTIMIZERS, WEIGHTS

SUMMED, BETWEEN = (LOSS, GRADIENT), before("up")
PLANNED = GPT_TENSOR.config()["parallel"]
PLANNED = {"parallel": PLANNED | {"tensor": PLANNED["tensor"] | {"plan": users.PLAN}}}

USERS = (
    user(users.sum_over_samples, In(DATA, SUMMED, cause="set loss_reduction='sum'")),
    user(users.sum_over_a_fixed_batch, In(TWICE, SUMMED)),
    user(users.unequal_counts, In(DATA, SUMMED, cause="set loss_reduction='weighted'")),
    user(users.class_weights, In(DATA, SUMMED)),
    user(users.negatives_in_the_batch, In(DATA, SUMMED, cause="samples compared with each other")),
    user(users.gathered_without_gradient, In(DATA, SUMMED)),
    user(users.penalty_on_a_shard, In(MLP_TENSOR, (LOSS, "gradient up.weight; *", "rejected *losses*"))),
    user(users.rows_mixed, In(DATA, BETWEEN, cause="the model combines rows of the batch")),
    user(users.state_kept, In(DATA, BETWEEN, cause="keeps state from an earlier call")),
    user(users.calls_counted, In(TWICE, BETWEEN)),
    user(users.weights_written, In(TWICE, after("first"))),
    user(users.scaled_by_the_world, In(DATA, BETWEEN)),
    user(users.depends_on_the_rank, In(DATA, BETWEEN)),
    user(users.random_numbers, In(DATA, BETWEEN, cause="draws random numbers")),
    user(
        users.features_mixed_in_training,
        In(MLP_TENSOR, before("down"), cause="the model combines features that are split over tensor ranks"),
    ),
    user(users.features_mixed, In(MLP_TENSOR, (before("down"), OTHERWISE))),
    user(users.tokens_mixed_in_training, In(GPT_CONTEXT, before("blocks.0*"))),
    user(
        users.buffer_of_each_rank,
        In(DATA, "buffer average; *", cause="each data rank updates it from its own batches"),
    ),
    user(users.gradient_of_its_own, In(DATA, grad("first"))),
    user(users.gradient_hook, In(DATA, "gradient up.weight; *")),
    user(users.fixed_heads, In(GPT_TENSOR, ("* attention*", "rejected *attention*"), more=PLANNED)),
    user(
        users.plan_without_partial,
        In(GPT_TENSOR, ("gradient attention.norm.*", "rejected *attention.norm*"), more=PLANNED),
    ),
)

FAULTS: tuple[Fault, ...] = (
    *TENSOR,
    *PIPELINE,
    *CONTEXT,
    *EXPERT_FAULTS,
    *DATA_FAULTS,
    *SHARDED,
    *NORM_AND_SCALE,
    *WEIGHTS,
    *SEVERAL_OPTIMIZERS,
    *ACTIVATIONS,
    *CHECKPOINT,
    *FLOAT8_FAULTS,
    *USERS,
)
TESTS = tuple(dict.fromkeys(test for fault in FAULTS for test in fault.tests))
"""Those that have to see some."""
