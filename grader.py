r"""Is this answer right? The last boxed answer of a completion against a reference: the reward of the training.

    grade(text, answer) -> (bool, reason)     reason: right, wrong, no answer, unparsable, timeout
    is_equivalent(prediction, gold) -> bool   two bare answers; symmetric and exact: nothing is rounded
    extract_answer(text) -> str | None        the content of the last balanced \boxed{} or \fbox{}
    python grader.py pairs.jsonl              grades {"prediction", "gold"} lines without the rest of the project

From cheap to costly: the same plain number; the same string after cleaning (spacing, \dfrac, \left, Unicode, units);
two trees from a small parser with an allow-list, compared part by part (lists, tuples, intervals, matrices, relations),
their values by sympy. That stage is meaning.py, in a child process with a CPU and a memory limit. Only proofs count:
agreeing to many digits is not being equal. A unit missing on one side is forgiven, a different one is not.

Model text is never evaluated: the child builds sympy objects from the tree, call by call. Size limits decide what is
tried, and the CPU limit is ten times what the costliest accepted comparison needs, so load changes no verdict.
"""

import functools
import json
import math
import os
import re
import select
import subprocess
import sys
import threading
import time
import unicodedata
from fractions import Fraction

MAX_CHARS, MAX_TOKENS = 1000, 400       # of an answer that is parsed; beyond them only the same string is right
MAX_BITS, MAX_FACTORIAL = 60_000, 5000  # of exact numbers: 2004! has 19,000 bits
CPU_SECONDS, WALL_SECONDS = 0.3, 60     # of a comparison; the second only for a child that never gets to run
REASONS = ("right", "wrong", "no answer", "unparsable", "timeout")
CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "meaning.py")
CHILDREN, CHILD_BYTES = 4, 1 << 30      # of each process; sympy itself needs 0.2 GB of address space


class Refused(Exception):
    """The parser does not know it or a limit forbids it. The argument is the reason that grade returns."""


# ---- extraction and cleaning -----------------------------------------------------------------------------------------

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(\{)|((?:[^\s${}\\]|\\[A-Za-z]+|\{[^{}]*\})+))?|\\.|[{}]", re.S)


