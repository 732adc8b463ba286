"""Other ways to run the exact resampling: in compiled and exported graphs, on a GPU."""
