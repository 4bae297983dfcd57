"""The models of the table: tiny ones of timm, torchvision and transformers, each with data and a loss.

None of them is downloaded: they are built with weights of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SAMPLES = 8
CLASSES = 4
WORDS = 32
LENGTH = 8
IMAGE = 32

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model, and how it is used."""

    build: Callable[[], nn.Module]
    data: Callable[[], Batch]  # by name of the model's argument; `labels` among them
    criterion: Callable[[Any, torch.Tensor], torch.Tensor]  # called as criterion(output, labels)
    own_loss: bool = False  # whether the model takes `labels`, and returns a loss
    points: tuple[str, ...] = ()  # split points for two stages, if no partitioner knows the model
    rejected: Mapping[str, str] = field(default_factory=dict)  # what "tensor" or "pipeline" is rejected with
    half: tuple[str, str] | None = None  # a mode in half precision, and the layout that it is tried in

    def make(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()


def images() -> Batch:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return {"x": torch.randn(SAMPLES, 3, IMAGE, IMAGE, generator=generator), "labels": labels}


def text() -> Batch:
    """Sequences that count on from a random word. Each word is a label, which causal models shift."""
    start = torch.randint(WORDS, (SAMPLES, 1), generator=torch.Generator().manual_seed(1))
    words = (start + torch.arange(LENGTH)) % WORDS
    return {"input_ids": words, "labels": words}


def padded_text() -> Batch:
    """Texts of different lengths, padded on the right, with a class each: whether the first word is an even number."""
    words = text()["input_ids"]
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SAMPLES, 1), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": words * mask, "attention_mask": mask, "labels": words[:, 0] % 2}


def hidden_words() -> Batch:
    """Texts in which every fourth word is hidden; only those have labels."""
    words = text()["input_ids"]
    hidden = (torch.arange(LENGTH) % 4 == 1).expand_as(words)
    return {"input_ids": words.masked_fill(hidden, 1), "labels": words.masked_fill(~hidden, -100)}


def translations() -> Batch:
    """Texts, and the same backwards: with the decoder's inputs, which begin with word 0."""
    words = text()["input_ids"]
    return {"input_ids": words, "decoder_input_ids": F.pad(words.flip(1)[:, :-1], (1, 0)), "labels": words.flip(1)}


def classify(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of logits, or of a Hugging Face model's output, whose own loss it equals."""
    return F.cross_entropy(getattr(output, "logits", output), labels)


def per_word(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def next_word(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def spread(model: nn.Module) -> nn.Module:
    """With linear layers and scales of a size from which something is learnt within few updates."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if isinstance(gamma := getattr(module, "gamma", None), nn.Parameter):
            nn.init.constant_(gamma, 0.5)
    return model


def _timm(name: str, **sizes: Any) -> nn.Module:
    import timm

    return spread(timm.create_model(name, num_classes=CLASSES, **sizes))


def timm_resnet() -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, (1, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=8, output_stride=8, num_classes=CLASSES)


def torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, [1, 1, 1, 1])
    model.layer4, model.fc = nn.Identity(), nn.Linear(256, CLASSES)  # which are large, and have no key for that
    return model


def _torchvision(name: str, **sizes: Any) -> nn.Module:
    from torchvision import models

    return spread(getattr(models, name)(num_classes=CLASSES, **sizes))


def _transformers(name: str, **sizes: Any) -> nn.Module:
    import transformers

    make = getattr(transformers, name)
    return make(make.config_class(vocab_size=WORDS, **sizes))


VIT = {"img_size": IMAGE, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4}
TV_VIT = {"image_size": IMAGE, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 32}
SWIN = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": [4, 4]}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "initializer_range": 0.2}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"bos_token_id": None, "eos_token_id": None}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": LENGTH, "initializer_range": 0.2}
BERT = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
timm_vit = partial(_timm, "vit_tiny_patch16_224", **VIT)
timm_convnext = partial(_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
torchvision_vit = partial(_torchvision, "VisionTransformer", **TV_VIT)
torchvision_swin = partial(_torchvision, "SwinTransformer", **SWIN, stochastic_depth_prob=0.0)
gpt2 = partial(_transformers, "GPT2LMHeadModel", **GPT2)
llama = partial(_transformers, "LlamaForCausalLM", **SIZES, num_key_value_heads=2)
bert_classifier = partial(_transformers, "BertForSequenceClassification", **BERT)
bert_masked = partial(_transformers, "BertForMaskedLM", **BERT)
t5 = partial(_transformers, "T5ForConditionalGeneration", **T5)
CONVOLUTIONS = "Convolutions cannot be sharded: if most of the model is convolutions, leave tensor at 1"
LINEAR = "it is a Conv2d, but this style is for torch.nn.Linear"
NO_PARTITION = "no partitioner knows T5ForConditionalGeneration; name the modules"
RESNET: dict[str, Any] = {"points": ("layer3",), "rejected": {"tensor": CONVOLUTIONS}}
CONVNEXT: dict[str, Any] = {"points": ("stages.2",), "rejected": {"tensor": LINEAR}}

SUBJECTS = {
    "timm ViT": Subject(timm_vit, images, classify, half=("naive_fp16", "tensor")),
    "timm ConvNeXt": Subject(timm_convnext, images, classify, half=("naive_bf16", "pipeline"), **CONVNEXT),
    "timm ResNet": Subject(timm_resnet, images, classify, **RESNET),
    "torchvision ResNet": Subject(torchvision_resnet, images, classify, **RESNET),
    "torchvision ViT": Subject(torchvision_vit, images, classify, points=("encoder.layers.encoder_layer_1",)),
    "torchvision Swin": Subject(torchvision_swin, images, classify, points=("features.3",)),
    "GPT-2": Subject(gpt2, text, next_word, True, half=("naive_bf16", "pipeline")),
    "Llama": Subject(llama, text, next_word, True, half=("torch_fp16", "data")),
    "BERT, classification": Subject(bert_classifier, padded_text, classify, True, half=("naive_fp16", "tensor")),
    "BERT, masked words": Subject(bert_masked, hidden_words, per_word, True),
    "T5": Subject(t5, translations, per_word, True, rejected={"pipeline": NO_PARTITION}, half=("naive_bf16", "fsdp")),
}
