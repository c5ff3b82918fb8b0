"""Whether two parsed answers mean the same, decided by sympy: the child process of grader.py.

A question is a line of JSON, two lists of trees; the answer is true where any of the first means any of the second,
null past the memory limit. It is a process of its own because some questions have no end. The trees become sympy
objects call by call: nothing here parses or evaluates text.
"""

import json
import resource
import signal
import sys

import sympy

from grader import CHILD_BYTES, CPU_SECONDS, FUNCTIONS, MAX_BITS, MAX_FACTORIAL, REGIONS, clean, parse

_FORGIVEN = {"percent": ["n", "1/100"], "degree": ["*", ["v", "pi"], ["n", "1/180"]]}
_SYMPY = {"+": "Add", "*": "Mul", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "abs": "Abs", "ln": "log",
          "binom": "binomial", "factorial": "factorial", "floor": "floor"}
_WARM_UP = ((r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"), (r"1+\tan^2 x", r"\sec^2 x"),  # sympy imports parts of itself late
            (r"(0,2)\setminus\{1\}", r"(0,1)\cup(1,2)"), (r"\cos(\infty)", r"\lfloor |x| \rfloor"))


class Meaning:
    """Whether two trees mean the same, decided by sympy. Only the child asks: some questions have no end."""

    def __init__(self):
        self.constants = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo}

    def same(self, a, b):
        a, b = (self.spread(x, y) if y[0] == "list" else x for x, y in ((a, b), (b, a)))
        if a == b or isinstance(a, str) or isinstance(b, str):
            return a == b
        if a[0] == b[0] == "rel":
            for x, y in ((a, b), (b, a)):
                if x[1] == "∈" != y[1] and x[2] in y[2:]:  # the same name: x in [2, 3] and 2 <= x <= 3
                    return self.same(x[3], self.plain(y))
            return self.matched(*(list(zip(x[1], x[2:], x[3:])) for x in (a, b)), self.same_link)
        a, b = self.plain(a), self.plain(b)
        if {a[0], b[0]} & set(REGIONS.values()) or ["v", "bbR"] in (a, b):
            return self.region(a) == self.region(b)
        if a[0] == b[0] == "list":
            return self.matched(a[1:], b[1:], self.same)
        if a[0] == b[0] and a[0] in ("tuple", "matrix", "ratio"):
            return len(a) == len(b) and all(map(self.same, a[1:], b[1:]))
        u, v = self.units(a) - set(_FORGIVEN), self.units(b) - set(_FORGIVEN)
        return not (u and v and u != v) and any(
            self.equal(x, y) for x in self.readings(a, b) for y in self.readings(b, a))

    def matched(self, left, right, same):  # every item has its own partner on the other side, in any order
        right = list(right)
        for item in left if len(left) == len(right) else ():
            partner = item if item in right else next((other for other in right if same(item, other)), None)
            if partner is None:
                return False
            right.remove(partner)
        return not right

    def spread(self, node, other):  # (f, g) = (1, 2) as the list f = 1, g = 2; so is (1, 2) against x = 1, y = 2
        if node[:2] == ["tuple", "("] and all(x[:2] == ["rel", "="] and self.named(x[2]) for x in other[1:]):
            names, values = sorted([x[2] for x in other[1:]], key=repr), node[3:]
        elif node[:2] == ["rel", "="] and node[2][0] == node[3][0] == "tuple":
            names, values = node[2][3:], node[3][3:]
        else:
            return node
        equations = ["list", *(["rel", "=", name, value] for name, value in zip(names, values))]
        return equations if len(names) == len(values) else node

    def named(self, node):  # x, f(x), AB, (p, q), words: what an equation may define. x^2, 2x or e are not names
        if node[0] in ("*", "tuple"):
            return all(self.named(x) and (node[0] != "*" or x[0] == "*" or x[1][0].isupper() or len(x[1]) > 4)
                       for x in node[1 if node[0] == "*" else 3:])
        return (node[0] == "text" or node[0] == "v" and node[1] not in self.constants
                or node[0] == "f" and node[1].startswith(("function ", "over", "vec")))

    def plain(self, node):  # 5 of x = 5, 1/3 of 1/3 = 0.33, the interval of x < 5 and {x | x < 5}, {3k | k in Z}
        if node in (["v", "emptyset"], ["v", "varnothing"]):
            return ["list"]
        if node[0] == "list" and node[2:3] == ["|"] and len(node) in (4, 5):
            head = node[1][2] if node[1][:2] == ["rel", "∈"] and node[1][3] == ["v", "bbR"] else node[1]
            definition = next((x for x in node[3:] if x[:3] == ["rel", "=", head]), None)
            if definition:
                return ["list", definition[3], "|", *(x for x in node[3:] if x is not definition)]
            solved = self.plain(node[3])
            return solved if len(node) == 4 and head in node[3] and solved[0] in ("tuple", "Complement") else node
        if node[0] == "rel" and set(node[1]) <= set("=∈≈"):
            if self.named(node[2]):
                return self.plain(node[-2 if "≈" in node[1][1:] else -1])
            return node[2] if node[1] == "≈" else node
        if node[:2] == ["rel", "≠"] and self.named(node[2]):
            return ["Complement", ["v", "bbR"], node[3]]
        return self.interval(node)

    def interval(self, node):  # an inequality between a name and constants as an interval, others as they are
        if node[0] != "rel" or not set(node[1]) <= set("<≤") and not set(node[1]) <= set(">≥"):
            return node
        turned = node[1][0] in ">≥"
        signs = node[1][::-1].translate({ord(">"): "<", ord("≥"): "≤"}) if turned else node[1]
        sides = node[:1:-1] if turned else node[2:]
        at = [i for i, side in enumerate(sides) if self.named(side)]
        if len(sides) == 2 and at == [0]:
            signs, sides = "<" + signs, [["*", ["n", "-1"], ["v", "infty"]], *sides]
        elif len(sides) == 2 and at == [1]:
            signs, sides = signs + "<", [*sides, ["v", "infty"]]
        elif len(sides) != 3 or at != [1]:
            return node
        return ["tuple", "[" if signs[0] == "≤" else "(", "]" if signs[1] == "≤" else ")", sides[0], sides[2]]

    def readings(self, node, other):  # without units where other has none: 28% is 28 and 0.28, 90 degrees 90 and pi/2
        exact, bare = self.replaced(node, _FORGIVEN), self.replaced(node, dict.fromkeys(self.units(node), ["n", "1"]))
        return [node] + [exact] * (node != exact) + [bare] * (node != bare and not self.units(other))

    def units(self, node):
        return {node[1]} if node[0] == "u" else {u for x in node if isinstance(x, list) for u in self.units(x)}

    def replaced(self, node, values):
        return values.get(node[1], node) if node[0] == "u" else [
            self.replaced(x, values) if isinstance(x, list) else x for x in node]

    def region(self, node):  # unions, differences, intervals and points as sets of real numbers
        if node[0] in REGIONS.values():
            return getattr(sympy, node[0])(self.region(node[1]), self.region(node[2]))
        if node[0] == "tuple" and len(node) == 5:
            return sympy.Interval(*map(self.value, node[3:]), node[1] == "(", node[2] == ")")
        if node[0] == "list":
            return sympy.Union(*(self.region(self.plain(x)) for x in node[1:]))
        return sympy.S.Reals if node == ["v", "bbR"] else sympy.FiniteSet(self.value(node))

    def same_link(self, a, b):  # equations up to a factor, inequalities up to a positive one, other things side by side
        turn = {">": "<", "≥": "≤"}
        (s, *x), (t, *y) = ((turn.get(c, c), *(sides[::-1] if c in turn else sides)) for c, *sides in (a, b))
        try:
            (p, q), (u, v) = (map(self.value, sides) for sides in (x, y))
            ratio = sympy.cancel((p - q) / (u - v))
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
        if name in ("factorial", "binom") and any(x.is_number and not 0 <= x <= MAX_FACTORIAL for x in parts):
            raise ValueError("too large")
        if name in ("^", "sqrt"):
            return self.power(parts[0], parts[1] if name == "^" else 1 / (parts + [sympy.Integer(2)])[1])
        if name == "frac":
            return parts[0] / parts[1]
        if name in _SYMPY or name in FUNCTIONS or name == "ceiling":
            return getattr(sympy, _SYMPY.get(name, name))(*parts)
        return sympy.Symbol(f"{name}{[sympy.expand(x) for x in parts]}", real=True)  # f(x): known by its argument only

    def power(self, base, exponent):
        size = max(base.p.bit_length(), base.q.bit_length()) if base.is_Rational else 8
        if exponent.is_Rational and abs(exponent) * size > MAX_BITS and abs(base) != 1:
            raise ValueError("too large")
        if base.is_Rational and exponent.is_Rational and base < 0 and exponent.q % 2:
            return (-1) ** exponent.p * (-base) ** exponent  # the real root of a negative number
        return base ** exponent

    def equal(self, a, b):  # is the difference provably zero? refuted by numbers or proved by ever costlier rewriting
        if a == b or {a[0], b[0]} - set("nvu+*^f"):
            return a == b
        x, y = self.value(a), self.value(b)
        difference = x - y
        if x == y or difference.has(sympy.nan, sympy.zoo, sympy.oo):
            return x == y and not x.has(sympy.nan, sympy.zoo)
        symbols = sorted(difference.free_symbols, key=str)
        for shift in (3, -5, 8) if symbols else (0,):
            point = {symbol: sympy.Rational(7 * shift + 2 * k, 10 + k) for k, symbol in enumerate(symbols)}
            value = difference.subs(point).evalf(15, maxn=80)
            if value.is_number and value.is_finite and abs(value) > 1e-30:
                return False
        if not symbols and difference.is_algebraic:
            return sympy.minimal_polynomial(difference, sympy.Symbol("t")) == sympy.Symbol("t")
        return any(rewrite(difference) == 0 for rewrite in (
            sympy.expand, lambda d: sympy.expand(sympy.numer(sympy.together(d.rewrite(sympy.exp)))), sympy.trigsimp,
            sympy.expand_log, sympy.simplify))


def main():
    """A question a line until the input ends. The kernel ends the process when one exceeds its CPU time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    meaning = Meaning()
    for pair in _WARM_UP:
        meaning.same(*json.loads(json.dumps([parse(clean(text)) for text in pair])))
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            lefts, rights = json.loads(line)
            verdict = any(meaning.same(a, b) for a in lefts for b in rights)
        except (MemoryError, RecursionError):
            verdict = None
        except Exception:
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
