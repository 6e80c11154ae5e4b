"""Bytes as people count them."""

MIB = 2**20
GIB = 2**30


def gib(size: int) -> str:
    """Bytes as a person reads them, in GiB."""
    return f"{size / GIB:.2f}"
