"""The one exception a user may cause: its message is the whole of what they see."""


class UserError(Exception):
    """Bad input: one line that names the file, the field, the value and the remedy. The CLI prints it and exits 2."""
