"""Faults put in on purpose, each with what has to see it: tests that turn red, or `halfmesh verify`, and where it says
the fault is. `table.py` has all of them; `python -m tests.faults_on_purpose.page` tries all, and writes the page."""
