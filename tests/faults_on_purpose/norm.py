"""Faults of the norm, the overflow decision and the loss scale."""

from __future__ import annotations

from .fault import In, Text, fault
from .layouts import CLIPPED, DATA, GRADIENT, MLP_TENSOR, NAIVE_FP16, TORCH_FP16, TORCH_FP16_TENSOR, Cell

OPTIMIZER, NORM, SCALER = (f"amp/{name}.py" for name in ("optimizer", "grad_norm", "loss_scaler"))
UPDATE, SCALERS, NORMS, LOSSES = (
    f"tests/amp/test_{name}.py" for name in ("optimizer", "loss_scaler", "grad_norm", "apex_losses")
)
MOVED = "            if stats is not None:\n                self.loss_scales.update(stats)\n"
DIVISOR = "        scale, total = self.loss_scales.grad_divisor(divisor)\n        total = None if self"
DISAGREES = "overflow *", "norm *", "rejected *"

NORM_AND_SCALE = (
    fault(
        "Each rank judges its own gradients only",
        Text(NORM, "if ranks.size > 1:", "if False:"),
        In(Cell("naive_fp16", data=2, strategy="zero1"), DISAGREES),
        In(Cell("torch_fp16", "gpt", data=2, strategy="fsdp"), DISAGREES),
        In(MLP_TENSOR, "norm *", more=CLIPPED),
    ),
    fault(
        "What several ranks hold counts several times in the norm, over tensor and data ranks",
        Text(
            "engine/parallelize.py",
            "return 1 / math.prod([self._context.dp_size, *(axis.replicas(param) for axis in self.axes.values())])",
            "return 1.0",
        ),
        In(MLP_TENSOR, "norm *", more=CLIPPED),
        In(DATA, "norm *", more=CLIPPED),
    ),
    fault(
        "The norm of scaled gradients is compared with the largest that is allowed",
        Text(
            NORM,
            "norm.add(divisor, alpha=1e-6).div_(max_norm)",
            "norm.add(divisor, alpha=1e-6).div_(max_norm).mul(divisor)",
        ),
        In(TORCH_FP16_TENSOR, "update *", more=CLIPPED),
        f"{UPDATE}::test_equals_unscale_clip_step_by_hand[sgd-clip_bites]",
    ),
    fault(
        "The norm is measured, and nothing is clipped",
        Text(OPTIMIZER, "total = clip_divisor(total, stats.norm, max_norm)", "pass"),
        In(DATA, "update *", more=CLIPPED),
    ),
    fault(
        "Nan is no overflow",
        Text(NORM, "found_inf=(norm < math.inf).logical_not_().float()", "found_inf=(norm == math.inf).float()"),
        f"{NORMS}::test_one_bad_element_is_found",
    ),
    fault(
        "Norms of half-precision gradients are summed in half precision",
        Text(NORM, "torch.float32 if common and dtype is not torch.float64 else torch.float64", "dtype"),
        f"{NORMS}::test_half_precision_gradients_accumulate_in_fp32",
    ),
    fault(
        "An update with inf in its gradients is taken",
        Text(OPTIMIZER, "        found_inf = self.found_inf\n", "        found_inf = None\n"),
        In(TORCH_FP16, ("overflow *", "update *")),
    ),
    fault(
        "An update without a loss scale is skipped",
        Text(OPTIMIZER, "if stats is not None and self.skips_nonfinite else None", "if stats is not None else None"),
        f"{UPDATE}::test_a_loss_scale_skips_but_not_a_static_one_of_apex",
    ),
    fault(
        "The loss scale never moves",
        Text(SCALER, "        options, tracker, left = self", "        return\n        options, tracker, left = self"),
        In(NAIVE_FP16, "overflow *"),
    ),
    fault(
        "The loss scale falls at the first overflow, where the config allows more",
        Text(SCALER, "torch.full((), options.hysteresis,", "torch.full((), 1,"),
        In(
            NAIVE_FP16,
            "overflow loss_scale; *",
            more={"fp16": {"mode": "naive", "initial_scale": 256.0, "hysteresis": 2}},
        ),
    ),
    fault(
        "The loss scale grows one update too late",
        Text(
            SCALER,
            "options.backoff_factor, options.growth_interval",
            "options.backoff_factor, options.growth_interval + 1",
        ),
        In(NAIVE_FP16, "overflow loss_scale; *"),
    ),
    fault(
        "The loss scale leaves its bounds",
        Text(SCALER, "self.scale.clamp_(self._min_scale, options.max_scale)", "pass"),
        f"{SCALERS}::test_moves_as_the_rule_says",
    ),
    fault(
        "Hysteresis is not refilled",
        Text(SCALER, "left.masked_fill_((tracker == 0).logical_and_(~found), options.hysteresis)", "pass"),
        f"{SCALERS}::test_moves_as_the_rule_says",
    ),
    fault(
        "An overflow does not restart the count of good updates",
        Text(SCALER, "tracker.masked_fill_(found, -1)", "tracker.masked_fill_(found, 0)"),
        f"{SCALERS}::test_moves_as_the_rule_says",
    ),
    fault(
        "A loss that was not used moves its scale",
        Text(SCALER, "if used is not None and before is not None:", "if False:"),
        f"{LOSSES}::test_a_loss_without_backward_keeps_its_scale",
    ),
    fault(
        "Gradients of several losses are added at different scales",
        Text(SCALER, "            foreach_mul_(wide, factor)\n", ""),
        f"{LOSSES}::test_gradients_are_added_up_in_fp32[O1-scales1]",
    ),
    fault(
        "The learning rate moves on after an update that was skipped, too",
        Text("engine/lr_scheduler.py", "if result is not None and not result.skipped:", "if result is not None:"),
        In(TORCH_FP16, "overflow lr; *"),
    ),
    fault(
        "The loss scale is updated before gradients are divided by it",
        [
            Text(OPTIMIZER, MOVED, ""),
            Text(
                OPTIMIZER,
                DIVISOR,
                f"        if stats is not None:\n            self.loss_scales.update(stats)\n{DIVISOR}",
            ),
        ],
        In(TORCH_FP16_TENSOR, ("overflow loss_scale; *", "update *", "gradient *")),
    ),
    fault(
        "Gradients are not divided by the loss scale",
        Text(SCALER, "carried = None if self.several else scale", "carried = None"),
        In(TORCH_FP16, ("update *", GRADIENT)),
    ),
    fault(
        "The scale stays where a hook raises on one rank",
        Text(
            OPTIMIZER,
            "        finally:  # a hook of the user's may raise on one rank: the scale moves on all\n",
            "        except ZeroDivisionError:\n            pass\n        else:\n",
        ),
        "tests/parallel/sharding/test_zero1.py::test_a_hook_that_fails_leaves_equal_weights",
    ),
)
