"""Records of a run in a folder, and an HTML page that shows them.

run_files.py: the files of the folder. folder.py: `RunFolder` writes them. run.py: reads them.
tables.py, charts.py: the contents of the page. page.py: the page, from the template page.html and the vendored uplot/.
"""
