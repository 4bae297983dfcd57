"""docs/fine-tuning.md: its scripts run with a folder in place of the hub, in one process and on two ranks."""

import contextlib
import io
import os
import re
from typing import Any

import pytest
import torch

import halfmesh
from tests.support.pages import find_blocks, read_page, snippet
from tests.support.ranks import run_ranks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]
NAME = "Qwen/Qwen3-0.6B"


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """A folder as of a model at the hub: a Llama with random weights, and a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    options = {"pad_token": "<pad>", "eos_token": "<eos>", "model_input_names": ["input_ids", "attention_mask"]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained("hub")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(words), **sizes))
    llama.save_pretrained("hub")


FINETUNE = snippet("fine-tuning.md", "finetune.py").replace(NAME, "hub")
GENERATE = snippet("fine-tuning.md", "generate.py").replace(NAME, "hub")


def execute(code: str, **names: Any) -> tuple[dict[str, Any], str]:
    """The names that it leaves, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return names, printed.getvalue()


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d: loss (\d+\.\d+)", printed)]


SHOWN = losses(find_blocks(read_page("fine-tuning.md"), "")[1])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(2, 34)[None]).logits


def fresh() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained("hub", dtype=torch.float32)


def test_in_one_process():
    names, printed = execute(FINETUNE)
    assert losses(printed) == pytest.approx(SHOWN, abs=0.03)
    expected = logits(names["model"])
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(fresh(), "adapter")), expected)
    names, printed = execute(GENERATE)
    assert printed.startswith("3 times 4 is")
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)


def tuned(rank: int, world_size: int, folder: str, old: str, new: str) -> Any:
    """What rank 0 prints, and the whole weights that were trained, with a change of the script."""
    assert old in FINETUNE
    code = FINETUNE.replace(old, new).replace("engine.close()", "weights = engine.full_state_dict()")
    with contextlib.chdir(folder):
        names, printed = execute(code)
    names["engine"].close()
    return losses(printed), names["weights"]


@pytest.mark.parametrize("change", [("batch_size=4", "batch_size=2"), ('data="fsdp"', "tensor=2")])
def test_on_two_ranks(change):
    """The updates of one process, and a folder with what was trained."""
    (printed, weights), (nothing, _) = run_ranks(tuned, 2, os.getcwd(), *change, timeout=120)
    assert printed == pytest.approx(SHOWN, abs=0.03)
    assert nothing == []
    whole = peft.get_peft_model(fresh(), peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    whole.load_state_dict({name: value for name, value in weights.items() if "lora_" in name}, strict=False)
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(fresh(), "adapter")), logits(whole))


def whole_model(rank: int, world_size: int, folder: str, code: str) -> float:
    """Train all weights of a model that was read in another way, for an update; its first loss."""
    given = {name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "AutoConfig")}
    row = {"input_ids": torch.arange(2, 10), "labels": torch.arange(2, 10)}
    given |= {"NAME": "hub", "snapshot_download": lambda name: name, "torch": torch, "halfmesh": halfmesh}
    given["dataloader"] = torch.utils.data.DataLoader([row] * 4, batch_size=2)
    given["config"] = {"parallel": {"data": "fsdp"}}
    with contextlib.chdir(folder), execute(code, **given)[0]["engine"] as engine:
        first = engine(**next(iter(engine.dataloader))).loss
        engine.backward(first)
        engine.step()
        engine.save_pretrained("tuned")
    return first.item()


RANK_ZERO, DEFERRED = snippet("fine-tuning.md", "rank_zero.py"), snippet("fine-tuning.md", "deferred.py")


@pytest.mark.promise("whole weights from a sharded model")
@pytest.mark.parametrize("code", [RANK_ZERO, DEFERRED], ids=["on rank 0", "deferred"])
def test_other_ways_to_read_the_weights(code):
    ids = torch.arange(2, 10)[None]
    expected = fresh()(input_ids=ids, labels=ids).loss.item()
    assert run_ranks(whole_model, 2, os.getcwd(), code, timeout=120) == pytest.approx([expected] * 2, rel=1e-5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    assert not torch.equal(loaded.lm_head.weight, fresh().lm_head.weight)
