r"""Is this answer right? The last boxed answer of a completion against a reference: the reward of the training.

    grade(text, answer) -> (bool, reason)     reason: right, wrong, no answer, unparsable, timeout
    is_equivalent(prediction, gold) -> bool   two bare answers; symmetric and exact: nothing is rounded
    extract_answer(text) -> str | None        the content of the last balanced \boxed{} or \fbox{}
    python grader.py pairs.jsonl              grades {"prediction", "gold"} lines; a prediction is a whole completion

From cheap to costly: the same plain number; the same string after cleaning (spacing, \dfrac, \left, Unicode, units);
two trees from a small parser with an allow-list, compared part by part (lists, tuples, intervals, matrices, relations),
their values by sympy, both in a child process, meaning.py. Only proofs count: agreeing to many digits is not being
equal. A unit missing on one side is forgiven, a different one is not.

Model text is never evaluated: the child builds sympy objects from the tree, call by call. Sizes and a count of function
calls decide what is tried, and the CPU limit is ten times what the costliest comparison took that they let pass.
"""

import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from fractions import Fraction

MAX_CHARS, MAX_TOKENS = 1000, 400       # of an answer that is parsed; beyond them only the same string is right
MAX_CLEANED = 2500                      # characters: a question, escaped as JSON, fits into the 64 KiB of a pipe
MAX_STEPS = 4000                        # of the parser: nested sets with plus-minus signs double them at each level
MAX_BITS, MAX_FACTORIAL = 60_000, 5000  # of exact numbers: 2004! has 19,000 bits
CPU_SECONDS, WALL_SECONDS = 1.2, 60     # of a comparison; the second only for a child that never gets to run
REASONS = ("right", "wrong", "no answer", "unparsable", "timeout")
CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "meaning.py")
CHILDREN, SPARES = 4, 2                 # of each process: at work, and ready for the next question
CHILD_BYTES = 1 << 30                   # sympy itself needs 0.2 GB


class Refused(Exception):
    """The parser does not know it or a limit forbids it."""


# ---- extraction and cleaning -----------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(\{)|((?:[^\s${}\\]|\\[A-Za-z]+|\{[^{}]*\})+))?|\\.|[{}]", re.S)


def extract_answer(text):
    r"""The content of the last balanced \boxed{} or \fbox{} (or \boxed 2), stripped; None if there is none or empty.

    Where the completion closes a think block only what follows counts. Of nested boxes the outer one counts.
    """
    text = text.rpartition("</think>")[2] if isinstance(text, str) else ""
    answer, stack = "", []  # one pass with a stack: ten thousand unclosed boxes cost no more than other text
    for match in _BOX.finditer(text) if "box" in text else ():
        if match[1] or match[0] == "{":
            stack.append(match.end() if match[1] else None)
        elif match[2]:
            answer = match[2].rstrip(".,;:")
        elif match[0] == "}" and stack:
            start = stack.pop()
            answer = answer if start is None else text[start:match.start()]
    return answer.strip() or None


_UNITS = {alias: words.split()[0] for words in """mm millimeter millimetre|cm centimeter centimetre|m meter metre|inch
    km kilometer kilometre|foot ft feet|yard yd|mile mi|gram g gm|kg kilogram|pound lb|ounce oz|liter l litre|minute min
    ml milliliter millilitre|second s sec|hour h hr|day|week|month|year yr|dollar usd buck|cent|euro eur|gbp|am|pm
    percent|degree deg|square sq|cubic cu|unit|acre|gallon gal|mph|kph|celsius
    fahrenheit""".replace("\n", "|").split("|") for alias in words.split()} | {
    "in": "inch", "inche": "inch", "L": "liter"}
_KNOWN_WORDS = _UNITS.keys() | {"and", "or"}
_COUNTS = dict(zip("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
                   "sixteen seventeen eighteen nineteen twenty".split(), map(str, range(21))))
