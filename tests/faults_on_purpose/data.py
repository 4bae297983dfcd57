"""Faults of data ranks: replicate, zero1 and fsdp."""

from __future__ import annotations

from . import workloads
from .fault import In, Text, fault
from .layouts import CLIPPED, DATA, FSDP, GRADIENT, NAIVE_BF16, TWICE, UNLIKE, WEIGHTED, ZERO1, Cell, after, before

REDUCER, BUCKETS, ACCUMULATION = "parallel/reducer.py", "parallel/buckets.py", "engine/accumulation.py"
ZERO1_FILE, FSDP_FILE, FSDP_REDUCER = (f"parallel/sharding/{name}.py" for name in ("zero1", "fsdp", "fsdp_reducer"))
REDUCE_DTYPE = "torch.float64 if param.dtype == torch.float64 else options.dtype"
RECEIVED = "zip(self.slices, self.split(received), strict=True)"
OPEN = "            shard.param.grad = None  # a placeholder\n        super().open("
SPLIT = {**DATA.config()["parallel"]["data"], "bucket_mb": 0.0005}
KEPT = {**FSDP.config()["parallel"]["data"], "reshard_after_forward": False}

DATA_FAULTS = (
    fault(
        "The mean over the data ranks is divided by their number once more",
        Text(REDUCER, "flat = bucket.pack()", "flat = bucket.pack().div_(bucket.group.size())"),
        In(DATA, GRADIENT),
    ),
    fault(
        "The mean over the data ranks is a sum",
        Text(REDUCER, "flat.div_(divisor)  # before the sum", "pass  # before the sum"),
        In(DATA, GRADIENT),
    ),
    fault(
        "Data ranks keep their own gradients: an all-reduce is missing",
        Text(BUCKETS, "return all_reduce(flat, self.group, op)", "return NothingSent()"),
        In(DATA, GRADIENT, cause="an all-reduce or a broadcast between these ranks is missing"),
    ),
    fault(
        "The last bucket of gradients is not sent",
        Text(
            REDUCER,
            "return bucket.start(flat)",
            "return bucket.start(flat) if bucket is not self._buckets[-1] else torch.futures.collect_all([])",
        ),
        In(DATA, "gradient first.*", more={"parallel": DATA.config()["parallel"] | {"data": SPLIT}}),
    ),
    fault(
        "Gradients are rounded to bfloat16 before they are summed",
        Text(BUCKETS, REDUCE_DTYPE, "torch.bfloat16"),
        In(DATA, GRADIENT),
    ),
    fault(
        "Gradients of weights in half precision are summed in it, where the config says float32",
        Text(BUCKETS, REDUCE_DTYPE, "options.dtype if param.dtype == torch.float32 else param.dtype"),
        In(NAIVE_BF16, GRADIENT, unseen="it is no larger than the rounding of the format"),
    ),
    fault(
        "Each rank keeps the weights that it began with",
        Text("engine/inputs.py", "if context.size == 1 or is_simulated():", "if True:"),
        In(DATA, ("* first*", UNLIKE)),
    ),
    fault(
        "BatchNorm's statistics stay each data rank's own",
        Text(REDUCER, "if self._statistics:", "if False:"),
        In(DATA, "buffer norm.running_*", workloads.batch_norm),
    ),
    fault(
        "The gradients of a cycle's first microbatches are cleared",
        Text(
            "engine/engine.py",
            "        accumulation.has_backward = False\n",
            "        accumulation.has_backward = False\n"
            "        for param in () if updates else accumulation.update.master_weights.grad_params:\n"
            "            param.grad = None\n",
        ),
        In(TWICE, (GRADIENT, "rejected *gradients of this update are gone*")),
    ),
    fault(
        "The mean over the microbatches of a cycle is a sum",
        Text(ACCUMULATION, 'float(self.length) if self.reduction == "mean" else 1.0', "1.0"),
        In(TWICE, GRADIENT),
    ),
    fault(
        "Weighted losses are divided by the weight of this rank's",
        Text(ACCUMULATION, 'self._context.all_reduce(total, "dp")', "pass"),
        In(DATA, GRADIENT, workloads.weighted, WEIGHTED),
    ),
    fault(
        "Weighted losses are divided by the weight of the last microbatch",
        Text(ACCUMULATION, "weight if self._weight is None else self._weight + weight", "weight"),
        In(TWICE, GRADIENT, workloads.weighted, WEIGHTED),
    ),
    fault(
        "A short last cycle is divided by the full length",
        Text(ACCUMULATION, "divisor = (self.index + self.has_backward) / self.length", "pass"),
        "tests/engine/test_cycle.py::test_the_last_cycle_of_a_loop_that_fetches_before_the_step",
    ),
    fault(
        "An error in backward leaves half a gradient",
        Text(ACCUMULATION, "self.clear()  # a partial gradient is worse than none", "pass  #"),
        "tests/engine/test_cycle.py::test_a_cycle_that_was_broken_leaves_nothing_to_the_next",
    ),
    fault(
        "Reduced gradients are widened by a launch each",
        Text(
            BUCKETS,
            "        foreach_copy_(wide, grads)\n",
            "        [one.copy_(other) for one, other in zip(wide, grads, strict=True)]\n",
        ),
        "tests/counts/test_launches.py::test_launches_of_data_ranks",
    ),
)

