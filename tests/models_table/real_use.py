"""What users do with these models beside a plain loop; each function runs on the ranks of a layout."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader

import halfmesh
from tests.composition.training import digest
from tests.support.models import MODES

from .cells import LAYOUTS, Samples, call, make_optimizer
from .zoo import LENGTH, SAMPLES, SUBJECTS, UPDATES, WORDS, Batch, text

Weights = dict[str, torch.Tensor]
LR = 0.01


def make_engine(
    name: str, layout: str, model: nn.Module, data: Any, criterion: Any = None, mode: str = "none", **keys: Any
) -> halfmesh.Engine:
    """An engine over the parameters of `model` that train. `data`: a loader, or samples."""
    place = LAYOUTS[layout]
    if not isinstance(data, DataLoader):
        data = DataLoader(data, SAMPLES // place.data // keys.get("gradient_accumulation", 1))
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], LR)
    config = MODES[mode] | place.config(SUBJECTS[name]) | keys
    return halfmesh.initialize(model, optimizer, criterion, data, config, device="cpu")


def run(engine: halfmesh.Engine, own_loss: bool) -> None:
    """An epoch, and the end."""
    for batch in engine.dataloader:
        engine.zero_grad()
        output = engine(**batch) if own_loss else call(engine, batch)
        engine.backward(output.loss if own_loss else engine.criterion(output, batch["labels"]))
        engine.step()
    engine.close()


def weights_of(model: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def by_hand(model: nn.Module, data: Batch, loss: Callable[[nn.Module, Batch], torch.Tensor]) -> Weights:
    """Plain torch, all samples of an update at once."""
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], LR)
    for update in range(UPDATES):
        optimizer.zero_grad()
        loss(model, {n: v[update * SAMPLES : (update + 1) * SAMPLES] for n, v in data.items()}).backward()
        optimizer.step()
    return weights_of(model)


def largest_difference(a: Weights, b: Weights) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


# -- batches of different lengths ------------------------------------------------------------------------------------


class Shortest:
    """Makes batches as long as their longest text, as transformers' DataCollatorWithPadding does."""

    def __init__(self) -> None:
        self.lengths: set[int] = set()

    def __call__(self, items: list[Batch]) -> Batch:
        length = max(int(item["attention_mask"].sum()) for item in items)
        self.lengths.add(length)
        return {n: torch.stack([i[n][:length] if i[n].dim() else i[n] for i in items]) for n in items[0]}


