"""Keys that the command line sets: as if they stood in the config's file."""

import pytest

import halfmesh
from halfmesh.cli.run import read_options

BASE = {"fp16": {"mode": "torch"}, "parallel": {"tensor": 2}, "clip_grad_norm": 1.0, "NUM_EPOCHS": 9}


@pytest.mark.parametrize(
    ("overrides", "equal"),
    [
        (["parallel.tensor=4"], {"parallel": {"tensor": 4}}),
        (["parallel.tensor.sequence_parallel=true"], {"parallel": {"tensor": {"size": 2, "sequence_parallel": True}}}),
        (["parallel.data=zero1"], {"parallel": {"tensor": 2, "data": "zero1"}}),
        (["parallel.pipeline={size: 2, microbatches: 4}"], {"parallel": {"tensor": 2, "pipeline": [2, 4]}}),
        (["fp16.mode=naive", "fp16.hysteresis=4"], {"fp16": {"mode": "naive", "hysteresis": 4}}),
        (["fp16=null", "bf16.mode=torch"], {"fp16": None, "bf16": {"mode": "torch"}}),
        (["clip_grad_norm.norm_type=inf"], {"clip_grad_norm": {"max_norm": 1.0, "norm_type": "inf"}}),
        (["NUM_EPOCHS=3", "LR=1e-3"], {"NUM_EPOCHS": 3, "LR": 1e-3}),
        (["seed=1", "seed=2"], {"seed": 2}),
    ],
)
def test_an_override_is_as_if_it_stood_in_the_config(overrides, equal, tmp_path):
    if "pipeline" in equal.get("parallel", {}):
        equal["parallel"]["pipeline"] = dict(zip(("size", "microbatches"), equal["parallel"]["pipeline"], strict=True))
    expected = halfmesh.load_config({**BASE, **equal})
    path = tmp_path / "config.py"
    path.write_text("\n".join(f"{key} = {value!r}" for key, value in BASE.items()))
    for source in (BASE, path, halfmesh.load_config(BASE)):
        assert halfmesh.load_config(source, overrides) == expected
    assert BASE["parallel"] == {"tensor": 2}  # the user's own dict stays as it was


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("paralel.tensor=2", r"paralel: unknown key; did you mean 'parallel'\?"),
        ("parallel.tensor=two", r"parallel.tensor: expected a whole number, got 'two'"),
        ("parallel.tensor", r"an override is key=value, such as"),
        ("bf16.mode=torch", r"fp16, bf16: a run has one precision"),
        ("fp16.mode={", r"is not valid YAML"),
        ("seed.a=1", r"seed is 3, which has no keys"),
    ],
)
def test_mistakes_are_told_as_those_in_a_file(override, message):
    with pytest.raises(halfmesh.ConfigError, match=message):
        halfmesh.load_config({**BASE, "seed": 3}, [override])


def test_the_parser_and_halfmesh_run_collect_them():
    words = ["--config", "a.py", "--set", "parallel.tensor=4", "--set=seed=7"]
    args = halfmesh.get_default_parser().parse_args(words)
    assert args.overrides == ["parallel.tensor=4", "seed=7"]
    assert read_options(["-v", *words, "--depth", "2", "--configs", "b.py"]) == ("a.py", args.overrides)
