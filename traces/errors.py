"""The one exception a bad trace causes: its message is the whole of what the user sees."""


class TraceError(Exception):
    """Bad trace or workload: one line that names the file, the line, the field, the value and the remedy."""
