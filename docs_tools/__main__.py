"""Writes all generated pages of docs/, and the list of public names: `python -m docs_tools`."""

from __future__ import annotations

from . import error_page, picture, public_names

for module in (picture, error_page, public_names):
    module.main()
