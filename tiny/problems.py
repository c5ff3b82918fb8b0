"""Arithmetic in two steps: the problems of the tiny run, their worked answers, and their split.

A problem is (a + b) * c, (a - b) * c, a * b + c or a * b - c over positive integers below 50, with a middle result
below 50 too. Train and test cannot overlap: which one a problem belongs to is a hash of its canonical form, and the
canonical form is the same for every commuted way to write it.
"""

import hashlib
from dataclasses import dataclass

LIMIT = 50  # of operands and of the middle result
TEST_SHARE = 8  # one problem in so many is held out
APPLY = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@dataclass(frozen=True)
class Expression:
    """`(a first b) second c` for first in + and -, `a * b second c` for first = *."""

    a: int
    first: str
    b: int
    second: str
    c: int

    def __str__(self):
        inner = f"{self.a}{self.first}{self.b}"
        return f"{inner}{self.second}{self.c}" if self.first == "*" else f"({inner}){self.second}{self.c}"

    def canonical(self):
        """One text for all commuted forms: operands of + and * in sorted order."""
        inner = _ordered(str(self.a), self.first, str(self.b))
        return _ordered(inner, self.second, str(self.c))

    def is_test(self):
        """Held out? A function of the canonical form alone."""
        return hashlib.sha256(self.canonical().encode()).digest()[0] % TEST_SHARE == 0

    def steps(self, slip=lambda value: value):
        """[(left, operator, right, result)] of both steps. `slip` may falsify a result; the next step builds on it."""
        middle = slip(APPLY[self.first](self.a, self.b))
        return [
            (self.a, self.first, self.b, middle),
            (middle, self.second, self.c, slip(APPLY[self.second](middle, self.c))),
        ]


def _ordered(left, operator, right):
    if operator != "-":
        left, right = sorted((left, right))
    return f"({left}{operator}{right})"


def draw(rng):
    """A random expression: sum, difference or product first, a third each; no negative results."""
    first, last = rng.choice("+-*"), LIMIT - 1
    while True:
        if first == "*":
            a = rng.randint(2, last // 2)
            expression = Expression(a, first, rng.randint(2, last // a), rng.choice("+-"), rng.randint(1, last))
        else:
            a = rng.randint(2, last - 1)
            b = rng.randint(1, last - a if first == "+" else a - 1)
            expression = Expression(a, first, b, "*", rng.randint(2, 9))
        if expression.steps()[-1][-1] >= 0:
            return expression


def draw_split(rng, test):
    """Endless expressions of one side of the split."""
    while True:
        expression = draw(rng)
        if expression.is_test() == test:
            yield expression


def distinct(expressions, count):
    """The first `count` of a stream that differ in canonical form."""
    chosen = {}
    while len(chosen) < count:
        expression = next(expressions)
        chosen.setdefault(expression.canonical(), expression)
    return list(chosen.values())


def worked(steps):
    """The steps as text, one a line."""
    return "\n".join(f"{left}{operator}{right}={result}" for left, operator, right, result in steps)


def demonstration(steps):
    """The completion that the model is shown: the steps, then the last result in a box."""
    return f"{worked(steps)}\n\\boxed{{{steps[-1][-1]}}}"


def row(expression):
    """The problem as a line of a GSM8K file."""
    steps = expression.steps()
    return {"question": str(expression), "answer": f"{worked(steps)}\n#### {steps[-1][-1]}"}


def careless(expression, rng, rate):
    """Steps in which every digit of a result is wrong with probability `rate`; what follows builds on the wrong value.

    The number of digits stays. A slip after which the next result would be negative is drawn again.
    """

    def slip(value):
        digits = list(str(value))
        for place, digit in enumerate(digits):
            if rng.random() < rate:
                lowest = "1" if place == 0 and len(digits) > 1 else "0"
                digits[place] = rng.choice([d for d in "0123456789" if d != digit and d >= lowest])
        return int("".join(digits))

    while True:
        steps = expression.steps(slip)
        if all(APPLY[operator](left, right) >= 0 for left, operator, right, _ in steps):
            return steps