def extract_answer(text):
    r"""The content of the last balanced \boxed{} or \fbox{} (or \boxed 2), stripped; None if there is none or empty.

    Where the completion closes a think block only what follows counts. Of nested boxes the outer one counts.
    """
    text = text.rpartition("</think>")[2]
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
    percent|degree deg|square sq|cubic cu|unit|acre|gallon|mph|kph""".replace("\n", "|").split("|")
          for alias in words.split()} | {"in": "inch", "inche": "inch"}
_KNOWN_WORDS = _UNITS.keys() | {"and", "or"}
_COUNTS = dict(zip("zero one two three four five six seven eight nine ten eleven twelve".split(), map(str, range(13))))
_NO_UNIT = set("not no none nor more less than least most below above under over remainder negative minus plus times "
               "of r except about half tenth hundredth thousandth quarter third to through either neither".split())
FUNCTIONS = set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp gcd lcm".split())
_PLAIN_NAMES = FUNCTIONS | {"sqrt", "pi", "infty", "theta", "alpha", "beta"}  # commands without a backslash, too
_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "’": "'",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ",
    "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "⟨": "(",
    "⟩": ")", "°": r"^\circ ", "±": r"\pm ", "√": r"\sqrt ", "€": ' "euro" ', "£": ' "gbp" '})


_nfkc = functools.partial(unicodedata.normalize, "NFKC")


def _ascii(text):  # Unicode mathematics as LaTeX, invisible marks dropped
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda m: "^{" + _nfkc(m[0]).replace("−", "-") + "}", text)
    text = re.sub("[½⅓⅔¼-¾⅕-⅞]", lambda m: r"\frac{%s}{%s}" % tuple(_nfkc(m[0]).split("⁄")), text)
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text).translate(_CHARACTERS)
    return "".join(c for c in _nfkc(text) if unicodedata.category(c) != "Cf")


_BEFORE_TEXT = [(re.compile(pattern), new) for pattern, new in (
    (r"\\\\", r"\\cr "), (r"\\mathbb\s*\{?\s*([A-Z])\s*\}?", r"\\bb\1 "), (r"\b([aApP])\.\s?[mM]\b\.?", r"\1m"),
    (r"\\(?:boxed|fbox|displaystyle|textstyle|limits|bf|rm|it|[lL]arge|huge)(?![A-Za-z])", " "),
    (r"\\(?:[hv]?(?:phantom|space)|(?:text)?color)\*?(?:\{[^{}]*\}| *[^\\{])", " "),
    (r"(?:^|\{)([^{}]*)\\(over|choose)(?![a-z])([^{}]*)(?:\}|$)",
     lambda m: "\\%s{%s}{%s}" % ({"over": "frac", "choose": "binom"}[m[2]], m[1], m[3])),
    (r"\\lbrace(?![A-Za-z])", r"\\{"), (r"\\rbrace(?![A-Za-z])", r"\\}"), (r"(?<=\d)[eE]\+?(-?\d+)(?!\w)", r"*10^{\1}"),
    (r"(?<=\d)(?:\{,\}\s*|,\s*\\!\s*|\\!\s*,|\\[,;:! ]|~)(?=\d{3}(?!\d))", ""),
    # a bare letter is a unit only when LaTeX spacing sets it off from a number: 576\pi\;m^{2}; but 3m is 3 times m
    (r"^([^A-Za-z]*(?:\\(?:pi|sqrt|d?frac)[^A-Za-z\\]*)*)(?:\\[;,: ]|~|\\quad)\s*([mgsLhl])"
     r"(?=\s*(?:\^\{?[23]\}?\s*)?$)", r"\1\\text{\2}"),
    (r"\\begin\s*\{(?:[pbB]|small)?matrix\}|\\begin\s*\{array\}\s*\{[clr|\s]*\}", r"\\matrix "),
    (r"\\end\s*\{(?:(?:[pbB]|small)?matrix|array)\}", r"\\endmatrix "),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""), (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
    (r"\\langle(?![A-Za-z])", "("), (r"\\rangle(?![A-Za-z])", ")"), (r"\\\$|^\$(?=[\d.]+[^$]*$)", ' "dollar" '),
    (r"\\[,!;:> ()\[\]]|\\q?quad(?![A-Za-z])|[~$]", " "), (r"[\s.,;]+$", ""),
    (r"\\(?:[dtc]|nice)frac(?![A-Za-z])", r"\\frac "), (r"\\[dt]binom(?![A-Za-z])", r"\\binom "),
    (r"\\(frac|binom|sqrt) *(\d)", r"\\\1{\2}"), (r"(\\(?:frac|binom) *\{[^{}]*\}) *(\d)", r"\1{\2}"))]
_AFTER_TEXT = [(re.compile(pattern), new) for pattern, new in (
    (r"\s+", " "), (r"\*\*", "^"), (r"<=", r"\\le "), (r">=", r"\\ge "), (r'\^ ?\{? ?"?(?:st|nd|rd|th)"? ?\}?', " "),
    (r"\^ ?\{? ?\\circ ?\}?|\\degree(?![a-z])", ' "degree" '), (r"\\?%", ' "percent" '),
    (r'"\.', '" '), (r'^ ?(-?) ?"(dollar|euro|gbp)"(.*)', r'\1\3 "\2"'), (r'"(?:dollar|euro|gbp)"(?= ?[\d\\])', ""),
    (r'"square" "(\w+)"|"(\w+)" ?\^ ?\{? ?2 ?\}?', r'"\1\2^2"'),
    (r'"cubic" "(\w+)"|"(\w+)" ?\^ ?\{? ?3 ?\}?', r'"\1\2^3"'),
    (r'"mph"', '"mile" "per" "hour"'), (r'"kph"', '"km" "per" "hour"'), (r'"thousand"', "*1000"),
    (r'"million"', "*10^6"), (r'"billion"', "*10^9"), (r'"trillion"', "*10^12"),
    (r'(?<![\w.\\])(-?[\d.]+) ?_ ?\{? ?"?(\d+|(?<=")[a-z]+)"? ?\}?',
     lambda m: f'{m[1]} "base {_COUNTS.get(m[2], m[2])}" '),
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
    return re.sub(r'^ ?"([a-z]+)"', lambda m: _COUNTS.get(m[1], m[0]), text).strip().rstrip(" .,;")


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

    def refuse(self):
        raise Refused("unparsable")

    @property
    def peek(self):
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted):  # the next token if it is wanted (any, without arguments), "" otherwise
        token = self.peek if not wanted or self.peek in wanted else ""
        self.at += bool(token)
        return token

    def bracket(self, opening):  # the members up to the closing one; in sets one with a plus-minus sign counts twice
        closing, outer, members, many = _BRACKETS[opening], self.closers, [], opening in ("", "\\{")
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
                members += ["|" if separator == ":" else separator] * (separator in _SHAPE)
        pair, self.closers = (opening, self.take()), outer
        if many or opening == "\\matrix" or opening == "{" and len(members) > 1:
            return members[0] if len(members) == 1 else ("matrix" if opening == "\\matrix" else "list", *members)
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
        node = self.prefix()
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
                unfit = token.strip('"') in _NO_UNIT or node[0] == "text"
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
    """The tree of a cleaned answer, None where it has none. What has words and no other reading is text.

    grouped: 1,234 outside brackets is a number, not a list.
    """
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
        self.idle, self.slots, self.spare = [], threading.BoundedSemaphore(CHILDREN), False

    def start(self):
        return subprocess.Popen([sys.executable, CHILD], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def ask(self, lefts, rights):  # does any of lefts mean any of rights? Refused("timeout") past the limits
        with self.slots:
            try:
                child = self.idle.pop(0)  # atomic, as append is
            except IndexError:
                child = self.start()
            try:
                child.stdin.write(json.dumps([lefts, rights]).encode() + b"\n")
                child.stdin.flush()
                poll = select.poll()
                poll.register(child.stdout, select.POLLIN)
                verdict = json.loads(child.stdout.readline() if poll.poll(WALL_SECONDS * 1000) else b"null")
            except (OSError, ValueError):
                verdict = None
            if verdict is None:
                child.kill()
                child.communicate()
            else:
                self.idle.insert(0, child)
            if verdict is None or not self.spare:  # to be used after the next kill: it imports sympy meanwhile
                self.spare = True
                self.idle.append(self.start())
        if verdict is None:
            raise Refused("timeout")
        return verdict


_children = Children()
os.register_at_fork(after_in_child=_children.__init__)  # the pipes belong to the parent


# ---- grading ---------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?(?:\d{1,15}|\d{1,3}(?:,\d{3}){1,4})(?:\.\d{0,15})?|[-+]?\.\d{1,15}")
_CHOICE = re.compile(r"\(([A-Z])\) ?([^\s+\-*/^=<>_,;&|!.:)].*)?|([A-Z])(?:\)|[.:)] (\S.*))?", re.S)
_ANOTHER_CHOICE = re.compile(r"(?<![A-Za-z])\([A-Z]\)|\b(?:or|and) \(?[A-Z]\b|^[A-Z]\)")


def _choice(cleaned):  # letter and text of (B) with or without the text of the option; None for several options
    match = _CHOICE.fullmatch(re.sub(r"[ $]+", " ", cleaned.replace('"', "")).strip())
    rest = match and (match[2] or match[4] or "")
    return None if match is None or _ANOTHER_CHOICE.search(rest) else (match[1] or match[3], rest)


def _approximate(node):  # a float for a value, at one point of its variables; None where its accuracy is in doubt
    name, parts = (node[1], node[2:]) if node[0] == "f" else (node[0], node[1:])
    if name == "n":
        return float(Fraction(parts[0]))
    if name == "v":
        return {"pi": math.pi, "e": math.e}.get(parts[0]) or (
            1 + ord(parts[0]) % 89 / 97 if len(parts[0]) == 1 and parts[0] != "i" else None)
    if name not in ("+", "*", "^", "frac", "sqrt") or len(parts) != 2 - (name == "sqrt"):
        return None
    a, b = (*map(_approximate, parts), 0.5)[:2]
    if a is None or b is None or name in ("^", "sqrt") and (a <= 0 or abs(b) > 1000):
        return None
    if name == "+":
        return a + b if abs(a + b) > 0.05 * abs(a) else None  # cancellation costs digits
    return a * b if name == "*" else a / b if name == "frac" else a ** b


def _far_apart(a, b):  # certainly different, without asking a child: most wrong formulas end here
    try:
        x, y = _approximate(a), _approximate(b)
    except (OverflowError, ZeroDivisionError):
        return False
    return x is not None and y is not None and abs(x - y) > 1e-4 * abs(x) + 1e-4 * abs(y)


def _compare(prediction, gold, shown):  # shown: a prediction may show its work and end with "= value"
    if prediction == gold and gold.strip():
        return True
    if _NUMBER.fullmatch(prediction) and _NUMBER.fullmatch(gold):
        return Fraction(prediction.replace(",", "")) == Fraction(gold.replace(",", ""))
    if max(len(prediction), len(gold)) > MAX_CHARS:
        raise Refused("unparsable")
    a, b = clean(prediction), clean(gold)
    if not _key(a) or not _key(b):
        raise Refused("unparsable")
    if _key(a) == _key(b):
        return True
    x, y = _choice(a), _choice(b)
    if x and y and "" in (x[1], y[1]):
        return x[0] == y[0]
    left, right = ([tree for tree in (parse(t), _GROUPED.search(t) and parse(t, False)) if tree] for t in (a, b))
    if not left or not right:
        raise Refused("unparsable")
    if shown and left[0][:2] == ("rel", "=") and left[0][2][0] in ("^", "f") and right[0][0] != "rel":
        left.append(left[0][3])
    return not all(_far_apart(x, y) for x in left for y in right) and _children.ask(left, right)


def _reason(prediction, gold, shown=False):
    try:
        return "right" if _compare(prediction, gold, shown) else "wrong"
    except Refused as refusal:
        return str(refusal)
    except Exception:  # a grading failure must cost one reward, never the run
        return "unparsable"


def is_equivalent(prediction, gold):
    """True where two bare answers mean the same; symmetric. What cannot be parsed equals only itself. Never raises."""
    return _reason(prediction, gold) == "right"


def grade(text, answer):
    """(right, reason) for a whole completion and a bare reference answer. Never raises, never hangs.

    reason: "right"; "wrong"; "no answer" (no balanced box, or an empty one); "unparsable" (outside the parser's
    language or its limits, and not the same string); "timeout" (the comparison hit its CPU or memory limit).
    """
    prediction = extract_answer(text) if isinstance(text, str) else None
    reason = "no answer" if prediction is None else _reason(prediction, answer, shown=True)
    return reason == "right", reason


def main(path):
    """Grades a file of {"prediction", "gold"} lines to standard output, counts to standard error; returns an error."""
    counts, number = {}, 0
    try:
        for number, line in enumerate(open(path, encoding="utf-8"), 1):
            pair = json.loads(line)
            prediction, gold, start = pair["prediction"], pair["gold"], time.perf_counter()
            verdict, reason = grade(prediction, gold)
            counts[reason] = counts.get(reason, 0) + 1
            ms = round((time.perf_counter() - start) * 1e3, 3)
            print(json.dumps({"verdict": verdict, "reason": reason, "ms": ms}))
    except OSError as error:
        return f"{path}: {error.strerror}"
    except KeyError as field:
        return f"{path}, line {number}: field {field} is missing"
    except (ValueError, TypeError):
        return f"{path}, line {number}: not a JSON object"
    print(", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())), file=sys.stderr)


if __name__ == "__main__":
    if problem := main(sys.argv[1]) if len(sys.argv) == 2 else "usage: python grader.py pairs.jsonl":
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
