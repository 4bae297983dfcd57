"""What an update costs that can be counted: it finds what comparing results cannot. A table for each kind of count.

groups made, collectives and their sizes, requests to the store, files and calls, launches, bytes that are kept.
"""
