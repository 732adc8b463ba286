"""What a user measures: drift and speed."""
