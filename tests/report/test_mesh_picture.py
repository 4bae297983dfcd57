"""The picture of a mesh: all axes, also those of others; what each rank holds; large meshes."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

import halfmesh
from halfmesh.options import Options
from halfmesh.parallel.axis import Axis
from halfmesh.report.mesh_picture import compress, describe_shards, draw


def words(svg):
    """The texts of a picture."""
    return [element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def wide():
    """An axis of a third party."""

    class WideOptions(Options):
        size: int = 1

    class Wide(Axis):
        dim = "wp"
        options = WideOptions

    halfmesh.AXES.register("wide", Wide)
    yield
    halfmesh.AXES.unregister("wide")


def config_of(**parallel):
    return halfmesh.Config.model_validate({"parallel": parallel})


def test_an_axis_of_others_appears_by_itself(wide):
    config = config_of(pipeline={"size": 2, "microbatches": 2}, tensor=2, wide=3, data="fsdp")
    dims = config.parallel.dims(24)
    assert describe_shards(config.parallel, dims, 23) == "tensor 2/2, wide 3/3, fsdp 2/2"
    drawn = words(draw(dims.sizes, lambda rank: []))
    assert drawn[0] == "24 ranks: pp 2 x dp 2 x wp 3 x tp 2 (10 are not drawn)"
    assert {"dp 1, wp 2, tp 1", "rank 23", "..."} <= set(drawn)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("replicate", ["", "", "", ""]),
        ({"strategy": "fsdp", "hybrid": 2}, ["fsdp 1/2", "fsdp 2/2", "fsdp 1/2", "fsdp 2/2"]),
    ],
)
def test_what_data_ranks_hold(data, expected):
    config = config_of(data=data)
    dims = config.parallel.dims(4)
    assert [describe_shards(config.parallel, dims, rank) for rank in range(4)] == expected


def test_a_rank_has_its_lines_and_its_node():
    svg = draw({"pp": 2, "dp": 1, "tp": 2}, lambda rank: [f"blocks.{rank} <&>", "", "1.0 GiB"], node=2)
    assert words(svg) == [
        "4 ranks: pp 2 x dp 1 x tp 2", "tp 0", "tp 1",
        "pp 0", "rank 0", "node 0", "blocks.0 <&>", "1.0 GiB", "rank 1", "node 0", "blocks.1 <&>", "1.0 GiB",
        "pp 1", "rank 2", "node 1", "blocks.2 <&>", "1.0 GiB", "rank 3", "node 1", "blocks.3 <&>", "1.0 GiB",
    ]  # fmt: skip
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.7", "head", "0", "1"]
    assert compress(names) == ["embed", "blocks.0-2", "blocks.7", "head", "0-1"]
