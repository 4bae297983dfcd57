"""Faults of checkpoints, and of products in float8."""

from .fault import Text

CHECKPOINTER, STORAGE, STATE = (f"checkpoint/{name}.py" for name in ("checkpointer", "storage", "state"))
VALIDATE, FLOAT8, WRAP = "checkpoint/validate.py", "amp/float8.py", "parallel/sharding/fsdp_wrap.py"
RESUME, CONTENTS, BACKGROUND, SETTINGS, SAVING, DAMAGE = (
    f"tests/checkpoint/test_{name}.py" for name in ("resume", "contents", "background", "keep", "saving", "damage")
)
GATHER, FLOAT8_TESTS = "tests/parallel/sharding/test_fsdp_gather.py", "tests/amp/test_float8.py"

CHECKPOINT = {
    "Loss scales are not restored": (
        Text(CHECKPOINTER, "losses.load_state_dict(scalers)", "pass"),
        f"{RESUME}::test_one_process_goes_on_within_an_epoch_and_at_its_edges",
    ),
    "Skip counts are not restored": (
        Text(CHECKPOINTER, 'state.update.skip_counter.load_state_dict(common["skips"])', "pass"),
        f"{CONTENTS}::test_extra_state_and_counters",
    ),
    "The scheduler is not restored": (
        Text(CHECKPOINTER, 'lr.load_state_dict(None if "lr_scheduler" in keep else common["lr_scheduler"])', "pass"),
        f"{CONTENTS}::test_numbers_and_arrays_of_numpy_come_back_as_they_were",
    ),
    "Random numbers are not restored": (
        Text(CHECKPOINTER, 'rank_state.set_rank_random(own["random"], ', "(own, "),
        f"{RESUME}::test_one_process_goes_on_within_an_epoch_and_at_its_edges",
    ),
    "The position in the data is not restored": (
        Text(CHECKPOINTER, 'note = self.loader.load_state_dict(own["dataloader"], own=same)', "note = None"),
        "tests/data/test_resume.py::test_it_goes_on_as_it_would_have",
    ),
    "Attached state is not restored": (
        Text(CHECKPOINTER, 'yield from self.attached.load_state_dict(attached.get("attached", {}))', "yield from ()"),
        f"{CONTENTS}::test_attached_state_goes_with_checkpoints_even_if_nobody_takes_it",
    ),
    "A background save writes what training changes meanwhile": (
        Text(CHECKPOINTER, "snapshot = replace(snapshot, boxes=copies)", "snapshot = replace(snapshot)"),
        f"{BACKGROUND}::test_what_is_written_on_two_ranks",
    ),
    "An error of a background save is lost": (
        Text(CHECKPOINTER, "            written.result()\n", "            pass\n"),
        f"{BACKGROUND}::test_an_error_is_logged_at_once_and_comes_with_what_waits",
    ),
    "A checkpoint has its name before it is complete": (
        Text(STORAGE, 'folder / f".step-{step:08d}{again}.tmp"\n', 'folder / f"step-{step:08d}{again}"\n'),
        f"{SAVING}::test_keep",
    ),
    "A changed file is loaded": (
        Text(STORAGE, "size_and_digest(paths[name]) != tuple(known)", "False"),
        f"{DAMAGE}::test_any_damage_of_any_file_is_rejected_and_changes_nothing",
    ),
    "A save removes checkpoints of another model": (
        Text(STORAGE, "if path != final and _model(path) == model]", "if path != final]"),
        f"{SAVING}::test_only_checkpoints_of_this_model_are_removed",
    ),
    "A truncated newest checkpoint ends the run in place of the one before": (
        Text(STORAGE, "if len(candidates) == 1:", "if True:"),
        f"{DAMAGE}::test_what_is_no_checkpoint",
    ),
    "A failed save leaves its files": (
        Text(STORAGE, "shutil.rmtree(unfinished, ignore_errors=True)", "pass"),
        f"{SAVING}::test_a_full_disk_on_one_rank_is_told_on_all",
    ),
    "Exported weights are those of the half-precision model": (
        Text(STATE, "value = masters.get(shard.name, None", "value = {}.get(shard.name, None"),
        "tests/checkpoint/test_weights.py::test_weights_of_others_into_every_layout",
    ),
    "Optimizer settings start fresh": (
        Text(STATE, "{**found, **kept,", "{**kept,"),
        f"{RESUME}::test_one_process_goes_on_within_an_epoch_and_at_its_edges",
    ),
    "A schedule that is kept begins anew": (
        Text(VALIDATE, "self._lr.replay(copy.deepcopy(self._schedule), saved)", "pass"),
        f"{SETTINGS}::test_a_schedule_of_another_class_may_go_on",
    ),
    "What an optimizer counts in its groups is kept as a setting": (
        Text(VALIDATE, "is_other = theirs.get(name) != mine.get(name) or", "is_other = True or"),
        f"{SETTINGS}::test_without_a_scheduler_the_rate_is_a_setting_and_counts_are_not",
    ),
}

FLOAT8_FAULTS = {
    "The filter of fp8 is ignored": (
        Text(FLOAT8, "not is_filtered and all(", "all("),
        f"{FLOAT8_TESTS}::test_layers_that_stay_compute_as_in_bf16_and_the_plan_names_them",
    ),
    "Sharded layers multiply in bf16 under fp8": (
        Text(FLOAT8, 'setattr(layer, "product", self)', "pass"),
        f"{FLOAT8_TESTS}::test_sharded_layers_compute_in_float8",
    ),
    "The scale of a gathered weight is that of a shard": (
        Text(WRAP, "dist.all_reduce(self._largest, dist.ReduceOp.MAX, mesh.get_group())", "pass"),
        f"{GATHER}::test_the_same_bits_as_gathered_wide",
    ),
    "The scale of a gathered weight is that of its first gather": (
        Text(WRAP, "self.is_stale = True", "self.is_stale = not len(self._largest)"),
        f"{GATHER}::test_scales_follow_what_is_written",
    ),
    "A weight that is tied to an embedding is gathered in float8": (
        Text(FLOAT8, " if weight not in others", ""),
        f"{GATHER}::test_the_same_bits_as_gathered_wide",
    ),
}
