"""What operators of a graph raise where they are run on probes that they do not take."""

FAILURES = (RuntimeError, IndexError, TypeError, ValueError)


def said(error: Exception) -> str:
    """The kind of an error, and the first line of what it says."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"
