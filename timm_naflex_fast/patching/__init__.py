"""Puts our functions on the classes of other libraries, and takes them off again."""
