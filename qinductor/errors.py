"""The exceptions of qinductor: each says what was given, what was wanted and what to do."""


class QinductorError(Exception):
    """Base of every error that qinductor raises on purpose."""


class OptionError(QinductorError, ValueError):
    """An option has an unknown name or a value it cannot take."""


class RequiredPatternError(QinductorError):
    """A pattern set to `require` left a candidate unlowered; the message holds the table."""


class Refused(Exception):
    """Internal: a check failed. `reason` is the sentence the report prints; it holds both values.

    `contract` is what the site was proved to compute, if that is known.
    """

    def __init__(self, reason: str, contract: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.contract = reason, contract
