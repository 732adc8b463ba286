"""What is timed and counted for the pages; measure.py is the command."""
