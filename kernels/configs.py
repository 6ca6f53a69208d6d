"""How the text of a config is read."""

import re


def matched(pattern: str, text: str, example: str, provider: str = "") -> re.Match[str]:
    """The match of a whole text; ValueError, with an example, for any other."""
    match = re.fullmatch(pattern, text)
    if match is None:
        of = f" of {provider}" if provider else ""
        raise ValueError(f"no config{of}: {text!r}; wanted such as {example!r}")
    return match
