"""Writes all generated pages of docs/, and the list of public names: `python -m docs_tools`."""

from __future__ import annotations

from . import picture, public_names

for module in (picture, public_names):
    module.main()
