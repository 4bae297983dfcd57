"""What several ranks import is imported once: by the server that they are forked from."""

from tests.support.ranks import PRELOAD

PRELOAD.extend(["timm.models.vision_transformer", "transformers.models.llama.modeling_llama"])
