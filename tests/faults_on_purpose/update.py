"""Faults of the update: of masters and optimizers; and of what backward computes again, or what is watched."""

from __future__ import annotations

from . import workloads
from .fault import In, Text, fault
from .layouts import DATA, GPT_DATA, GPT_PIPE, GRADIENT, MLP_TENSOR, NAIVE_BF16, Cell, grad

OPTIMIZER, MASTER, STEPPER = (f"amp/{name}.py" for name in ("optimizer", "master_weights", "stepper"))
RECOMPUTE, OFFLOAD, NONFINITE = "engine/recompute.py", "engine/offload.py", "debug/nonfinite.py"
UPDATES, MASTERS, STEPS = (f"tests/amp/test_{name}.py" for name in ("optimizer", "master_weights", "stepper"))
SEVERAL, DIAGNOSIS = "tests/engine/test_several_optimizers.py", "tests/debug/test_diagnosis.py"
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
        "Masters begin with rounded values",
        Text(
            MASTER,
            "known[param] if param in known else make_master(full_value(param))",
            "make_master(full_value(param))",
        ),
        f"{UPDATES}::test_masters_step_as_an_fp32_optimizer_would",
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
        "Masters are rounded into the model by a launch each",
        Text(
            MASTER,
            "        foreach_copy_(params, [self.masters[param] for param in params])\n",
            "        [param.copy_(self.masters[param]) for param in params]\n",
        ),
        "tests/counts/test_launches.py::test_launches_do_not_grow_with_the_parameters[zeros]",
    ),
    fault(
        "What others write into the model is lost under masters",
        Text(OPTIMIZER, "self.sync_writes(adopt=True)", "self.sync_writes()"),
        "tests/checkpoint/test_state.py::test_weights_written_by_others_are_not_undone",
    ),
    fault(
        "Optimizer state is lost when masters are made",
        Text("utils/optimizer_state.py", "if other is not param and param in optimizer.state:", "if False:"),
        f"{MASTERS}::test_existing_state_is_taken_along",
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
    fault(
        "Fused SGD with momentum that nobody has filled, so that it is not used",
        Text(
            STEPPER, 'if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:', "if False:"
        ),
        f"{STEPS}::test_momentum_that_begins_later_survives_a_first_step_that_is_skipped",
    ),
    fault(
        "Fused SGD with dampening",
        Text(STEPPER, "return not dampened and not", "return not"),
        f"{STEPS}::test_fused_leaves_the_users_choice",
    ),
    fault(
        "Fused kernels ignore the layout of state",
        Text(STEPPER, "and len(kinds) <= 1 and laid_out", "and len(kinds) <= 1"),
        f"{STEPS}::test_parameters_with_gaps_or_a_changed_layout",
    ),
    fault(
        "A subclass with a step of its own is given scaled gradients",
        Text(
            STEPPER,
            "known = {part: type(part) in _TAKES_GRAD_SCALE and _has_own_step(part) for part in self.parts}",
            "known = {part: isinstance(part, _TAKES_GRAD_SCALE) for part in self.parts}",
        ),
        f"{STEPS}::test_a_subclass_with_its_own_step_is_not_trusted_with_the_scale",
    ),
)

SEVERAL_OPTIMIZERS = (
    fault(
        "The second of two optimizers is not stepped",
        Text(
            "utils/joined_optimizer.py",
            "        for part in self.parts:\n            part.step()\n",
            "        self.parts[0].step()\n",
        ),
        f"{SEVERAL}::test_convert_to_amp_takes_a_list",
    ),
    fault(
        "The state of the second optimizer is numbered as the first's",
        Text("utils/joined_optimizer.py", 'first += sum(len(group["params"]) for group in own[1])', "pass"),
        f"{SEVERAL}::test_a_state_dict_resumes_exactly_and_has_the_form_of_one_optimizers",
    ),
    fault(
        "Only the first of several optimizers is guarded",
        Text(
            STEPPER,
            "(self._reject_calls_from_outside) for part in self.parts]",
            "(self._reject_calls_from_outside) for part in self.parts[:1]]",
        ),
        f"{SEVERAL}::test_the_optimizers_that_were_given_stay_usable",
    ),
    fault(
        "Only the first of several schedulers advances",
        Text(
            "engine/lr_scheduler.py",
            "        self.check()\n        for scheduler in self.all:\n",
            "        self.check()\n        for scheduler in self.all[:1]:\n",
        ),
        f"{SEVERAL}::test_schedulers_are_one_each_or_a_list",
    ),
    fault(
        "An optimizer over another loses its state in a load",
        Text(
            "utils/optimizer_state.py",
            "vars(optimizer).update(state=loaded.state, param_groups=loaded.param_groups)",
            "None",
        ),
        f"{SEVERAL}::test_an_optimizer_over_another_is_one",
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
    fault(
        "Modules are not watched before the limit of skips",
        Text(NONFINITE, "            self.attach()\n", "            pass\n"),
        f"{DIAGNOSIS}::test_modules_are_watched_only_while_a_run_of_skips_nears_its_limit",
    ),
    fault(
        "Modules are watched for ever",
        Text(NONFINITE, "            self.detach()\n            hooks", "            hooks"),
        f"{DIAGNOSIS}::test_modules_are_watched_only_while_a_run_of_skips_nears_its_limit",
    ),
    fault(
        "The fault of the last rank is told",
        Text(NONFINITE, "first = min(found.values(), key=lambda fault: fault.key)", "first = [*found.values()][-1]"),
        f"{DIAGNOSIS}::test_the_fault_of_one_rank_is_told_by_all_with_its_rank",
    ),
)
