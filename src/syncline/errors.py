"""The one exception type for a request that cannot be carried out."""


class UserError(ValueError):
    """What was asked for is wrong; the message says what was given, why it cannot be, and what to write instead.

    Commands turn it into one line on stderr and exit status 2. Broken invariants of our own are never a `UserError`.
    """

    def __init__(self, given: str, wrong: str, instead: str) -> None:
        self.given = given
        self.wrong = wrong
        self.instead = instead
        super().__init__(f"{given}: {wrong}. {instead}")
