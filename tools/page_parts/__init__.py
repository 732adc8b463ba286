"""What tools/pages.py puts into the pages.

- results.py reads result files, and tells where figures come from.
- race_tables.py: the tables of races.
- sections.py: the sentences and the other tables.
- interface.py: the public functions, for docs/api.md.
- pictures.py: graphs as SVG, drift as PNG.
- audit.py: what git and the tests say against the results.
"""
