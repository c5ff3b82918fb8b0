"""Whether two cleaned answers mean the same, decided by a parser and sympy: the child process of grader.py.

A question is a line of JSON, [prediction, reference, whole]; the answer is "right", "wrong", "unparsable", or "timeout"
past the limits. It is a process of its own because some questions have no end. The trees of the parser become sympy
objects call by call: nothing here evaluates text.

What is tried depends on no machine: it is decided by sizes and, for the proofs of sympy, by a number of function calls,
counted on empty caches and with fixed hashes. The CPU limit of grader.py is for what they fail to foresee.
"""

import json
import math
import re
import resource
import signal
import sys

import sympy
from sympy.core.cache import clear_cache
from sympy.polys.fields import sfield

from grader import CHILD_BYTES, CPU_SECONDS, FUNCTIONS, MAX_BITS, MAX_FACTORIAL, REGIONS, clean, parse

MAX_CALLS = 50_000       # of Python functions in the proofs of one question: 0.08 s
MAX_TERMS = 1000         # of an expanded power of a sum
MAX_PROOF_BITS = 3000    # of the bound that proves a number to be zero
MAX_ROOT_BITS = 500      # of a number under a root: sympy looks for its factors
MAX_ROOTS, MAX_PARTS = 24, 12  # powers within a power, parts of a union
_FORGIVEN = {"percent": ("n", "1/100"), "degree": ("*", ("v", "pi"), ("n", "1/180"))}
_SYMPY = {"+": "Add", "*": "Mul", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "abs": "Abs", "ln": "log",
          "binom": "binomial", "factorial": "factorial", "floor": "floor"}
_TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc"}
_LIST = re.compile(r"(?<![\d.])\d{1,3}(?:,[1-9]\d\d)+(?!\d)")  # may be two numbers as well as one; 1,000 may not
_INFINITE = (sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)
_WARM_UP = ((r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"), (r"1+\tan^2 x", r"\sec^2 x"),  # sympy imports parts of itself late
            (r"(0,2)\setminus\{1\}", r"(0,1)\cup(1,2)"), (r"\cos(\infty)", r"\lfloor |x| \rfloor"),
            (r"\frac{(n+1)!}{n!}", "n+1"), (r"\ln x^2", r"2\ln x"))


_PROOFS = (  # what may turn a difference with such parts into 0
    ((sympy.Basic,), lambda d: sfield(d)[1]),
    ((sympy.log,), lambda d: sfield(sympy.expand_log(d, factor=True))[1]),
    ([getattr(sympy, name) for name in (*_TRIGONOMETRIC, "sinh", "cosh", "tanh")],
     lambda d: sympy.expand(sympy.numer(sympy.together(d.rewrite(sympy.exp))))),
    ((sympy.factorial, sympy.binomial), sympy.combsimp),
    ((sympy.Pow, sympy.exp), lambda d: sympy.powsimp(sympy.expand(d))),
    ((sympy.Basic,), sympy.simplify))


class TooCostly(BaseException):
    """A limit forbids the proof. Not an Exception: sympy catches those."""


class Meaning:
    """Whether two trees mean the same, the first of a prediction, the second of a reference."""

    def __init__(self):
        self.constants = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo}

    def reason(self, prediction, gold, whole):
        """whole: the prediction is of a completion. It may show its work and end with "= value", not add a base."""
        self.whole, self.calls = whole, 0
        x, y = _choice(prediction), _choice(gold)
        if x and y and "" in (x[1], y[1]):
            return "right" if x[0] == y[0] else "wrong"
        left, right = ([tree for tree in (parse(text), _LIST.search(text) and parse(text, False)) if tree]
                       for text in (prediction, gold))
        if not left or not right:
            return "unparsable"
        if whole and left[0][:2] == ("rel", "=") and right[0][0] != "rel" and (
                left[0][2][0] in ("^", "f") or _combination(left[0][2])):
            left.append(left[0][3])
        left, right = (list(map(self.radians, trees)) for trees in (left, right))
        try:
            return "right" if any(self.same(a, b) for a in left for b in right) else "wrong"
        except TooCostly:
            return "timeout"

    def same(self, a, b):
        a, b = (self.spread(x, y) if y[0] == "list" else x for x, y in ((a, b), (b, a)))
        if a == b or isinstance(a, str) or isinstance(b, str):
            return a == b
        if a[0] == b[0] == "rel":
            for x, y in ((a, b), (b, a)):
                if x[1] == "∈" != y[1] and x[2] in y[2:]:  # the same name: x in [2, 3] and 2 <= x <= 3
                    return self.same(x[3], self.plain(y))
            return self.matched(*(list(zip(x[1], x[2:], x[3:])) for x in (a, b)), self.same_link)
        kinds = {a[0], b[0]}
        if kinds <= {"list", "and", "or"} and len(kinds & {"and", "or"}) == 1 and self.matched(a[1:], b[1:], self.same):
            return True
        if len(self.subjects(a) | self.subjects(b)) > 1:
            return False
        a, b = self.plain(a), self.plain(b)
        a, b = (x[2] if x[:1] == ("*",) and y[0] == x[2][0] == "tuple" and x[1][0] == "v" and x[1][1].isupper() else x
                for x, y in ((a, b), (b, a)))  # the point P(1, 2), but C(5, 2) is not P(5, 2)
        if {a[0], b[0]} & set(REGIONS.values()) or ("v", "bbR") in (a, b):
            return self.region(a) == self.region(b)
        if a[0] == b[0] == "list":
            return self.matched(a[1:], b[1:], self.same)
        if a[0] == b[0] and a[0] in ("tuple", "matrix", "ratio"):
            return len(a) == len(b) and all(map(self.same, a[1:], b[1:]))
        u, v = self.units(a) - set(_FORGIVEN), self.units(b) - set(_FORGIVEN)
        return not (u and v and u != v) and any(
            self.equal(x, y) for x in self.readings(a, b, self.whole) for y in self.readings(b, a))

    def matched(self, left, right, same):  # every item has its own partner on the other side, in any order
        if len(left) != len(right):
            return False
        right = list(right)
        for item in left:
            partner = item if item in right else next((other for other in right if same(item, other)), None)
            if partner is None:
                return False
            right.remove(partner)
        return True

    def spread(self, node, other):  # (f, g) = (1, 2) as the list f = 1, g = 2; so is (1, 2) against x = 1, y = 2
        if node[:2] == ("tuple", "(") and all(x[:2] == ("rel", "=") and self.named(x[2]) for x in other[1:]):
            names, values = sorted([x[2] for x in other[1:]], key=repr), node[3:]
        elif node[:2] == ("rel", "=") and node[2][0] == node[3][0] == "tuple":
            names, values = node[2][3:], node[3][3:]
        else:
            return node
        equations = ("list", *(("rel", "=", name, value) for name, value in zip(names, values)))
        return equations if len(names) == len(values) else node

    def named(self, node):  # x, f(x), AB, (p, q), words: what an equation may define. x^2, 2x or e are not names
        if node[0] in ("*", "tuple"):
            return all(self.named(x) and (node[0] != "*" or x[0] == "*" or x[1][0].isupper() or len(x[1]) > 4)
                       for x in node[1 if node[0] == "*" else 3:])
        return (node[0] == "text" or node[0] == "v" and node[1] not in self.constants
                or node[0] == "f" and node[1].startswith(("function ", "over", "vec")))

    def subjects(self, node):  # the names that inequalities are about: x > 0 and y > 0 is no interval
        if node[0] in ("and", "or"):
            return set().union(*map(self.subjects, node[1:]))
        about = node[0] == "rel" and set(node[1]) & set("<>≤≥≠")
        return {side for side in node[2:] if self.named(side)} if about else set()

    def plain(self, node):  # 5 of x = 5, 1/3 of 1/3 = 0.33, the interval of x < 5 and {x | x < 5}, {3k | k in Z}
        if node in (("v", "emptyset"), ("v", "varnothing")):
            return ("list",)
        if node[0] == "list" and node[2:3] == ("|",) and len(node) in (4, 5):
            head = node[1][2] if node[1][:2] == ("rel", "∈") and node[1][3] == ("v", "bbR") else node[1]
            definition = next((x for x in node[3:] if x[:3] == ("rel", "=", head)), None)
            if definition:
                return ("list", definition[3], "|", *(x for x in node[3:] if x is not definition))
            solved = self.plain(node[3])
            return solved if len(node) == 4 and head in node[3] and solved[0] in ("tuple", "Complement") else node
        if node[0] == "rel" and set(node[1]) <= set("=∈≈"):
            return self.defined(node)
        if node[:2] == ("rel", "≠") and self.named(node[2]):
            return ("Complement", ("v", "bbR"), node[3])
        if node[0] in ("and", "or"):
            joined, *rest = map(self.plain, node[1:])
            for other in rest:
                joined = ("Intersection" if node[0] == "and" else "Union", joined, other)
            return joined
        return self.scaled(node) if node[0] == "*" else self.interval(node)

    def defined(self, node):  # the value of x = 5, 5 = x, x = 1/3 = 0.33 and 1/3 ≈ 0.33
        if self.named(node[2]):
            return self.plain(node[-2 if "≈" in node[1][1:] else -1])
        if node[1] == "≈":
            x, y = map(self.value, node[2:])
            return node if (abs(x - y) > abs(x) / 20) == True else node[2]  # noqa: E712
        return node[2] if node[1] == "=" and self.named(node[3]) else node

    def scaled(self, node):  # a number times a matrix
        left, right = node[1], self.plain(node[2])
        if right[0] == "matrix" and left[0] != "matrix":
            return ("matrix", *(x if isinstance(x, str) else ("*", left, x) for x in right[1:]))
        return node

    def interval(self, node):  # an inequality between a name and constants as an interval, others as they are
        if node[0] != "rel" or not set(node[1]) <= set("<≤") and not set(node[1]) <= set(">≥"):
            return node
        turned = node[1][0] in ">≥"
        signs = node[1][::-1].translate({ord(">"): "<", ord("≥"): "≤"}) if turned else node[1]
        sides = node[:1:-1] if turned else node[2:]
        at = [i for i, side in enumerate(sides) if self.named(side)]
        if len(sides) == 2 and at == [0]:
            signs, sides = "<" + signs, (("*", ("n", "-1"), ("v", "infty")), *sides)
        elif len(sides) == 2 and at == [1]:
            signs, sides = signs + "<", (*sides, ("v", "infty"))
        elif len(sides) != 3 or at != [1]:
            return node
        return ("tuple", "[" if signs[0] == "≤" else "(", "]" if signs[1] == "≤" else ")", sides[0], sides[2])

    def readings(self, node, other, bases=False):  # 28% is 28 and 0.28, 90 degrees 90 and pi/2, 5 cm 5 where the other
        units = self.units(node)                   # has no unit. bases: those are not left out
        exact = self.replaced(node, _FORGIVEN)
        bare = self.replaced(node, {u: ("n", "1") for u in units if not (bases and u.startswith("base "))})
        return [node] + [exact] * (node != exact) + [bare] * (node != bare and not self.units(other))

    def units(self, node):
        return {node[1]} if node[0] == "u" else {u for x in node if isinstance(x, tuple) for u in self.units(x)}

    def replaced(self, node, values):
        return values.get(node[1], node) if node[0] == "u" else tuple(
            self.replaced(x, values) if isinstance(x, tuple) else x for x in node)

    def radians(self, node):  # sin 30° is never sin 30
        if node[0] == "f" and node[1] in _TRIGONOMETRIC:
            return self.replaced(node, _FORGIVEN)
        return tuple(self.radians(x) if isinstance(x, tuple) else x for x in node)

    def region(self, node):  # unions, differences, intervals and points as sets of real numbers
        if node[0] in REGIONS.values():
            parts = list(map(self.region, self.joined(node, node[0])))
            if len(parts) > MAX_PARTS:
                raise TooCostly
            return sympy.Complement(*parts) if node[0] == "Complement" else getattr(sympy, node[0])(*parts)
        if node[0] == "tuple" and len(node) == 5:
            return sympy.Interval(*map(self.value, node[3:]), node[1] == "(", node[2] == ")")
        if node[0] == "list" and not any(x[0] == "tuple" for x in node):  # (0, 1), (2, 3) are points
            return sympy.Union(*(self.region(self.plain(x)) for x in node[1:]))
        return sympy.S.Reals if node == ("v", "bbR") else sympy.FiniteSet(self.value(node))

    def joined(self, node, kind):  # A, B, C of the union of A and B and C
        nested = kind != "Complement" and node[1][0] == kind
        return [*(self.joined(node[1], kind) if nested else (node[1],)), node[2]]

    def same_link(self, a, b):  # equations up to a factor, inequalities up to a positive one, other things side by side
        turn = {">": "<", "≥": "≤"}
        (s, *x), (t, *y) = ((turn.get(c, c), *(sides[::-1] if c in turn else sides)) for c, *sides in (a, b))
        try:
            (p, q), (u, v) = (map(self.value, sides) for sides in (x, y))
            ratio = self.limited(lambda: sympy.cancel((p - q) / (u - v)))
            return s == t and ratio.is_number and ratio.is_finite and (
                ratio.is_positive or s in "=≠" and ratio.is_nonzero)
        except (ValueError, sympy.PolynomialError):
            return s == t and (all(map(self.same, x, y)) or s in "=≠" and all(map(self.same, x, y[::-1])))

    def value(self, node):  # the sympy expression of a tree; ValueError for structures and beyond the limits
        kind, *rest = node
        if kind == "n":
            return sympy.Rational(*map(int, rest[0].split("/")))
        if kind in ("v", "u"):
            return self.constants.get(rest[0]) or sympy.Symbol(rest[0], real=None if rest[0] in ("z", "w") else True)
        if kind not in ("f", "+", "*", "^"):
            raise ValueError(kind)
        name, parts = rest.pop(0) if kind == "f" else kind, [self.value(x) for x in rest]
        n = MAX_FACTORIAL if parts[0].is_Integer else 30  # of x over 30 sympy makes a product
        if name in ("factorial", "binom") and any(x.is_number and not (x.is_Integer and 0 <= x <= n) for x in parts):
            raise ValueError("too large")
        if name in ("^", "sqrt"):
            return self.power(parts[0], parts[1] if name == "^" else 1 / (parts + [sympy.Integer(2)])[1])
        if name == "frac":
            return parts[0] / parts[1]
        if name == "exp":
            return self.power(sympy.E, parts[0])
        turns = parts[0] / sympy.pi
        if name in _TRIGONOMETRIC and turns.is_Rational and turns.q not in (1, 2, 3, 4, 5, 6, 8, 10, 12):
            return getattr(sympy, name)(parts[0], evaluate=False)  # as radicals the others are long
        integers = name not in ("gcd", "lcm") or all(x.is_Integer for x in parts)  # of polynomials they are others
        if integers and (name in _SYMPY or name in FUNCTIONS or name == "ceiling"):
            return getattr(sympy, _SYMPY.get(name, name))(*parts)
        parts = parts if integers else sorted(parts, key=str)
        return sympy.Symbol(f"{name}{[sympy.expand(x) for x in parts]}", real=True)  # f(x): known by its argument only

    def power(self, base, exponent):
        size = max(base.p.bit_length(), base.q.bit_length()) if base.is_Rational else 8
        large = exponent.is_number and abs(exponent.evalf(5)) * size > MAX_BITS and abs(base) != 1
        roots = base.atoms(sympy.Pow, sympy.exp) | exponent.atoms(sympy.Pow, sympy.exp)
        tower = sum(not part.exp.is_Rational for part in exponent.atoms(sympy.Pow, sympy.exp)) > 1
        if large or tower or len(roots) > MAX_ROOTS or exponent.is_Rational and exponent.q > 1 and size > MAX_ROOT_BITS:
            raise ValueError("too large")
        if base.is_Add and base.free_symbols and exponent.is_Integer:
            others = len(base.args) - 1
            if math.comb(others + min(abs(int(exponent)), MAX_TERMS), others) > MAX_TERMS:
                raise TooCostly
        if exponent.is_Rational and exponent.q % 2 and exponent.q > 1 and base.is_negative:
            return (-1) ** exponent.p * (-base) ** exponent  # the real root of a negative number
        return base ** exponent

    def equal(self, a, b):  # is the difference provably zero? refuted by numbers or proved by ever costlier rewriting
        if a == b or {a[0], b[0]} - set("nvu+*^f"):
            return a == b
        x, y = self.value(a), self.value(b)
        difference = x - y
        if x == y or difference.has(*_INFINITE) or x.has(*_INFINITE):
            return x == y and not x.has(*_INFINITE)
        if not difference.free_symbols:
            zero = vanishes(difference) if not self.refuted(difference) else False
            if zero is not None:
                return zero
        positive = {part.args[0]: sympy.Dummy(positive=True) for part in difference.atoms(sympy.Pow, sympy.log)
                    if part.args[0].is_Symbol and (not part.is_Pow or part.exp.is_Rational and part.exp.q % 2 == 0)}
        difference = difference.subs(positive)  # under an even root or in a logarithm
        return not self.refuted(difference) and self.proved(difference)

    def refuted(self, difference):  # by its value at a point
        symbols = sorted(difference.free_symbols, key=str)
        for shift in (3, -5, 8) if symbols else (0,):
            point = {x: sympy.Rational(7 * (abs(shift) if x.is_positive else shift) + 2 * k, 10 + k)
                     for k, x in enumerate(symbols)}
            costly = difference.has(sympy.binomial)  # it becomes a product at times
            value = self.limited(lambda: difference.evalf(15, subs=point, maxn=80), costly)
            if value.is_number and value.is_finite and abs(value) > 1e-30:
                return True
        return False

    def proved(self, difference):
        clear_cache()  # the number of calls must not depend on earlier questions
        return any(self.limited(lambda: step(difference)) == 0 for kinds, step in _PROOFS if difference.has(*kinds))

    def limited(self, work, costly=True):  # counted in calls, which no other load on the machine changes
        def count(frame, event, argument):
            self.calls += 1
            if self.calls > MAX_CALLS:
                raise TooCostly

        sys.settrace(count if costly else None)
        try:
            result = work()
        finally:
            sys.settrace(None)
        if self.calls > MAX_CALLS:  # raised where Python ignores it: in a generator that is thrown away
            raise TooCostly
        return result


