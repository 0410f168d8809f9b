"""Acceptance rates of one request's drafted tokens, as files have them: numbers from 0 to 1."""

from traces.fields import Where

FIELD = "acceptance_rate"


def rate_of(value: str | float | None) -> float | None:
    """What a trace says of one request, None where nothing; ValueError where it is none."""
    if value is None or value == "":
        return None
    rate = float(value)
    if isinstance(value, bool) or not 0.0 <= rate <= 1.0:
        raise ValueError(FIELD)
    return rate


def check_rate(where: Where, value: object) -> float | None:
    """The same, with the error that names what is wrong with it."""
    if value is None or value == "":
        return None
    rate = where.number(FIELD, value)
    if not 0.0 <= rate <= 1.0:
        problem = "is not between 0 and 1"
        raise where.error(FIELD, value, problem, "write the chance that a drafted token is accepted, as 0.7")
    return rate
