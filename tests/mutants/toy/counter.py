"""A module with few mutants, to test the tool with."""

LIMIT = 3


class Counter:
    """Counts up to the limit."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> bool:
        """Whether the amount fitted."""
        if self.value + amount > LIMIT:
            return False
        self.value += amount
        return True

    def describe(self) -> str:
        while self.value > 10:  # never, whatever the tests do
            self.value -= 1
        return f"{self.value} of {LIMIT}"