_CHOICE = re.compile(r"\(([A-Z])\) ?([^\s+\-*/^=<>_,;&|!.:)].*)?|([A-Z])(?:\)|[.:)] (\S.*))?", re.S)
_ANOTHER_CHOICE = re.compile(r"(?<![A-Za-z])\([A-Z]\)|\b(?:or|and) \(?[A-Z]\b|^[A-Z]\)")


def _choice(cleaned):  # letter and text of (B) with or without the text of the option; None for several options
    match = _CHOICE.fullmatch(re.sub(r"[ $]+", " ", cleaned.replace('"', "")).strip())
    rest = match and (match[2] or match[4] or "")
    return None if match is None or _ANOTHER_CHOICE.search(rest) else (match[1] or match[3], rest)


def _combination(node):  # x + y, xy: where "find x + y" ends with x + y = 12
    return node[0] in ("+", "*") and all(x[0] == "v" or _combination(x) for x in node[1:])


def height(number, fields):
    """(u, l) of an algebraic number U/L, as binary logarithms: no conjugate of the algebraic integers U, L is larger.

    fields collects the degrees of what generates its field: radicands, roots of unity. ValueError for other numbers.
    The rules are those of Burnikel, Funke, Mehlhorn, Schirra and Schmitt (2001).
    """
    if number.is_Rational:
        return max(abs(number.p), 1).bit_length(), number.q.bit_length() - (number.q == 1)
    if number is sympy.I or type(number).__name__ in _TRIGONOMETRIC | {"exp"}:
        turns = sympy.log(number) / sympy.I / sympy.pi if number is sympy.I or number.func is sympy.exp else (
            number.args[0] / sympy.pi)
        if not turns.is_Rational:
            raise ValueError("transcendental")
        fields[1] = math.lcm(fields.get(1, 1), 4, 2 * turns.q)
        return 1, 1
    if number.is_Add or number.is_Mul:
        u, l = 0, 0  # noqa: E741
        for n, d in (height(part, fields) for part in number.args):
            u, l = u + n if number.is_Mul else max(u + d, n + l) + 1, l + d  # noqa: E741
        return u, l
    if not (number.is_Pow and number.exp.is_Rational):
        raise ValueError("not algebraic")
    (u, l), p, q = height(number.base, fields), number.exp.p, number.exp.q  # noqa: E741
    if q > 1:
        fields[number.base] = math.lcm(fields.get(number.base, 1), q)
        u, l = ((u + (q - 1) * l) / q, l) if u >= l else (u, ((q - 1) * u + l) / q)  # noqa: E741
    return (u * p, l * p) if p > 0 else (-l * p, -u * p)


def vanishes(number):
    """Is this number zero? An exact proof: an algebraic one that is not is larger than a bound. None for others."""
    fields = {}
    try:
        u, l = height(number, fields)  # noqa: E741
    except ValueError:
        return None
    bits = int((math.prod(fields.values()) - 1) * u + l) + 2
    if bits > MAX_PROOF_BITS:
        raise TooCostly
    return bool(abs(number.evalf(bits // 3 + 50, maxn=bits // 2 + 60)) < sympy.Rational(1, 2 ** bits))


def main():
    """A question a line until the input ends. The kernel ends the process when one exceeds its CPU time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    meaning = Meaning()
    for prediction, gold in _WARM_UP:
        meaning.reason(clean(prediction), clean(gold), True)
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            answer = meaning.reason(*json.loads(line))
        except (MemoryError, RecursionError):
            answer = None  # what is left of its memory is unknown: the parent ends it
        except Exception:
            answer = "wrong"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
