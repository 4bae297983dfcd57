"""The picture of the mesh: what is in it, and that it is one."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from halfmesh.compat import get_layout
from halfmesh.config.load import load_config
from halfmesh.errors import InputError
from halfmesh.plan.dry_run import DryRun
from halfmesh.plan.holdings import block_of, compress, find_holdings
from halfmesh.plan.picture import draw, make_grid, refuse_path
from halfmesh.plan.rehearsal import Figures
from tests.support.llama import SMALL
from tests.support.ranks import run_ranks

KEYS = {"parallel": {"tensor": 2, "pipeline": {"size": 2, "microbatches": 4}, "data": "zero1"}}
CHUNKS = {"parallel": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2}}}


def held(rank, world_size, keys):
    from torch import optim

    import halfmesh
    from tests.support import llama

    model, _, criterion = llama.small()
    engine = halfmesh.initialize(model, optim.AdamW, criterion, config=keys, device="cpu")
    names = dict.fromkeys(block_of(name) for name, _ in engine.model.named_parameters())
    return engine.context.pp_rank, list(names)


def test_blocks_are_those_of_a_run():
    said = find_holdings(load_config(CHUNKS), SMALL)
    assert compress(said[0]) == ["tokens", "blocks.0", "blocks.2"]
    for stage, names in run_ranks(held, 2, CHUNKS):
        assert sorted(said[stage]) == sorted(names)


def planned(config):
    """As if a dry run had found this."""
    figures = {0: Figures({}, 0, 3 * 2**20, 1), 4: Figures({}, 0, 2 * 2**20, 1)}
    return DryRun(get_layout(config, 8), ranks=figures)


def test_what_a_rank_is_said_to_have():
    config = load_config(KEYS)
    run = planned(config)
    grid = make_grid(config, run, find_holdings(config, SMALL), node=4)
    assert grid.title == "8 ranks: pp 2 x dp 2 x tp 2"
    assert grid.columns == ["dp 0, tp 0", "dp 0, tp 1", "dp 1, tp 0", "dp 1, tp 1"]
    cell = grid.cells[1][2]
    assert (cell.rank, cell.node) == (6, 1)
    names, part, size = cell.lines
    assert names == "blocks.2-3, norm, head"
    assert part == "tensor 1/2, zero1 2/2"
    assert size == "2.0 MiB"


def test_large_meshes_say_what_is_left_out():
    config = load_config({"parallel": {"tensor": 8, "pipeline": {"size": 16, "microbatches": 16}}})
    grid = make_grid(config, DryRun(get_layout(config, 1024)), [[f"blocks.{n}"] for n in range(16)])
    assert grid.title == "1,024 ranks: pp 16 x dp 8 x tp 8 (... stands for 975 ranks that are not drawn)"
    assert grid.rows == ["pp 0", "pp 1", "pp 2", "pp 3", "pp 4", "pp 5", "...", "pp 15"]
    assert grid.cells[-1][-1].rank == 1023
    assert grid.cells[6][0] is None


def test_names_in_short():
    names = ["tokens", "blocks.0", "blocks.1", "blocks.4", "norm", "3", "4"]
    assert compress(names) == ["tokens", "blocks.0-1", "blocks.4", "norm", "3-4"]
    assert block_of("encoder.layers.3.attention.q.weight") == "encoder.layers.3"
    assert block_of("head.weight") == "head"


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    config = load_config(KEYS)
    run = planned(config)
    draw(tmp_path / "mesh.png", config, run, SMALL, node=4)
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    for name in ("one.svg", "two.svg"):
        draw(tmp_path / name, config, run, SMALL, node=4)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
    texts = {text.strip() for text in ElementTree.parse(tmp_path / "one.svg").getroot().itertext()}
    assert {"rank 7", "node 1", "blocks.2-3, norm, head", "tensor 2/2, zero1 1/2", "pp 1"} <= texts


def test_what_is_no_picture(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"a name that ends in \.png or \.svg says the format"):
        refuse_path(tmp_path / "mesh.pdf", False)
    with pytest.raises(InputError, match="there is no directory"):
        refuse_path(tmp_path / "none" / "mesh.png", False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"matplotlib draws it, and cannot be imported .*pip install matplotlib"):
        refuse_path(tmp_path / "mesh.png", False)
