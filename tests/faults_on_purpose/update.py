"""Faults of the update: of masters and optimizers; and of what backward computes again, or what is watched."""

from __future__ import annotations

from . import workloads
from .fault import In, Text, fault
from .layouts import DATA, GPT_DATA, GPT_PIPE, GRADIENT, MLP_TENSOR, NAIVE_BF16, Cell, grad

OPTIMIZER, MASTER, STEPPER = (f"amp/{name}.py" for name in ("optimizer", "master_weights", "stepper"))
RECOMPUTE, OFFLOAD = "engine/recompute.py", "engine/offload.py"
FIT = "        if bucketed or not self._masters.masters:  # else they fit already\n"
LAST = "torch.distributed.get_rank() == torch.distributed.get_world_size() - 1"
MERGE = "            self.loss_scales.merge_grads(loss_id, self.master_weights.receivers)\n"
FORWARD = "return type(self._module).forward(self._module, *args, **kwargs)"


def not_stepped(condition: str) -> Text:
    """The optimizer does not step the shards for which `condition` holds."""
    skip = (
        f"        for shard in [shard for shard in shards if {condition}]:\n"
        "            shard.param.grad = None\n"
        "            all_grads.pop(shard)\n"
        "        shards = [shard for shard in shards if shard in all_grads]\n"
    )
    return Text(STEPPER, FIT, skip + FIT)


WEIGHTS = (
    fault(
        "The model never hears of what its masters have learned",
        Text(MASTER, "        foreach_copy_(params, [self.masters[param] for param in params])\n", ""),
        In(Cell("naive_fp16", "gpt", tensor=2), "update *"),
    ),
    fault(
        "Masters begin with the values that lie one element further",
        Text(MASTER, "nn.Parameter(value, requires_grad=True)", "nn.Parameter(value.roll(1), requires_grad=True)"),
        In(Cell("naive_bf16", "gpt", tensor=2, data=2, strategy="zero1"), ("update *", "rejected *masters differ*")),
    ),
    fault(
        "Each update begins with the model's rounded weights, and not with their masters",
        Text(
            STEPPER,
            FIT,
            "        for param, master in self._masters.masters.items():\n            master.data.copy_(param)\n" + FIT,
        ),
        In(NAIVE_BF16, "update *"),
    ),
    fault(
        "The second update has the gradients of the first one, too",
        Text(
            OPTIMIZER,
            MERGE,
            f"{MERGE}        kept = self.__dict__.setdefault('kept', {{}})\n"
            "        for param in self.master_weights.grad_params:\n"
            "            new = param.grad.clone()\n"
            "            param.grad += kept.get(param, 0)\n"
            "            kept[param] = new\n",
        ),
        In(MLP_TENSOR, GRADIENT),
    ),
    fault(
        "One parameter is left out of the update",
        not_stepped("shard.name == 'up.weight'"),
        In(DATA, "update up.weight; *"),
    ),
    fault("The last rank takes no update", not_stepped(LAST), In(DATA, "update *")),
    fault(
        "The last stage does not step the weight that it shares with the first",
        not_stepped(f"{LAST} and shard.name == 'tokens.weight'"),
        In(GPT_PIPE, "update tokens.weight; *"),
    ),
)

ACTIVATIONS = (
    fault(
        "A block is computed again from inputs that were changed since",
        Text(
            RECOMPUTE,
            FORWARD,
            "scale = 1.0 if torch._C._current_graph_task_id() == -1 else 1.01\n"
            "        return type(self._module).forward(self._module, args[0] * scale, *args[1:], **kwargs)",
        ),
        In(GPT_DATA, (grad("blocks.1*"), "gradient blocks.1*"), more={"activation_checkpoint": "full"}),
    ),
    fault(
        "A block is computed again with its modules in evaluation",
        Text(
            RECOMPUTE,
            "zip(modules, training, strict=True):\n            module.training = flag",
            "zip(modules, training, strict=True):\n            module.training = False",
        ),
        In(
            DATA,
            (grad("blocks.1"), grad("blocks.2"), "gradient blocks.*"),
            workloads.scaled_in_training,
            {"activation_checkpoint": {"patterns": ["blocks.*"]}},
        ),
    ),
    fault(
        "Activations are rounded to bfloat16 on their way to the host",
        Text(OFFLOAD, "        self.host = host\n", "        self.host = host.bfloat16().to(host.dtype)\n"),
        In(GPT_DATA, (grad("*"), GRADIENT), more={"activation_offload": True}),
    ),
    fault(
        "Activations of one shape share their memory on the host",
        Text(
            OFFLOAD,
            "        self.host = host\n",
            "        places = offload.__dict__.setdefault('places', {})\n"
            "        self.host = places.setdefault((host.shape, host.dtype), host).copy_(host)\n",
        ),
        In(GPT_DATA, (grad("*"), GRADIENT), more={"activation_offload": True}),
    ),
)
