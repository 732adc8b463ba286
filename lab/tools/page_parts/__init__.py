"""What lab/tools/pages.py puts into the pages.

- results.py reads result files, and tells where figures come from.
- races.py: the tables of times and counts.
- sections.py: the other tables, and the first screen.
"""
