"""Errors of other code, quoted in a message of one line."""


def words(error: BaseException) -> str:
    """What the error says, in one line."""
    return " ".join(str(error).split())


def kind_and_words(error: BaseException, longest: int | None = None) -> str:
    """The error's class and what it says, in one line; at most ``longest`` characters of the latter."""
    return f"{type(error).__name__}: {words(error)[:longest]}"
