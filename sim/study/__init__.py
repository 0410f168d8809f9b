"""Many runs that answer one question: sweeps, searches for the best policy, maps of who wins where."""
