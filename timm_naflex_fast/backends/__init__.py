"""How a strategy's result is computed: in eager code, in compiled and exported graphs, on a GPU."""
