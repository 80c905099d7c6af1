"""Values and names of flags: ranges of numbers, policies, and the names that other programs use."""