# words after a number that change it: all others are what is counted, 5 apples
_NO_UNIT = _COUNTS.keys() | set("""
    not no none nor neither either except incorrect wrong false impossible unknown undefined
    about approximately roughly nearly almost around possibly perhaps maybe probably guess is was are isn be if unless
    more less fewer than least most below above under over up off through to of r out vs versus but then remainder mod
    modulo negative minus plus divided doubled halved squared cubed factorial choose reciprocal inverse hundred
    ago later thousand dozen score gross halve hundredth thousandth twentieth thirty forty fifty sixty seventy eighty
    half quarter third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
    ninety january february march april may june july august september october november december
    monday tuesday wednesday thursday friday saturday sunday""".split())
FUNCTIONS = set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp gcd lcm".split())
_PLAIN_NAMES = FUNCTIONS | {"sqrt", "pi", "infty", "theta", "alpha", "beta"}  # commands without a backslash, too
_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "’": "'",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ",
    "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "⟨": "(",
    "⟩": ")", "°": r"^\circ ", "±": r"\pm ", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "€": ' "euro" ', "£": ' "gbp" ',
    "¢": ' "cent" ', "⁄": "/", "∶": ":", "⩽": r"\le ", "⩾": r"\ge ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "△": r"\triangle ", "∠": r"\angle ", "“": "'", "”": "'"})


def _ascii(text):  # Unicode mathematics as LaTeX, invisible marks dropped
    nfkc = functools.partial(unicodedata.normalize, "NFKC")
    for sign, raised in (("^", "[⁰¹²³⁴-⁹⁺⁻⁽⁾ⁱⁿˣʸᵃ-ᵛ]+"), ("_", "[₀-₎ₐ-ₜᵢ-ᵥ]+")):
        text = re.sub(raised, lambda m: sign + "{" + nfkc(m[0]).replace("−", "-") + "}", text)
    for letter in set(re.findall("[Α-ΡΣ-Ωα-ω]", text)):  # GREEK SMALL LETTER ALPHA
        name = unicodedata.name(letter).split()[-1]
        text = text.replace(letter, f"\\{name.title() if letter.isupper() else name.lower()} ")
    text = re.sub("[½⅓⅔¼-¾⅕-⅞]", lambda m: r"\frac{%s}{%s}" % tuple(nfkc(m[0]).split("⁄")), text)
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text).translate(_CHARACTERS)
    return "".join(c for c in nfkc(text) if unicodedata.category(c) != "Cf")


