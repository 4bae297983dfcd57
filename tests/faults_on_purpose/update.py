"""Faults of the update: norm and loss scale, masters and optimizers, and what backward computes again."""

from __future__ import annotations

from . import workloads
from .fault import CLIPPED, GRADIENT, At, Cell, In, Text, grad

OPTIMIZER, NORM, SCALER, MASTER, STEPPER = (
    f"amp/{name}.py" for name in ("optimizer", "grad_norm", "loss_scaler", "master_weights", "stepper")
)
UPDATES, SCALERS, NORMS, LOSSES, STEPS = (
    f"tests/amp/test_{name}.py" for name in ("optimizer", "loss_scaler", "grad_norm", "apex", "stepper")
)
MOVED = "            if stats is not None:\n                self.loss_scales.update(stats)\n"
DIVISOR = "        scale, total = self.loss_scales.grad_divisor(divisor)\n        total = None if self"
DISAGREES = "overflow *", "norm *", "rejected *"
HYSTERESIS = {"fp16": {"mode": "naive", "initial_scale": 256.0, "hysteresis": 2}}

NORM_AND_SCALE = {
    "Each rank judges its own gradients only": (
        Text(NORM, "if ranks.size > 1:", "if False:"),
        In(Cell("naive_fp16", data=2, strategy="zero1"), DISAGREES),
        In(Cell("torch_fp16", "gpt", data=2, strategy="fsdp"), DISAGREES),
        In(At.MLP_TENSOR, "norm *", more=CLIPPED),
    ),
    "What several ranks hold counts several times in the norm, over tensor and data ranks": (
        Text("engine/parallelize.py", "return 1 / math.prod(", "return 1.0 or math.prod("),
        In(At.MLP_TENSOR, "norm *", more=CLIPPED),
        In(At.DATA, "norm *", more=CLIPPED),
    ),
    "The norm of scaled gradients is compared with the largest that is allowed": (
        Text(NORM, "norm.add(divisor, alpha=1e-6).div_(max_norm)", "OLD.mul(divisor)"),
        In(At.TORCH_FP16_TENSOR, "update *", more=CLIPPED),
        f"{UPDATES}::test_equals_unscale_clip_step_by_hand[sgd-clip_bites]",
    ),
    "The norm is measured, and nothing is clipped": (
        Text(OPTIMIZER, "total = clip_divisor(total, stats.norm, max_norm)", "pass"),
        In(At.DATA, "update *", more=CLIPPED),
    ),
    "Nan is no overflow": (
        Text(NORM, "found_inf=(norm < math.inf).logical_not_().float()", "found_inf=(norm == math.inf).float()"),
        f"{NORMS}::test_one_bad_element_is_found",
    ),
    "Norms of half-precision gradients are summed in half precision": (
        Text(NORM, "torch.float32 if common and dtype is not torch.float64 else torch.float64", "dtype"),
        f"{NORMS}::test_half_precision_gradients_accumulate_in_fp32",
    ),
    "An update with inf in its gradients is taken": (
        Text(OPTIMIZER, "        found_inf = self.found_inf\n", "        found_inf = None\n"),
        In(At.TORCH_FP16, ("overflow *", "update *")),
    ),
    "An update without a loss scale is skipped": (
        Text(OPTIMIZER, "if stats is not None and self.skips_nonfinite else None", "if stats is not None else None"),
        f"{UPDATES}::test_a_loss_scale_skips_but_not_a_static_one_of_apex",
    ),
    "The loss scale never moves": (
        Text(SCALER, "        options, tracker, left = self", "        return\nOLD"),
        In(At.NAIVE_FP16, "overflow *"),
    ),
    "The loss scale falls at the first overflow, where the config allows more": (
        Text(SCALER, "torch.full((), options.hysteresis,", "torch.full((), 1,"),
        In(At.NAIVE_FP16, "overflow loss_scale; *", more=HYSTERESIS),
    ),
    "The loss scale grows one update too late": (
        Text(SCALER, "options.backoff_factor, options.growth_interval", "OLD + 1"),
        In(At.NAIVE_FP16, "overflow loss_scale; *"),
    ),
    "The loss scale leaves its bounds": (
        Text(SCALER, "self.scale.clamp_(self._min_scale, options.max_scale)", "pass"),
        f"{SCALERS}::test_moves_as_the_rule_says",
    ),
    "Hysteresis is not refilled": (
        Text(SCALER, "left.masked_fill_((tracker == 0).logical_and_(~found), options.hysteresis)", "pass"),
        f"{SCALERS}::test_moves_as_the_rule_says",
    ),
    "An overflow does not restart the count of good updates": (
        Text(SCALER, "tracker.masked_fill_(found, -1)", "tracker.masked_fill_(found, 0)"),
        f"{SCALERS}::test_moves_as_the_rule_says",
    ),
    "A loss that was not used moves its scale": (
        Text(SCALER, "if used is not None and before is not None:", "if False:"),
        f"{LOSSES}::test_a_loss_without_backward_keeps_its_scale",
    ),
    "Gradients of several losses are added at different scales": (
        Text(SCALER, "            foreach_mul_(wide, factor)\n", ""),
        f"{LOSSES}::test_gradients_are_added_up_in_fp32[O1-scales1]",
    ),
    "The learning rate moves on after an update that was skipped, too": (
        Text("engine/lr_scheduler.py", "if result is not None and not result.skipped:", "if result is not None:"),
        In(At.TORCH_FP16, "overflow lr; *"),
    ),
    "The loss scale is updated before gradients are divided by it": (
        Text(OPTIMIZER, MOVED, ""),
        Text(OPTIMIZER, DIVISOR, "        if stats is not None:\n            self.loss_scales.update(stats)\nOLD"),
        In(At.TORCH_FP16_TENSOR, ("overflow loss_scale; *", "update *", "gradient *")),
    ),
    "Gradients are not divided by the loss scale": (
        Text(SCALER, "carried = None if self.several else scale", "carried = None"),
        In(At.TORCH_FP16, ("update *", GRADIENT)),
    ),
    "The scale stays where a hook raises on one rank": (
        Text(
            OPTIMIZER,
            "finally:  # a hook of the user's may raise on one rank: the scale moves on all\n",
            "except ZeroDivisionError:\n            pass\n        else:\n",
        ),
        "tests/parallel/sharding/test_zero1.py::test_a_hook_that_fails_leaves_equal_weights",
    ),
}

