"""Many runs that answer one question: sweeps, searches for the best policy, maps of which policy wins where."""