_BEFORE_TEXT = [(re.compile(pattern), new) for pattern, new in (  # layout and LaTeX, while \text{...} still stands
    (r"^['\"`](.*)['\"`]$", r"\1"), (r"\\\\(?:\[[\d.]+[a-z]{2}\])?", r"\\cr "),
    (r"\\mathbb\s*\{?\s*([A-Z])\s*\}?", r"\\bb\1 "), (r"\b([aApP])\.\s?[mM]\b\.?", r"\1m"),
    (r"\\(?:boxed|fbox|displaystyle|textstyle|limits|bf|rm|it|[lL]arge|huge)(?![A-Za-z])", " "),
    (r"\\(?:[hv]?(?:phantom|space)|(?:text)?color)\*?(?:\{[^{}]*\}| *[^\\{])", " "),
    (r"(?:^|\{)([^{}]*)\\(over|choose)(?![a-z])([^{}]*)(?:\}|$)",
     lambda m: "\\%s{%s}{%s}" % ({"over": "frac", "choose": "binom"}[m[2]], m[1], m[3])),
    (r"\\lbrace(?![A-Za-z])", r"\\{"), (r"\\rbrace(?![A-Za-z])", r"\\}"), (r"(?<=\d)[eE]\+?(-?\d+)(?!\w)", r"*10^{\1}"),
    (r"(?:\\text)?\{ ?([:.]) ?\}", r"\1"), (r"\\(?:text|mathrm)\{([\dA-F]+)\}(?=\s*_)", r"\1"),
    (r"^\d{1,3}(?:(?: |,\\[,;:])\d{3})+$", lambda m: re.sub(r"\D", "", m[0])),  # 10 000
    (r"(?<=\d)(?:(?:\\text)?\{,(?:\\,)?\}\s*|,\s*\\!\s*|\\!\s*,|\\[,;:! ]|~)(?=\d{3}(?!\d))", ""),
    # a bare letter is a unit only when LaTeX spacing sets it off from a number: 576\pi\;m^{2}; but 3m is 3 times m
    (r"^([^A-Za-z]*(?:\\(?:pi|sqrt|d?frac)[^A-Za-z\\]*)*)(?:\\[;,: ]|~|\\quad)\s*([mgsLhl])"
     r"(?=\s*(?:\^\{?[23]\}?\s*)?$)", r"\1\\text{\2}"),
    (r"\\begin\s*\{(?:[pbB]|small)?matrix\}|\\begin\s*\{array\}\s*\{[clr|\s]*\}", r"\\matrix "),
    (r"\\end\s*\{(?:(?:[pbB]|small)?matrix|array)\}", r"\\endmatrix "),
    (r"\\(?:left|middle|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""), (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
    (r"\\langle(?![A-Za-z])", "("), (r"\\rangle(?![A-Za-z])", ")"), (r"\\\$|^\$(?=[\d.]+[^$]*$)", ' "dollar" '),
    (r"\\[,!;:> ()\[\]]|\\q?quad(?![A-Za-z])|[~$]", " "), (r"[\s.,;]+$", ""),
    (r"\\(?:[dtc]|nice)frac(?![A-Za-z])", r"\\frac "), (r"\\[dt]binom(?![A-Za-z])", r"\\binom "),
    (r"\\(frac|binom|sqrt)\s*(\d)", r"\\\1{\2}"), (r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"))]
_AFTER_TEXT = [(re.compile(pattern), new) for pattern, new in (  # phrases, units, bases: words are "quoted" by then
    (r"\s+", " "), (r"\*\*", "^"), (r"<=", r"\\le "), (r">=", r"\\ge "),
    (r'\^ ?(\{)? ?"?(?:st|nd|rd|th)"?(?(1) ?\})', " "),
    (r'\^ ?(\{)? ?\\circ(?(1) ?\})|(?<=\d)\^ ?(\{)? ?"?o"?(?(2) ?\})|\\degree(?![a-z])', ' "degree" '),
    (r'"degree" *"?C"?(?![\w(])', '"degree" "celsius"'), (r'"degree" *"?F"?(?![\w(])', '"degree" "fahrenheit"'),
    (r'^ ?"(?:the|an?)" (?="[a-z]{2,}")', ""), (r'^ ?(?:"final" )?"answer" ?(?:"is" ?)?:? ?', ""),
    (r'^ ?"(?:option|choice)" ?(?="?\(?[A-Z]\b)|^ ?"point" ?(?=\()', ""), (r' ?: ?00(?= ?"[ap]m")', ""),
    (r'^ ?(?:"all" )?"real" "number" ?$', r"\\bbR "), (r"\\cr ?\\endmatrix", r"\\endmatrix"), (r"\\?%", ' "percent" '),
    (r"\b([fgh]) ?\^ ?\{ ?- ?1 ?\} ?(?=\()", r"\1_{inv}"),
    (r"(?:\bm ?)?\\(angle|triangle) ?(\{)? ?([A-Z]+)(?(2) ?\})",  # the same in other orders of their letters
     lambda m: "\\%s_{%s}" % (m[1], min(m[3], m[3][::-1]) if m[1] == "angle" else "".join(sorted(m[3])))),
    (r'"\.', '" '), (r'^ ?(-?) ?"(dollar|euro|gbp)"(.*)', r'\1\3 "\2"'), (r'"(?:dollar|euro|gbp)"(?= ?[\d\\])', ""),
    (r'"square" "(\w+)"|"(\w+)" ?\^ ?(\{)? ?2(?(3) ?\})', r'"\1\2^2"'),
    (r'"cubic" "(\w+)"|"(\w+)" ?\^ ?(\{)? ?3(?(3) ?\})', r'"\1\2^3"'),
    (r'"mph"', '"mile" "per" "hour"'), (r'"kph"', '"km" "per" "hour"'), (r'"thousand"', "*1000"),
    (r'"million"', "*10^6"), (r'"billion"', "*10^9"), (r'"trillion"', "*10^12"),
    (r'(?<![\w.\\])(\()?(-?[\dA-F]*\d[\dA-F.]*)(?(1)\)) ?_ ?(\{)? ?(\()? ?"?(\d+|(?<=")[a-z]+)"?(?(4) ?\))(?(3) ?\})',
     lambda m: (f'{m[2]} "base %s" ' if m[2][-1].isdigit() and not re.search("[A-F]", m[2]) else f'"{m[2]} base %s" ')
     % _COUNTS.get(m[5], m[5])),
    (r'(?<=\d) ?(\()? ?"base" "?(\d+|[a-z]+)"?(?(1) ?\))', lambda m: f' "base {_COUNTS.get(m[2], m[2])}" '),
    (r'^ ?"one" "half" ?$', "1/2"), (r'^ ?"([a-z]+)"(?= ?$| ?\*| "([a-z]+)" ?$)',  # five apples, not five hundred
                                     lambda m: m[0] if {m[2], f"{m[2]}s"} & _NO_UNIT else _COUNTS.get(m[1], m[0])),
    (r"(\d*\.(\d*)) ?\\(?:overline|bar|dot) ?\{?(\d+)\}?",
     lambda m: f"({m[1]}0+{m[3]}/{'9' * len(m[3])}{'0' * len(m[2])})"),
    (r"(?<![\d.^_}])(\d+) ?\\frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}|(?<![\d.^_}])(\d+) (\d+) ?/ ?(\d+)(?![\d.])",
     lambda m: "({}+{}/{})".format(*filter(None, m.groups()))))]
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|normal|up)?|mbox|math(?:rm|bf|it|sf)|boldsymbol|operatorname|emph"
                   r"|underline)\*?\s*(?:\{([^{}]*)\}|([A-Za-z]))")
_RUN = re.compile(r'"[^"]*"|\\[A-Za-z]+|\\.|(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])|[A-Za-z]{2,}', re.S)
_PROSE = re.compile(r"(?![a-z]{1,2}$)(?=.*[A-Za-z]{2})[A-Za-z ,.;'!-]+")


def _word(word):  # a quoted token in one spelling: inches and in are "inch"; letters and AB keep their case
    low = word.lower() if len(word) > 1 else word
    if word in FUNCTIONS or low == "infinity":
        return "\\infty " if low == "infinity" else f"\\{word} "
    unit = _UNITS.get(low) or _UNITS.get(low.rstrip("s"))
    low = word if word.isupper() and low not in ("yes", "no", "and", "or", "true", "false") else low
    return f'"{unit or (low[:-1] if len(low) > 3 and low[-1] == "s" else low)}"'


def _quoted(match):  # \text{...}: words become tokens, digits and signs stay mathematics
    text = re.sub(r"(?<=[A-Za-z])/(?=[A-Za-z])", " per ", re.sub(r'["\\]', " ", match[1] or match[2] or ""))
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text)
    return " " + re.sub("[A-Za-z]+(?:'s)?", lambda m: _word(m[0]), text) + " "


@functools.lru_cache(maxsize=4096)
def clean(text):
    """One spelling for what looks the same; words come out quoted, to tell them from products of variables."""
    text = (text if text.isascii() else _ascii(text)).strip().strip("*").strip()
    for pattern, new in _BEFORE_TEXT:
        text = pattern.sub(new, text)
    for _ in range(3):
        text = _TEXT.sub(_quoted, text)
    prose = _PROSE.fullmatch(text)

    def word(match):
        run, glued = match[0], text[:match.start()][-1:].isdigit()
        if run[0] in '"\\' or glued and run in ("st", "nd", "rd", "th"):
            return run if run[0] in '"\\' else ""
        low = run.lower()
        quoted = {low, low.rstrip("s")} & _KNOWN_WORDS or prose or len(run) > 3 and not glued
        return f"\\{run} " if run in _PLAIN_NAMES else f" {_word(run)} " if quoted else run

    text = _RUN.sub(word, text)
    for pattern, new in _AFTER_TEXT:
        text = pattern.sub(new, text)
    return text.strip().rstrip(" .,;")


def _key(cleaned):  # spaces dropped except between two letters or digits: 3 1/2 is not 31/2
    return re.sub(r"(?<![A-Za-z\d]) | (?![A-Za-z\d])", "", re.sub(r'["\s]+', " ", cleaned))


# ---- parsing: a tree of tuples, ("+", a, b), ("f", "sqrt", a), ("n", "3/4"), ("v", "x"), ("u", "cm"), ("list", a) ----

_TOKEN = re.compile(r'\s*(\d+(?:\.\d*)?|\.\d+|"[^"]*"?|\\[A-Za-z]+|\\.|.)', re.S)
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
_SIGNS, _TIMES, _POSTFIX = ("+", "-", "\\pm", "\\mp"), ("*", "\\cdot", "\\times", "/", "\\div"), ('"degree"', "!", "^")
_SEPARATORS, _SHAPE = (",", ";", '"and"', '"or"'), ("|", ":", "&", "\\cr")
_RELATIONS = dict(zip("= < > \\lt \\gt \\le \\leq \\leqslant \\ge \\geq \\geqslant \\ne \\neq \\in \\approx".split(),
                      "=<><>≤≤≤≥≥≥≠≠∈≈"))
REGIONS = {"\\cup": "Union", "\\cap": "Intersection", "\\setminus": "Complement", "\\backslash": "Complement"}
_BRACKETS = {"": ("", ""), "(": (")", "]"), "[": (")", "]"), "{": ("}",), "\\{": ("\\}",), "|": ("|",),
             "\\lfloor": ("\\rfloor",), "\\lceil": ("\\rceil",), "\\matrix": ("\\endmatrix",)}
_BRACKET_FUNCTIONS = {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceiling"}
_ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1, "overline": 1, "vec": 1, "overrightarrow": 1, "hat": 1}
_NAMES = set("alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi "
             "chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega pi ell triangle angle ldots dots cdots infty "
             "bbZ bbN bbQ bbC bbR emptyset varnothing".split())
_MINUS, _RADIAN = ("n", "-1"), ("*", ("v", "pi"), ("n", "1/180"))


class Parser:
    """Operator precedence over an allow-list of tokens; Refused for everything else."""

    def __init__(self, text):
        self.tokens, self.at, self.closers, self.sign, self.plus_minus = _TOKEN.findall(text), 0, (), 1, False
        self.steps = 0

    def refuse(self):
        raise Refused

    @property
    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted):  # the next token if it is wanted (any, without arguments), "" otherwise
        token = self.peek if not wanted or self.peek in wanted else ""
        self.at += bool(token)
        return token

    def bracket(self, opening):  # the members up to the closing one; in sets one with a plus-minus sign counts twice
        closing, outer, members, words, many = _BRACKETS[opening], self.closers, [], set(), opening in ("", "\\{")
        self.closers = closing + ("|", ":") * (opening == "\\{")
        separators = _SEPARATORS + ("|", ":") * many + ("&", "\\cr") * (opening == "\\matrix")
        while self.peek not in closing:
            start, self.plus_minus = self.at, self.plus_minus and not many
            members.append(self.expression())
            if many and self.plus_minus:
                self.at, self.sign = start, -1
                members.append(self.expression())
                self.sign, self.plus_minus = 1, False
            if self.peek not in closing + separators:
                self.refuse()
            while separator := self.take(*separators):
                words |= {separator} & {'"and"', '"or"'}
                members += ["|" if separator == ":" else separator] * (separator in _SHAPE)
        pair, self.closers = (opening, self.take()), outer
        if many or opening == "\\matrix" or opening == "{" and len(members) > 1:
            empty = opening == "\\{" and members[:1] in ([("list",)], [("v", "emptyset")], [("v", "varnothing")])
            region = len(words) == 1 and all(x[0] == "rel" and not set(x[1]) <= set("=∈≈") for x in members)
            kind = "matrix" if opening == "\\matrix" else words.pop().strip('"') if region else "list"
            return members[0] if len(members) == 1 and not empty else (kind, *members)
        if len(members) == 1 and pair not in (("(", "]"), ("[", ")")):
            return ("f", _BRACKET_FUNCTIONS[opening], *members) if opening in _BRACKET_FUNCTIONS else members[0]
        return ("tuple", *pair, *members) if len(members) > 1 and opening in "([" else self.refuse()

    def binding(self):  # how tightly the next token binds what stands before it; 0 ends the expression
        token = self.peek
        if not token or token in self.closers + _SEPARATORS:
            return 0
        for level, tokens in ((1, _RELATIONS), (2, REGIONS), (3, (":",)), (5, _SIGNS), (6, _TIMES), (7, _POSTFIX)):
            if token in tokens:
                return level
        if token[0].isdigit() or token[0] == ".":  # 2^{3}3^{2} and 2!3! are products, other numbers here are mistakes
            before = self.tokens[max(0, self.at - 4):self.at]
            return 6 * (before[-1] == "!" or before[-1] == "}" and "^" in before)
        if token[0] == '"':
            return 4 if len(token) > 3 or token[1] in "mgsLhl" else 6  # \mathrm{e} is a value, \text{m} a unit
        return 6 * (token.isalpha() or token in _BRACKETS or any(
            token[1:] in names for names in (_NAMES, FUNCTIONS, _ARGUMENTS)))

    def expression(self, level=0):  # reads as far as tokens bind tighter than level
        self.take("\\approx")
        self.steps += 1
        node = self.prefix() if self.steps <= MAX_STEPS else self.refuse()
        while (binding := self.binding()) > level:
            token = self.take()
            if binding == 1:
                signs, sides = (node[1], node[2:]) if node[0] == "rel" else ("", (node,))
                node = ("rel", signs + _RELATIONS[token], *sides, self.expression(1))
            elif binding == 2:
                node = (REGIONS[token], node, self.expression(2))
            elif binding == 3:
                node = ("ratio", *(node[1:] if node[0] == "ratio" else (node,)), self.expression(3))
            elif binding == 4 or token == '"degree"':
                unfit = {token.strip('"'), token.strip('"') + "s"} & _NO_UNIT or node[0] == "text"
                node = self.refuse() if unfit else ("*", node, ("u", token.strip('"')))
            elif binding == 7:
                node = self.refuse() if node[-1][:1] == ("u",) else node
                node = ("^", node, self.exponent()) if token == "^" else ("f", "factorial", node)
            else:
                self.at -= token not in _TIMES
                sign, right = self.signs(), self.expression(binding)
                right = ("^", right, _MINUS) if token in ("/", "\\div") else right
                node = ("+" if binding == 5 else "*", node, right if sign > 0 else ("*", _MINUS, right))
        return node

    def signs(self):  # the product of a run of signs; a plus-minus is read as the sign of this pass
        sign = 1
        while token := self.take(*_SIGNS):
            self.plus_minus |= len(token) > 1
            sign *= {"+": 1, "-": -1, "\\pm": self.sign, "\\mp": -self.sign}[token]
        return sign

    def exponent(self):
        sign, node = self.signs(), self.prefix()
        return self.refuse() if self.peek == "^" else node if sign > 0 else ("*", _MINUS, node)

    def prefix(self):  # a value from its first token on
        if self.signs() < 0:
            return ("*", _MINUS, self.expression(5))
        token = self.take() or self.refuse()
        if re.match(r"\.?\d", token):
            return ("n", str(Fraction(token)))
        if token[0] == '"' and len(token) > 3:
            words = [token]
            while self.peek[:1] == '"' and self.peek not in _SEPARATORS:
                words.append(self.take())
            return ("text", " ".join(word.strip('"') for word in words if word not in ('"the"', '"a"', '"an"')))
        if token[0] == '"' or token.isalpha() or token[1:] in _NAMES:
            return self.name(token.strip('"\\'))
        if token in _BRACKETS or token[1:] in FUNCTIONS:
            return self.bracket(token) if token in _BRACKETS else self.function(token[1:])
        index = (self.bracket("["),) if token == "\\sqrt" and self.take("[") else ()
        return ("f", token[1:], *(self.prefix() for _ in range(_ARGUMENTS.get(token[1:]) or self.refuse())), *index)

    def name(self, letter):  # a variable with its subscript and primes, or such a function applied: f(...), P(x)
        if self.take("_"):
            start, _ = self.at, self.prefix()
            letter += "_" + "".join(self.tokens[start:self.at]).strip("{}")
        while self.take("'"):
            letter += "'"
        single = re.fullmatch(r"[a-z]\)", "".join(self.tokens[self.at + 1:self.at + 3]))
        if self.peek == "(" and (letter[0] in "fgh" or single and letter not in ("e", "i", "x", "y", "z", "pi")):
            inside = self.prefix()
            return ("f", "function " + letter, *(inside[3:] if inside[0] == "tuple" else [inside]))
        return ("v", letter)

    def function(self, name):  # \sin^2 2x, \log_2 8: the argument is a group, or a product without groups, functions
        base = self.prefix() if self.take("_") else ("n", "10") if name in ("log", "lg") else None
        exponent = self.exponent() if self.take("^") else None
        grouped, node = self.peek == "(", self.prefix() if self.peek == "(" else self.expression(6)
        while self.peek == '"degree"' or not (grouped or self.peek in ("(", *_TIMES) or self.peek[1:] in FUNCTIONS
                                              or self.binding() != 6):
            node = ("*", node, _RADIAN if self.take('"degree"') else self.expression(6))
        arguments = node[3:] if node[0] == "tuple" else (node,)
        if exponent == ("*", _MINUS, ("n", "1")) and name in ("sin", "cos", "tan"):
            name, exponent = "arc" + name, None
        node = ("f", "log", *arguments, base) if base else ("f", name, *arguments)
        return ("^", node, exponent) if exponent else node


