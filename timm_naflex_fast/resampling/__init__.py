"""The maths of resampling: imports torch and nothing else of this package."""