FIT = "        if bucketed or not self._masters.masters:  # else they fit already\n"
LAST = "torch.distributed.get_rank() == torch.distributed.get_world_size() - 1"
MERGE = "            self.loss_scales.merge_grads(loss_id, self.master_weights.receivers)\n"
INTO_MODEL = "foreach_copy_([shard.param for shard in held], [self.with_master[shard] for shard in held])\n"


def not_stepped(condition: str) -> Text:
    """The optimizer does not step the shards for which `condition` holds."""
    skip = (
        f"        for shard in [shard for shard in shards if {condition}]:\n"
        "            shard.param.grad = None\n"
        "            all_grads.pop(shard)\n"
        "        shards = [shard for shard in shards if shard in all_grads]\nOLD"
    )
    return Text(STEPPER, FIT, skip)


WEIGHTS = {
    "The model never hears of what its masters have learned": (
        Text(MASTER, INTO_MODEL, "pass\n"),
        In(Cell("naive_fp16", "gpt", tensor=2), "update *"),
    ),
    "Masters begin with the values that lie one element further": (
        Text(MASTER, "nn.Parameter(value, requires_grad=True)", "nn.Parameter(value.roll(1), requires_grad=True)"),
        In(Cell("naive_bf16", "gpt", tensor=2, data=2, strategy="zero1"), ("update *", "rejected *masters differ*")),
    ),
    "Masters begin with rounded values": (
        Text(MASTER, "known[param] if param in known else make_master(", "make_master("),
        f"{UPDATES}::test_masters_step_as_an_fp32_optimizer_would",
    ),
    "Each update begins with the model's rounded weights, and not with their masters": (
        Text(
            STEPPER,
            FIT,
            "        for param, master in self._masters.masters.items():\n            master.data.copy_(param)\nOLD",
        ),
        In(At.NAIVE_BF16, "update *"),
    ),
    "Masters are rounded into the model by a launch each": (
        Text(MASTER, INTO_MODEL, "[shard.param.copy_(self.with_master[shard]) for shard in held]\n"),
        "tests/counts/test_launches.py::test_launches_do_not_grow_with_the_parameters[zeros]",
    ),
    "What others write into the model is lost under masters": (
        Text(OPTIMIZER, "self.sync_writes(adopt=True)", "self.sync_writes()"),
        "tests/checkpoint/test_state.py::test_weights_written_by_others_are_not_undone",
    ),
    "Optimizer state is lost when masters are made": (
        Text("utils/optimizer_state.py", "if other is not param and param in optimizer.state:", "if False:"),
        f"{STEPS}::test_existing_state_is_taken_along",
    ),
    "The second update has the gradients of the first one, too": (
        Text(
            OPTIMIZER,
            MERGE,
            "OLD        kept = self.__dict__.setdefault('kept', {})\n"
            "        for param in self.master_weights.grad_params:\n"
            "            new = param.grad.clone()\n"
            "            param.grad += kept.get(param, 0)\n"
            "            kept[param] = new\n",
        ),
        In(At.MLP_TENSOR, GRADIENT),
    ),
    "One parameter is left out of the update": (
        not_stepped("shard.name == 'up.weight'"),
        In(At.DATA, "update up.weight; *"),
    ),
    "The last rank takes no update": (not_stepped(LAST), In(At.DATA, "update *")),
    "The last stage does not step the weight that it shares with the first": (
        not_stepped(f"{LAST} and shard.name == 'tokens.weight'"),
        In(At.GPT_PIPE, "update tokens.weight; *"),
    ),
    "Fused SGD with momentum that nobody has filled, so that it is not used": (
        Text(STEPPER, 'and optimizer.state[param].get("momentum_buffer") is None:', "and False:"),
        f"{UPDATES}::test_momentum_that_begins_later_survives_a_first_step_that_is_skipped",
    ),
    "Fused SGD with dampening": (
        Text(STEPPER, "return not dampened and not", "return not"),
        f"{STEPS}::test_fused_leaves_the_users_choice",
    ),
    "Fused kernels ignore the layout of state": (
        Text(STEPPER, "and len(kinds) <= 1 and laid_out", "and len(kinds) <= 1"),
        f"{STEPS}::test_parameters_with_gaps_or_a_changed_layout",
    ),
    "A subclass with a step of its own is given scaled gradients": (
        Text(
            STEPPER,
            "type(part) in _TAKES_GRAD_SCALE and _has_own_step(part) for part",
            "isinstance(part, _TAKES_GRAD_SCALE) for part",
        ),
        f"{STEPS}::test_a_subclass_with_its_own_step_is_not_trusted_with_the_scale",
    ),
}

