"""What can go wrong: the user's input, or ourselves."""


class UserError(Exception):
    """Bad input: one line that names the file, the field, the value and the remedy. The CLI prints it and exits 2."""


class InvariantError(Exception):
    """A conservation law was broken: a bug in the program, never the user's doing."""