SHARDED = (
    fault(
        "A part of a parameter counts in the norm as little as one of several copies (zero1)",
        Text(ZERO1_FILE, "shard.weight * size, source=shard", "shard.weight, source=shard"),
        In(ZERO1, "norm *", more=CLIPPED),
    ),
    fault(
        "A part of a parameter counts in the norm as little as one of several copies (fsdp)",
        Text(FSDP_FILE, "shard.weight * weight.device_mesh.size(-1)", "shard.weight"),
        In(FSDP, "norm *", more=CLIPPED),
    ),
    fault(
        "A part is stepped with gradients that belong one element further",
        Text(ZERO1_FILE, RECEIVED, RECEIVED.replace("received", "received.roll(1)")),
        In(ZERO1, GRADIENT),
    ),
    fault(
        "The last element of each rank's part has no gradient: the end of a part is off by one",
        Text(ZERO1_FILE, RECEIVED, RECEIVED.replace("received", "torch.cat([received[:-1], received[-1:] * 0])")),
        In(ZERO1, ("gradient down.weight; *", "gradient first.weight; *")),
    ),
    fault(
        "The new weights of one bucket stay on the ranks that have stepped them",
        Text(ZERO1_FILE, "if self._stepped.isdisjoint", "if bucket is self._order[0] or self._stepped.isdisjoint"),
        In(ZERO1, "update *"),
    ),
    fault(
        "New weights are joined in another order than that of the ranks",
        Text(ZERO1_FILE, "bucket.views(flat))", "bucket.views(flat.roll(bucket.chunk)))"),
        In(ZERO1, "update *"),
    ),
    fault(
        "New weights are used before they have arrived",
        Text(ZERO1_FILE, "        work.wait()\n        foreach_copy_", "        foreach_copy_"),
        "tests/parallel/test_late_collectives.py::test_nothing_is_read_or_written_before_its_time[zero1-none]",
    ),
    fault(
        "Gradients go to the ranks that step them in the backward of each microbatch; those of the last one count",
        [
            Text(ZERO1_FILE, f"{OPEN}last)", f"{OPEN}True)".replace("super()", "self._reset()\n        super()")),
            Text(
                REDUCER,
                "bucket.missing.discard(param)\n",
                "bucket.missing.discard(param)\n        self._send_complete()\n",
            ),
        ],
        In(Cell("none", data=2, gradient_accumulation=2, strategy="zero1"), GRADIENT),
    ),
    fault(
        "What FSDP2 has averaged over the ranks is divided by their number once more",
        Text(
            FSDP_REDUCER,
            "                if factor != 1:\n                    local.mul_(factor)\n",
            "                local.mul_(factor / self.group.size())\n",
        ),
        In(FSDP, GRADIENT),
    ),
    fault(
        "FSDP2 is not told to sum the gradients of one block",
        Text(
            FSDP_REDUCER,
            "                add_missing_grads(unit)\n",
            "                add_missing_grads(unit)\n"
            "        self._strategy.unit_params[0][0].set_requires_gradient_sync(False)\n",
        ),
        In(FSDP, ("gradient blocks.0*", "rejected *has not summed the gradients of*blocks.0*")),
    ),
    fault(
        "Weights that were gathered before an update are used after it",
        [
            Text(FSDP_FILE, "        for unit in self.units:\n            unit.reshard()\n", "        return\n"),
            Text(
                FSDP_FILE,
                "        for _, weight in self.sharded:  # so that each gradient is freed as it is used\n",
                "        for unit in self.units:\n            unit.unshard()\n        for _, weight in self.sharded:\n",
            ),
        ],
        In(FSDP, ("update *", after("*"), before("*")), more={"parallel": FSDP.config()["parallel"] | {"data": KEPT}}),
    ),
)