SEVERAL, DIAGNOSIS = "tests/engine/test_several_optimizers.py", "tests/debug/test_diagnosis.py"
JOINED, STATE, LR = "utils/joined_optimizer.py", "utils/optimizer_state.py", "engine/lr_scheduler.py"

SEVERAL_OPTIMIZERS = {
    "The second of two optimizers is not stepped": (
        Text(JOINED, "for part in self.parts:\n            part.step()\n", "self.parts[0].step()\n"),
        f"{SEVERAL}::test_convert_to_amp_takes_a_list",
    ),
    "The state of the second optimizer is numbered as the first's": (
        Text(JOINED, 'first += sum(len(group["params"]) for group in own[1])', "pass"),
        f"{SEVERAL}::test_a_state_dict_resumes_exactly_and_has_the_form_of_one_optimizers",
    ),
    "Only the first of several optimizers is guarded": (
        Text(STEPPER, "from_outside) for part in self.parts]", "from_outside) for part in self.parts[:1]]"),
        f"{SEVERAL}::test_the_optimizers_that_were_given_stay_usable",
    ),
    "Only the first of several schedulers advances": (
        Text(LR, "self.check()\n        for scheduler in self.all:", "for scheduler in self.all[:1]:"),
        f"{SEVERAL}::test_schedulers_are_one_each_or_a_list",
    ),
    "An optimizer over another loses its state in a load": (
        Text(STATE, "vars(optimizer).update(state=loaded.state, param_groups=loaded.param_groups)", "None"),
        f"{SEVERAL}::test_an_optimizer_over_another_is_one",
    ),
}

RECOMPUTE, OFFLOAD, NONFINITE = "engine/recompute.py", "engine/offload.py", "debug/nonfinite.py"
FORWARD = "return type(self._module).forward(self._module, *args, **kwargs)"
HOST = "        self.host = host\n"
FLAGS = "zip(modules, training, strict=True):\n            module.training = "

ACTIVATIONS = {
    "A block is computed again from inputs that were changed since": (
        Text(
            RECOMPUTE,
            FORWARD,
            "scale = 1.0 if torch._C._current_graph_task_id() == -1 else 1.01\n"
            "        args = (args[0] * scale, *args[1:])\n        OLD",
        ),
        In(At.GPT_DATA, (grad("blocks.1*"), "gradient blocks.1*"), more={"activation_checkpoint": "full"}),
    ),
    "A block is computed again with its modules in evaluation": (
        Text(RECOMPUTE, f"{FLAGS}flag", f"{FLAGS}False"),
        In(
            At.DATA,
            (grad("blocks.1"), grad("blocks.2"), "gradient blocks.*"),
            workloads.scaled_in_training,
            {"activation_checkpoint": {"patterns": ["blocks.*"]}},
        ),
    ),
    "Activations are rounded to bfloat16 on their way to the host": (
        Text(OFFLOAD, HOST, "        self.host = host.bfloat16().to(host.dtype)\n"),
        In(At.GPT_DATA, (grad("*"), GRADIENT), more={"activation_offload": True}),
    ),
    "Activations of one shape share their memory on the host": (
        Text(
            OFFLOAD,
            HOST,
            "        places = offload.__dict__.setdefault('places', {})\n"
            "        self.host = places.setdefault((host.shape, host.dtype), host).copy_(host)\n",
        ),
        In(At.GPT_DATA, (grad("*"), GRADIENT), more={"activation_offload": True}),
    ),
    "Modules are not watched before the limit of skips": (
        Text(NONFINITE, "            self.attach()\n", "            pass\n"),
        f"{DIAGNOSIS}::test_modules_are_watched_only_while_a_run_of_skips_nears_its_limit",
    ),
    "Modules are watched for ever": (
        Text(NONFINITE, "            self.detach()\n            hooks", "            hooks"),
        f"{DIAGNOSIS}::test_modules_are_watched_only_while_a_run_of_skips_nears_its_limit",
    ),
    "The fault of the last rank is told": (
        Text(NONFINITE, "first = min(found.values(), key=lambda fault: fault.key)", "first = [*found.values()][-1]"),
        f"{DIAGNOSIS}::test_the_fault_of_one_rank_is_told_by_all_with_its_rank",
    ),
}
