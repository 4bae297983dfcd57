"""Faults that are put into the source on purpose, each with the tests that have to see it.

Those of the parallel layouts are in `tests/verify/faults/`, as faults of ranks that train together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A change of one place in halfmesh/.

    Attributes:
        name: what is wrong then.
        file: within halfmesh/.
        old: text that stands there once.
        new: what takes its place.
        tests: files, or tests in them, of which one has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


OPTIMIZER = "amp/optimizer.py"
EXACT, RULES, SCALER = (f"tests/amp/test_{name}.py" for name in ("update_exactness", "update_rules", "loss_scaler"))
MASTERS, FUSED, NORM = (f"tests/amp/test_{name}.py" for name in ("master_weights", "fused", "grad_norm"))
DIAGNOSIS = "tests/debug/test_diagnosis.py"
CYCLE = "tests/engine/test_cycle.py"
GATHER = "tests/parallel/sharding/test_fsdp_gather.py"
RESUME = "tests/checkpoint/test_resume.py"
DAMAGE, SAVING = "tests/checkpoint/test_damage.py", "tests/checkpoint/test_saving.py"

SEVERAL = "tests/engine/test_several_optimizers.py"
OPTIMIZERS = (
    Fault(
        "the second of two optimizers is not stepped",
        "utils/joined_optimizer.py",
        "        for part in self.parts:\n            part.step()\n",
        "        self.parts[0].step()\n",
        (
            f"{SEVERAL}::test_an_overflow_skips_both_and_moves_neither_scheduler",
            f"{SEVERAL}::test_convert_to_amp_takes_a_list",
        ),
    ),
    Fault(
        "the state of the second optimizer is numbered as the first's",
        "utils/joined_optimizer.py",
        '            first += sum(len(group["params"]) for group in own[1])\n',
        "",
        (f"{SEVERAL}::test_a_state_dict_resumes_exactly_and_has_the_form_of_one_optimizers",),
    ),
    Fault(
        "only the first of several optimizers is guarded",
        "amp/stepper.py",
        "(self._refuse_calls_from_outside) for part in self.parts]",
        "(self._refuse_calls_from_outside) for part in self.parts[:1]]",
        (f"{SEVERAL}::test_the_optimizers_that_were_given_stay_usable",),
    ),
    Fault(
        "only the first of several schedulers advances",
        "engine/lr_scheduler.py",
        "        self.check()\n        for scheduler in self._all:\n",
        "        self.check()\n        for scheduler in self._all[:1]:\n",
        (f"{SEVERAL}::test_schedulers_are_one_each_or_a_list",),
    ),
    Fault(
        "an optimizer over another loses its state in a load",
        "utils/optimizer_state.py",
        "vars(optimizer).update(state=loaded.state, param_groups=loaded.param_groups)",
        "None",
        (f"{SEVERAL}::test_an_optimizer_over_another_is_one",),
    ),
    Fault(
        "a schedule that is kept begins anew",
        "checkpoint/validate.py",
        "            self._lr.replay(copy.deepcopy(self._schedule), saved)\n",
        "            pass\n",
        ("tests/checkpoint/test_keep.py::test_a_schedule_of_another_class_may_go_on",),
    ),
    Fault(
        "what an optimizer counts in its groups is kept as a setting",
        "checkpoint/validate.py",
        "is_other = theirs.get(name) != mine.get(name) or",
        "is_other = True or",
        ("tests/checkpoint/test_keep.py::test_without_a_scheduler_the_rate_is_a_setting_and_counts_are_not",),
    ),
)

FLOAT8 = (
    Fault(
        "the filter of fp8 is ignored",
        "amp/float8.py",
        "not is_filtered and all(",
        "all(",
        ("tests/amp/test_float8.py",),
    ),
    Fault(
        "sharded layers multiply in bf16 under fp8",
        "amp/float8.py",
        'setattr(layer, "product", self)',
        "pass",
        ("tests/amp/test_float8.py::test_sharded_layers_compute_in_float8",),
    ),
    Fault(
        "the scale of a gathered weight is that of a shard",
        "parallel/sharding/fsdp_wrap.py",
        "            dist.all_reduce(self._largest, dist.ReduceOp.MAX, mesh.get_group())\n",
        "",
        (GATHER,),
    ),
    Fault(
        "the scale of a gathered weight is that of its first gather",
        "parallel/sharding/fsdp_wrap.py",
        "self.is_stale = True",
        "self.is_stale = not len(self._largest)",
        ("tests/parallel/sharding/test_fsdp_gather.py::test_scales_follow_what_is_written",),
    ),
    Fault(
        "a weight that is tied to an embedding is gathered in float8",
        "amp/float8.py",
        " if weight not in others",
        "",
        (GATHER,),
    ),
)

SHARDED_BATCHES = (
    Fault(
        "ranks that share a sequence drop the same activations",
        "engine/parallelize.py",
        "if not kind.same_rng and not kind.replica_dim",
        "if False",
        ("tests/parallel/context/test_context_parallel.py::test_ranks_drop_activations_by_themselves",),
    ),
    Fault(
        "a rank without tokens for its experts sends nothing back",
        "parallel/expert.py",
        "if torch.is_grad_enabled() and not done.requires_grad:",
        "if False:",
        ("tests/parallel/expert/test_expert_parallel.py::test_parity[ranks without tokens]",),
    ),
)

UPDATE = (
    Fault(
        "scaled gradients are clipped to the norm",
        "amp/grad_norm.py",
        "norm.add(divisor, alpha=1e-6).div_(max_norm)",
        "norm.add(divisor, alpha=1e-6).div_(max_norm).mul(divisor)",
        (EXACT,),
    ),
    Fault(
        "an update without a loss scale is skipped",
        OPTIMIZER,
        "stats.found_inf if stats is not None and self.skips_nonfinite else None",
        "stats.found_inf if stats is not None else None",
        (RULES,),
    ),
    Fault(
        "what others write into the model is lost under masters",
        OPTIMIZER,
        "self.sync_writes(adopt=True)",
        "self.sync_writes()",
        ("tests/checkpoint/test_state.py",),
    ),
    Fault(
        "the scale stays where a hook raises on one rank",
        OPTIMIZER,
        "        finally:  # a hook of the user's may raise on one rank: the scale moves on all\n",
        "        except ZeroDivisionError:\n            pass\n        else:\n",
        ("tests/parallel/sharding/test_zero1.py::test_a_hook_that_fails_leaves_equal_weights",),
    ),
    Fault(
        "nan is no overflow",
        "amp/grad_norm.py",
        "found_inf=(norm < math.inf).logical_not_().float()",
        "found_inf=(norm == math.inf).float()",
        (NORM,),
    ),
    Fault(
        "norms of half-precision gradients are summed in half precision",
        "amp/grad_norm.py",
        "torch.float32 if common and dtype is not torch.float64 else torch.float64",
        "dtype",
        (NORM,),
    ),
    Fault(
        "the scale leaves its bounds",
        "amp/loss_scaler.py",
        "        self.scale.clamp_(self._min_scale, options.max_scale)\n",
        "",
        (SCALER,),
    ),
    Fault(
        "hysteresis is not refilled",
        "amp/loss_scaler.py",
        "            left.masked_fill_((tracker == 0).logical_and_(~found), options.hysteresis)  # it has grown\n",
        "            pass\n",
        (SCALER,),
    ),
    Fault(
        "an overflow does not restart the count of good updates",
        "amp/loss_scaler.py",
        "tracker.masked_fill_(found, -1)",
        "tracker.masked_fill_(found, 0)",
        (SCALER,),
    ),
    Fault(
        "a loss that was not used moves its scale",
        "amp/loss_scaler.py",
        "if used is not None and before is not None:",
        "if False:",
        ("tests/amp/test_apex_losses.py",),
    ),
    Fault(
        "gradients of several losses are added at different scales",
        "amp/loss_scaler.py",
        "            foreach_mul_(wide, factor)\n",
        "",
        ("tests/amp/test_apex_losses.py",),
    ),
    Fault(
        "masters begin with rounded values",
        "amp/master_weights.py",
        "known[param] if param in known else make_master(full_value(param))",
        "make_master(full_value(param))",
        (EXACT, MASTERS),
    ),
    Fault(
        "optimizer state is lost when masters are made",
        "utils/optimizer_state.py",
        "if other is not param and param in optimizer.state:",
        "if False:",
        (MASTERS,),
    ),
    Fault(
        "fused SGD with momentum that nobody has filled, so that it is not used",
        "amp/stepper.py",
        'if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:',
        "if False:",
        (EXACT, FUSED),
    ),
    Fault("fused SGD with dampening", "amp/stepper.py", "return not dampened and not", "return not", (FUSED,)),
    Fault(
        "fused kernels ignore the layout of state",
        "amp/stepper.py",
        "and len(kinds) <= 1 and laid_out",
        "and len(kinds) <= 1",
        (FUSED,),
    ),
    Fault(
        "a subclass with a step of its own is given scaled gradients",
        "amp/stepper.py",
        "known = {part: type(part) in _TAKES_GRAD_SCALE and _has_own_step(part) for part in self.parts}",
        "known = {part: isinstance(part, _TAKES_GRAD_SCALE) for part in self.parts}",
        (FUSED,),
    ),
    Fault(
        "a short last cycle is divided by the full length",
        "engine/accumulation.py",
        "divisor = (self.index + self.has_backward) / self.length",
        "pass",
        (CYCLE,),
    ),
    Fault(
        "an error in backward leaves half a gradient",
        "engine/accumulation.py",
        "            self.clear()  # a partial gradient is worse than none: the next backward begins a new cycle\n",
        "",
        (CYCLE,),
    ),
)

CHECKPOINT = (
    Fault(
        "loss scales are not restored",
        "checkpoint/checkpointer.py",
        "            losses.load_state_dict(scalers)\n",
        "            pass\n",
        (RESUME, "tests/checkpoint/test_contents.py"),
    ),
    Fault(
        "skip counts are not restored",
        "checkpoint/checkpointer.py",
        '        state.update.skip_counter.load_state_dict(common["skips"])\n',
        "",
        ("tests/checkpoint/test_contents.py::test_extra_state_and_counters",),
    ),
    Fault(
        "the scheduler is not restored",
        "checkpoint/checkpointer.py",
        '        lr.load_state_dict(None if "lr_scheduler" in keep else common["lr_scheduler"])\n',
        "",
        (RESUME, "tests/checkpoint/test_contents.py"),
    ),
    Fault(
        "random numbers are not restored",
        "checkpoint/checkpointer.py",
        '            rank_state.set_rank_random(own["random"], self.context, self.state.parallel_model)\n',
        "            pass\n",
        (RESUME,),
    ),
    Fault(
        "the position in the data is not restored",
        "checkpoint/checkpointer.py",
        'note = self.loader.load_state_dict(own["dataloader"], own=same)',
        "note = None",
        (RESUME,),
    ),
    Fault(
        "attached state is not restored",
        "checkpoint/checkpointer.py",
        'yield from self.attached.load_state_dict(attached.get("attached", {}))',
        "yield from ()",
        ("tests/checkpoint/test_attached.py::test_attached_state_goes_with_checkpoints_even_if_nobody_takes_it",),
    ),
    Fault(
        "a background save writes what training changes meanwhile",
        "checkpoint/checkpointer.py",
        "snapshot = replace(snapshot, boxes=copies)",
        "snapshot = replace(snapshot)",
        ("tests/checkpoint/test_background.py",),
    ),
    Fault(
        "an error of a background save is lost",
        "checkpoint/checkpointer.py",
        "            written.result()\n",
        "            pass\n",
        ("tests/checkpoint/test_background.py::test_an_error_is_logged_at_once_and_comes_with_what_waits",),
    ),
    Fault(
        "a checkpoint has its name before it is complete",
        "checkpoint/storage.py",
        '    unfinished = folder / f".step-{step:08d}{again}.tmp"\n',
        '    unfinished = folder / f"step-{step:08d}{again}"\n',
        (SAVING,),
    ),
    Fault(
        "a changed file is loaded",
        "checkpoint/storage.py",
        "size_and_digest(paths[name]) != tuple(known)",
        "False",
        (DAMAGE,),
    ),
    Fault(
        "a save removes checkpoints of another model",
        "checkpoint/storage.py",
        "if path != final and _model(path) == model]",
        "if path != final]",
        (SAVING,),
    ),
    Fault(
        "a truncated newest checkpoint ends the run in place of the one before",
        "checkpoint/storage.py",
        "if len(candidates) == 1:",
        "if True:",
        (DAMAGE,),
    ),
    Fault(
        "a failed save leaves its files",
        "checkpoint/storage.py",
        "            shutil.rmtree(unfinished, ignore_errors=True)\n",
        "            pass\n",
        (f"{SAVING}::test_a_full_disk_on_one_rank_is_told_on_all",),
    ),
    Fault(
        "exported weights are those of the half-precision model",
        "checkpoint/state.py",
        "value = masters.get(shard.name, None",
        "value = {}.get(shard.name, None",
        ("tests/checkpoint/test_weights.py::test_weights_of_others_into_every_layout",),
    ),
    Fault(
        "optimizer settings start fresh",
        "checkpoint/state.py",
        "{**found, **kept,",
        "{**kept,",
        (RESUME, "tests/checkpoint/test_layouts.py"),
    ),
)

NONFINITE = (
    Fault(
        "modules are not watched before the limit of skips",
        "debug/nonfinite.py",
        "        elif nears_limit:\n            self.attach()\n",
        "",
        (DIAGNOSIS,),
    ),
    Fault(
        "modules are watched for ever",
        "debug/nonfinite.py",
        "                self.detach()\n",
        "                pass\n",
        (DIAGNOSIS,),
    ),
    Fault(
        "the fault of the last rank is told",
        "debug/nonfinite.py",
        "first = min(found.values(), key=lambda fault: fault.key)",
        "first = [*found.values()][-1]",
        (f"{DIAGNOSIS}::test_the_stage_of_a_pipeline_is_told_by_all",),
    ),
)

LAUNCHES, LATE = ("tests/counts/test_launches.py",), ("tests/parallel/test_late_collectives.py",)
GPU = (
    Fault(
        "masters are rounded into the model by a launch each",
        "amp/master_weights.py",
        "        foreach_copy_(params, [self.masters[param] for param in params])\n",
        "        [param.copy_(self.masters[param]) for param in params]\n",
        LAUNCHES,
    ),
    Fault(
        "reduced gradients are widened by a launch each",
        "parallel/reducer.py",
        "        foreach_copy_(wide, grads)\n",
        "        [one.copy_(other) for one, other in zip(wide, grads, strict=True)]\n",
        (f"{LAUNCHES[0]}::test_launches_of_data_ranks",),
    ),
    Fault(
        "new weights are used before they have arrived",
        "parallel/sharding/zero1.py",
        "        work.wait()\n        foreach_copy_",
        "        foreach_copy_",
        LATE,
    ),
    Fault(
        "a sum over tensor ranks is made in place",
        "parallel/collectives.py",
        "total = x.clone(memory_format=torch.contiguous_format)",
        "total = x",
        LATE,
    ),
)

FAULTS = FLOAT8 + OPTIMIZERS + SHARDED_BATCHES + UPDATE + CHECKPOINT + NONFINITE + GPU
