"""Records of a run in a folder, and an HTML page that shows them.

run.py: the files of the folder, and what they say. folder.py: `RunFolder` writes them.
tables.py: its tables. page.py: the page and its charts, from the template page.html and the vendored uplot/.
"""