def lengths(rank: int, world_size: int, layout: str) -> tuple[set[int], float]:
    """Which lengths batches had, and how far the weights are from those that padding to one length gives."""
    name = "BERT, classification"
    subject, place = SUBJECTS[name], LAYOUTS[layout]
    model, collate = subject.make(), Shortest()
    loader = DataLoader(Samples(subject.data()), SAMPLES // place.data, collate_fn=collate)
    own = place.pipeline == 1
    engine = make_engine(name, layout, model, loader, None if own else subject.criterion)
    run(engine, own)
    expected = by_hand(subject.make(), subject.data(), lambda m, b: subject.criterion(call(m, b), b["labels"]))
    return collate.lengths, largest_difference(weights_of(model), expected)


# -- labels that do not count ----------------------------------------------------------------------------------------


def few_labels() -> Batch:
    """Two words of five have a label, and of every fifth text none."""
    data = text()
    counts = torch.rand(UPDATES * SAMPLES, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.4
    counts[::5] = False
    return {"input_ids": data["input_ids"], "labels": data["labels"].masked_fill(~counts, -100)}


def words_alike(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = output.logits.flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum()


def weighted(rank: int, world_size: int, layout: str, accumulation: int) -> float:
    """How far the weights are from those of one process, for which all words of an update are one mean."""
    name = "BERT, masked words"
    subject = SUBJECTS[name]
    model = subject.make()
    keys = {"loss_reduction": "weighted", "gradient_accumulation": accumulation}
    run(make_engine(name, layout, model, Samples(few_labels()), words_alike, **keys), own_loss=False)
    expected = by_hand(subject.make(), few_labels(), lambda m, b: subject.criterion(call(m, b), b["labels"]))
    return largest_difference(weights_of(model), expected)


# -- frozen ----------------------------------------------------------------------------------------------------------

TRAINED = ("layer.1.", "classifier", "blocks.1.", "head.", "layer4.", "fc.")


def freeze(model: nn.Module) -> nn.Module:
    """All but the last block and the head."""
    for name, param in model.named_parameters():
        param.requires_grad_(any(part in name for part in TRAINED))
    return model


def frozen(rank: int, world_size: int, name: str, layout: str) -> tuple[float, bool]:
    """How far the weights are from those of one process; whether those that train moved, and no others."""
    subject = SUBJECTS[name]
    model = freeze(subject.make())
    start = weights_of(model)
    run(make_engine(name, layout, model, Samples(subject.data()), subject.criterion), own_loss=False)
    expected = by_hand(freeze(subject.make()), subject.data(), lambda m, b: subject.criterion(call(m, b), b["labels"]))
    weights = weights_of(model)
    moved = {name for name, _ in model.named_parameters() if not torch.equal(weights[name], start[name])}
    return largest_difference(weights, expected), moved == {n for n, p in model.named_parameters() if p.requires_grad}


# -- dropout and recomputation ---------------------------------------------------------------------------------------


def _dropping_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": WORDS}
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2, bos_token_id=None, eos_token_id=None))


def recomputed(rank: int, world_size: int, layout: str, reentrant: bool) -> float:
    """How far transformers' gradient checkpointing is from none, with dropout."""
    found = []
    for checkpoints in (False, True):
        model = _dropping_gpt2()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        own = LAYOUTS[layout].pipeline == 1
        criterion = None if own else SUBJECTS["GPT-2"].criterion
        run(make_engine("GPT-2", layout, model, Samples(text()), criterion), own)
        found.append(weights_of(model))
    return largest_difference(*found)


def masks(rank: int, world_size: int, name: str) -> tuple[str, dict[str, torch.Tensor]]:
    """The weights under tensor=2 in short, and what each nn.Dropout dropped last."""
    import transformers as hf

    torch.manual_seed(0)
    if name == "T5":
        gated = {"feed_forward_proj": "gated-gelu"}  # whose output is zero where it is dropped only
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": WORDS}
        model = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **gated, dropout_rate=0.3, decoder_start_token_id=0))
    elif name == "GPT-2":
        model = _dropping_gpt2()
    else:
        config = SUBJECTS[name].make().config
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.3
        model = hf.BertForSequenceClassification(config)
    dropped: dict[str, torch.Tensor] = {}
    for part, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.register_forward_hook(lambda _, args, output, part=part: dropped.update({part: output == 0}))
    run(make_engine(name, "tensor", model, Samples(SUBJECTS[name].data())), own_loss=True)
    return digest(model.state_dict()), dropped


def drop_path(rank: int, world_size: int, layout: str) -> str:
    """timm's stochastic depth and dropout: the weights, in short. Ranks are compared on the way."""
    import timm

    torch.manual_seed(0)
    rates = dict.fromkeys(("drop_path_rate", "drop_rate", "proj_drop_rate", "attn_drop_rate"), 0.3)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 4}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, **rates)
    subject = SUBJECTS["timm ViT"]
    run(make_engine("timm ViT", layout, model, Samples(subject.data()), subject.criterion, debug="sync"), False)
    return digest(model.state_dict())


# -- checkpoints -----------------------------------------------------------------------------------------------------


def saved(rank: int, world_size: int, name: str) -> tuple[float, float]:
    """Saved under tensor=2, loaded under fsdp: how far the weights, and the optimizer's state, are apart then."""
    from safetensors.torch import load_file

    subject = SUBJECTS[name]
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    model, other = subject.make(), subject.make(seed=5)
    engine = make_engine(name, "tensor", model, Samples(subject.data()))
    for batch in list(engine.dataloader)[:2]:
        engine.zero_grad()
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.save(folder[0])
    engine.save_weights(f"{folder[0]}/weights.safetensors")
    engine.close()
    loading = make_engine(name, "fsdp", other, Samples(subject.data()))
    loading.load(folder[0])
    loading.close()
    expected = weights_of(model)
    file = load_file(f"{folder[0]}/weights.safetensors")
    apart = max(largest_difference(weights_of(other), expected), largest_difference(file, expected))
    return apart, max(_states_apart(model, engine.optimizer, other, loading.optimizer))


def _states_apart(a: nn.Module, of_a: optim.Optimizer, b: nn.Module, of_b: optim.Optimizer) -> Iterator[float]:
    for mine, theirs in zip(a.parameters(), b.parameters(), strict=True):
        one, two = of_a.state[mine]["momentum_buffer"], of_b.state[theirs]["momentum_buffer"]
        assert one.abs().max() > 0
        yield (one - two).abs().max().item()
