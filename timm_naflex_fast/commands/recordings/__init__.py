"""What a port (a model written anew for another library) computes, and what it should compute."""

PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
