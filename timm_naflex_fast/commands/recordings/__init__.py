"""What a port (a model written anew for another library) computes, and what it should compute."""
