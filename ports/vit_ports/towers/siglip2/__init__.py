"""SigLIP-2's image tower (NaFlex): its port in NumPy, and the lines of it that are known to be written wrong."""
