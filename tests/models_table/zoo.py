"""The models of the table: tiny ones of timm, torchvision and transformers, each with data and a loss.

None of them is downloaded: they are built with weights of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    data: Callable[..., Batch]  # of a seed; by name of the model's argument; `labels` among them
    criterion: Callable[[Any, torch.Tensor], torch.Tensor]  # called as criterion(output, labels)
    own_loss: bool = False  # whether the model takes `labels`, and returns a loss
    points: tuple[str, ...] = ()  # split points for two stages, if no partitioner knows the model
    rejected: Mapping[str, str] = field(default_factory=dict)  # what "tensor" or "pipeline" is rejected with
    # Modes in half precision, each with the layout that it is tried in. (With BatchNorm and ReLU over so few samples
    # rounding grows too fast to compare.)
    half: tuple[tuple[str, str], ...] = ()

    def make(self, seed: int = 0) -> nn.Module:
        """The model, with initial weights of its own for each seed."""
        torch.manual_seed(seed)
        return self.build()


# -- data and losses -------------------------------------------------------------------------------------------------


def images() -> Batch:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return {"x": torch.randn(SAMPLES, 3, IMAGE, IMAGE, generator=generator), "labels": labels}


def text(seed: int = 1) -> Batch:
    """Sequences that count on from a random word. Each word is a label, which causal models shift."""
    start = torch.randint(WORDS, (SAMPLES, 1), generator=torch.Generator().manual_seed(seed))
    words = (start + torch.arange(LENGTH)) % WORDS
    return {"input_ids": words, "labels": words}


def padded_text(seed: int = 1) -> Batch:
    """Texts of different lengths, padded on the right, with a class each: whether the first word is an even number."""
    words = text(seed)["input_ids"]
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SAMPLES, 1), generator=torch.Generator().manual_seed(seed))
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
    target = words.flip(1)
    begin = torch.zeros(len(words), 1, dtype=torch.long)
    return {"input_ids": words, "decoder_input_ids": torch.cat([begin, target[:, :-1]], 1), "labels": target}


def classify(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Of logits, or of a Hugging Face model's output, whose own loss it equals."""
    return F.cross_entropy(getattr(output, "logits", output), labels)


def per_word(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


def next_word(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


# -- models ----------------------------------------------------------------------------------------------------------


def _timm(name: str, **options: Any) -> nn.Module:
    import timm

    model = timm.create_model(name, num_classes=CLASSES, **options)
    return spread(model)


def spread(model: nn.Module) -> nn.Module:
    """With linear layers and scales of a size from which something is learnt within few updates."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        gamma = getattr(module, "gamma", None)
        if isinstance(gamma, nn.Parameter):
            nn.init.constant_(gamma, 0.5)
    return model


def timm_vit() -> nn.Module:
    sizes = {"img_size": IMAGE, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4}
    return _timm("vit_tiny_patch16_224", **sizes)


def timm_convnext() -> nn.Module:
    return _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))


def timm_resnet() -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, (1, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=8, output_stride=8, num_classes=CLASSES)


def torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=64)


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    sizes = {"patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 32}
    return spread(VisionTransformer(image_size=IMAGE, num_classes=CLASSES, **sizes))


def torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": [4, 4]}
    return spread(SwinTransformer(**sizes, stochastic_depth_prob=0.0, num_classes=CLASSES))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": WORDS}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drop, initializer_range=0.2))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2))


def _bert_config() -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(**sizes, **drop, vocab_size=WORDS, max_position_embeddings=LENGTH, initializer_range=0.2)


def bert_classifier() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert_config())


def bert_masked() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert_config())


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))


CONVOLUTIONS = "Convolutions cannot be sharded: if most of the model is convolutions, leave tensor at 1"
HALF = (("naive_fp16", "tensor"), ("naive_bf16", "pipeline"), ("torch_fp16", "data"))

LINEAR = "it is a Conv2d, but this style is for torch.nn.Linear"
NO_PARTITION = "no partitioner knows T5ForConditionalGeneration; split points do not work either"
RESNET: dict[str, Any] = {"points": ("layer3",), "rejected": {"tensor": CONVOLUTIONS}}
CONVNEXT: dict[str, Any] = {"points": ("stages.2",), "rejected": {"tensor": LINEAR}}
WORDY: dict[str, Any] = {"own_loss": True, "half": HALF}
T5_HALF = (("naive_fp16", "tensor"), ("naive_bf16", "fsdp"))

SUBJECTS = {
    "timm ViT": Subject(timm_vit, images, classify, half=HALF[:2]),
    "timm ConvNeXt": Subject(timm_convnext, images, classify, half=(("naive_fp16", "data"), HALF[1]), **CONVNEXT),
    "timm ResNet": Subject(timm_resnet, images, classify, **RESNET),
    "torchvision ResNet": Subject(torchvision_resnet, images, classify, **RESNET),
    "torchvision ViT": Subject(
        torchvision_vit, images, classify, points=("encoder.layers.encoder_layer_1",), half=HALF
    ),
    "torchvision Swin": Subject(torchvision_swin, images, classify, points=("features.3",), half=HALF),
    "GPT-2": Subject(gpt2, text, next_word, **WORDY),
    "Llama": Subject(llama, text, next_word, **WORDY),
    "BERT, classification": Subject(bert_classifier, padded_text, classify, **WORDY),
    "BERT, masked words": Subject(bert_masked, hidden_words, per_word, **WORDY),
    "T5": Subject(t5, translations, per_word, own_loss=True, rejected={"pipeline": NO_PARTITION}, half=T5_HALF),
}
