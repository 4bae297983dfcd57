"""What a run was: a folder that keeps it, and one HTML page that shows it.

run_files.py: the files of the folder. folder.py: `RunFolder` writes them. run.py: reads them.
tables.py, charts.py: what the page shows. page.py: the page, by the template page.html, with the vendored uplot/.
"""
