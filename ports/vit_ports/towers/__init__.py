"""The image towers that are known: a folder for each."""
