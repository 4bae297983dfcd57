"""How styles are read."""

from __future__ import annotations

import pytest
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.split import Split
from halfmesh.parallel.style import parse_style

MISTAKES = {
    "colwize": "no tensor style named 'colwize'; did you mean 'colwise'?; registered: ",
    "": "'' is not a style; write a name, or a name with arguments: 'fused_colwise(3)'",
    "fused_colwise(3": "'fused_colwise(3' is not a style; write a name",
    "fused colwise": "'fused colwise' is not a style; write a name",
    "fused_colwise": "the style 'fused_colwise' does not take these arguments: ",
    "fused_colwise(3, 4)": "the style 'fused_colwise(3, 4)' does not take these arguments: ",
    "fused_colwise(0)": "the style 'fused_colwise(0)' does not take these arguments: 0 projections cannot be fused",
    "fused_colwise(three)": "the style 'fused_colwise(three)' does not take these arguments: invalid literal",
    "rowwise(2)": "the style 'rowwise(2)' does not take these arguments: ",
    "colwise(3)": "the style 'colwise(3)' does not take these arguments: ",
    "vocab(2)": "the style 'vocab(2)' does not take these arguments: ",
    "config_heads": "the style 'config_heads' does not take these arguments: ",
    "attention(2)": "the style 'attention(2)' does not take these arguments: ",
    "colwise_gather(2)": "the style 'colwise_gather(2)' does not take these arguments: ",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_a_style(text):
    with pytest.raises(InputError) as error:
        parse_style(text)
    assert str(error.value).startswith(MISTAKES[text])


def test_styles_are_read_without_care_for_space_and_case():
    style = parse_style("  Fused_Colwise( 3 ) ")
    assert style.splits(nn.Linear(4, 6)) == {"weight": Split(0, 3), "bias": Split(0, 3)}
    assert parse_style("heads( num_heads ,attn_dim )").attributes == ("num_heads", "attn_dim")
    assert parse_style("heads()").attributes == parse_style("heads").attributes == ()
