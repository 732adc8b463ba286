"""The command ``vit-ports``: a file for each of its commands, and what they share."""
