"""How long a step of a whole model takes in each mode, eager and compiled."""
