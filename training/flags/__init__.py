"""Values and names of flags: ranges of numbers, policies, MLPerf's rules, and names of other programs."""
