"""What several ranks import is imported once: by the server that they are forked from."""

from tests.support.ranks import PRELOAD

PRELOAD.extend(["timm", "torchvision"])
PRELOAD.extend(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert", "t5"))