@functools.lru_cache(maxsize=4096)
def parse(cleaned, grouped=True):
    """The tree of a cleaned answer or None; text for words without other reading. grouped: 1,234 is one number."""
    if grouped and not re.search(r"[(\[{]", cleaned):
        cleaned = _GROUPED.sub(lambda m: m[0].replace(",", ""), cleaned)
    try:
        parser = Parser(cleaned)
        return parser.bracket("") if len(parser.tokens) <= MAX_TOKENS else None
    except (Refused, RecursionError):
        words = re.sub(r"[^a-z\d]+", " ", cleaned.lower()).strip()
        return ("text", words) if '"' in cleaned and words and "\\" not in cleaned else None


# ---- sympy in child processes ----------------------------------------------------------------------------------------

class Children:
    """The child processes of this process: started when first needed, replaced when killed, gone when it is gone.

    They are fresh interpreters (a fork of a process with threads or CUDA may hang) and end when their input ends.
    """

    def __init__(self):
        self.idle, self.slots = [], threading.BoundedSemaphore(CHILDREN)

    def start(self):  # fixed hashes: sympy orders terms by them, and a verdict must not depend on chance
        return subprocess.Popen([sys.executable, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONHASHSEED": "0"})

    def ask(self, prediction, gold, whole):
        """What a child says, "timeout" past its limits. Where it was killed by others a second one is asked."""
        line = json.dumps([prediction, gold, whole]).encode() + b"\n"  # MAX_CLEANED: the pipe takes it without waiting
        with self.slots:
            for attempt in range(2):
                try:
                    child = self.idle.pop(0) if attempt == 0 else self.start()  # pop and append are atomic
                except IndexError:
                    child = self.start()
                answer, died = self.exchange(child, line)
                if answer:
                    self.idle.insert(0, child)
                else:
                    child.kill()
                    child.communicate()
                while len(self.idle) < SPARES:  # they import sympy meanwhile
                    self.idle.append(self.start())
                if not died or child.returncode == -signal.SIGPROF:
                    break
        return answer or "timeout"

    def exchange(self, child, line):  # the answer or None, and whether the child is dead
        try:
            child.stdin.write(line)
            child.stdin.flush()
            poll = select.poll()
            poll.register(child.stdout, select.POLLIN)
            return json.loads(child.stdout.readline() if poll.poll(WALL_SECONDS * 1000) else b"null"), False
        except (OSError, ValueError):
            return None, True


_children = Children()
os.register_at_fork(after_in_child=_children.__init__)  # the pipes belong to the parent


# ---- grading ---------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?(?:\d{1,15}|\d{1,3}(?:,\d{3}){1,4})(?:\.\d{0,15})?|[-+]?\.\d{1,15}")


def _reason(prediction, gold, whole=False):
    try:
        if prediction == gold and gold.strip():
            return "right"
        if _NUMBER.fullmatch(prediction) and _NUMBER.fullmatch(gold):
            same = Fraction(prediction.replace(",", "")) == Fraction(gold.replace(",", ""))
            return "right" if same else "wrong"
        if max(len(prediction), len(gold)) > MAX_CHARS:
            return "unparsable"
        a, b = clean(prediction), clean(gold)
        if not _key(a) or not _key(b) or max(len(a), len(b)) > MAX_CLEANED:
            return "unparsable"
        return "right" if _key(a) == _key(b) else _children.ask(a, b, whole)
    except Exception:  # a grading failure must cost one reward, never the run
        return "unparsable"


def is_equivalent(prediction, gold):
    """True where two bare answers mean the same; symmetric. What cannot be parsed equals only itself. Never raises."""
    return _reason(prediction, gold) == "right"


def grade(text, answer):
    """(right, reason) for a whole completion and a bare reference answer. Never raises; ends after WALL_SECONDS.

    reason: "right"; "wrong"; "no answer" (no balanced box, or an empty one); "unparsable" (outside the parser's
    language or its limits, and not the same string); "timeout" (the comparison hit a limit of its work or memory).
    """
    prediction = extract_answer(text)
    reason = "no answer" if prediction is None else _reason(prediction, answer, whole=True)
    return reason == "right", reason


def main(path):
    """Grades a file of lines {"prediction": a whole completion with its box, "gold"}; returns an error or None.

    A line of results for each goes to standard output, their counts to standard error. Blank lines are skipped.
    """
    counts, number = {}, 0
    try:
        for number, line in enumerate(open(path, "rb"), 1):
            if not line.strip():
                continue
            pair, start = json.loads(line.decode("utf-8-sig")), time.perf_counter()
            prediction, gold = pair["prediction"], pair["gold"]
            verdict, reason = grade(prediction, gold)
            counts[reason] = counts.get(reason, 0) + 1
            ms = round((time.perf_counter() - start) * 1e3, 3)
            print(json.dumps({"verdict": verdict, "reason": reason, "ms": ms}))
    except BrokenPipeError:  # of | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None
    except OSError as error:
        return f"{path}: {error.strerror}"
    except KeyError as field:
        return f"{path}, line {number}: field {field} is missing"
    except (ValueError, TypeError, RecursionError):
        return f"{path}, line {number}: not a JSON object"
    print(", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "no pairs", file=sys.stderr)


if __name__ == "__main__":
    if problem := main(sys.argv[1]) if len(sys.argv) == 2 else "usage: python grader.py pairs.jsonl":
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
