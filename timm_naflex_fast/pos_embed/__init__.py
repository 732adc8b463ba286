"""Position embeddings: a table, resized to the grid of each picture, added to the tokens of a batch."""
