"""Writes all generated pages of docs/: `python -m docs_tools`."""

from __future__ import annotations

from . import picture, speed_table

for module in (picture, speed_table):
    module.main()
