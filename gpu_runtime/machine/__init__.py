"""What this machine allows a live run: memory, threads, iterations scheduled ahead."""
