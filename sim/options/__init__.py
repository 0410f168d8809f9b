"""Options of a run and of policies: what they are, and how flags and files give them."""
