"""What flags may be: names that others use for them, ranges of their numbers, and policies."""
