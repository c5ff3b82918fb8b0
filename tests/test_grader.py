"""grader.py: what counts as right, and what no text may do to it.

The tables come first, hard negatives before easy positives: a wrong answer paid is worse than a right one missed. Then
hostile input, properties of random expressions, fuzzing, the pool of child processes, and the corpora of real answers
(skipped where the shared folder is absent).
"""

import ast
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grader
from grader import extract_answer, grade, is_equivalent

ROOT = Path(__file__).resolve().parent.parent

# prediction :: reference :: what is different
DIFFERENT = r"""
0.333 :: \frac13 :: rounded
0.3333333333333333 :: \frac{1}{3} :: rounded further
3.14 :: \pi :: rounded
2.718281828 :: e :: rounded
\frac{22}{7} :: \pi :: near
\frac{1}{2^{99}} :: \frac{1}{2^{98}} :: tiny numbers that floats make equal
2^{100} :: 2^{100}+1 :: the last digit
\frac{1}{2004!} :: \frac{2}{2004!} :: huge denominators
\sqrt{2}+10^{-40} :: \sqrt{2} :: beyond any floating point
[0,1] :: (0,1) :: brackets
[0,1) :: [0,1] :: one bracket
(0,1) :: 0,1 :: a pair is not a list
(1,2) :: (2,1) :: order of a tuple
(1,234) :: 1234 :: a pair is not a number
1,2,3 :: 123 :: a list is not a number
12,34 :: 1234 :: no thousands separator
1371/2 :: 137\frac{1}{2} :: a lost space
204_6 :: 204_5 :: base
54 :: 204_5 :: converted to base ten
5 \text{ cm} :: 5 \text{ m} :: unit
5\text{ cm}^2 :: 5\text{ cm} :: power of the unit
5 am :: 5 pm :: time of day
3:00 AM :: 3:00 \text{ p.m.} :: time of day, no minutes
7\text{ days} :: 7\text{ weeks} :: unit
\$5 :: 5\text{ cents} :: currency
10\text{ m/s} :: 10\text{ km/h} :: compound unit
5\% :: 50\% :: percent
50\% :: 5 :: percent
5 million :: 5 :: scale word
4+4h :: 8 :: letters are letters
3m :: 3 :: a letter is no unit
9 :: 3m + 6 :: letters are letters
2x :: 2y :: variables
x = 5 :: y = 5 :: variables
\sqrt{x^2} :: x :: sign
|x| :: x :: sign
i :: -i :: sign
-5 :: 5 :: sign
5 or 6 :: 5 :: hedging
5 or 6 :: 6 :: hedging
\{5, 6, 7\} :: 5, 6 :: too many
5 :: 5, 6 :: part of an answer
1, 2, 2 :: 1, 2 :: multiplicity
\pm 3 :: 3 :: one of two
(A) or (B) :: A :: two choices
(A) and (B) :: A :: two choices
A, B :: A :: two choices
(A) 5 (B) 6 :: A :: two choices
(B) :: A :: choice
5\text{ or more} :: 5 :: words that change the value
at least 5 :: 5 :: words that change the value
not 5 :: 5 :: words that change the value
5 less than 3 :: 5 :: words that change the value
5 apples and 3 oranges :: 5 :: two amounts
x < 3 :: x > 3 :: direction
x \ge 3 :: (3, \infty) :: strictness
f(1) < f(2) < f(3) :: f(1) < f(3) < f(2) :: order of a chain
y = 2x + 1 :: y = 2x - 1 :: equation
2x+3y=6 :: 4x+6y=13 :: equation
20x + 23y - 69 = 0 :: 0 :: an equation is not its right side
x^2+y^2=4 :: 4 :: an equation is not its right side
x = 2, y = 3 :: x = 3, y = 2 :: named values
(3,2) :: (x,y) = (2,3) :: named values
(2,3,4) :: x = 2, y = 3 :: a part of the tuple
(1,2) :: \{\} :: the empty set
\begin{pmatrix} 1 & 2 \end{pmatrix} :: \begin{pmatrix} 1 \\ 2 \end{pmatrix} :: shape
[1,2] \cup [3,4] :: [1,4] :: union
\{x | x < 2\} :: (-\infty, 2] :: set builder
\{x : y > 2\} :: (2,\infty) :: set builder
\emptyset :: 0 :: the empty set
\frac{1}{0} :: \infty :: division by zero
\text{undefined} :: 0 :: words
nan :: 0 :: words
night :: thing :: anagram
\text{east} :: \text{west} :: words
October 31 :: \text{October 30} :: date
\frac919 :: \frac9{19} :: TeX takes one token
x_1 :: x_2 :: subscript
1 + 2i :: 1 + 2j :: imaginary unit
101₂ :: 1012 :: a subscript
2ⁿ :: 2n :: a superscript
x₁ :: x1 :: a subscript
log₂8 :: \log 28 :: a subscript
3\text{ sevenths} :: 3 :: a fraction is no unit
5\text{ hundred} :: 5 :: a number is no unit
5 dozen :: 5 :: a number is no unit
\text{five hundred} :: 5 :: a number of two words
\text{one hundred} :: 1 :: a number of two words
\text{nine point five} :: 9 :: a number of three words
\text{two plus three} :: 2 :: an operation
5\text{ squared} :: 5 :: an operation is no unit
5\text{ factorial} :: 5 :: an operation is no unit
5\text{ is wrong} :: 5 :: no unit
5\text{ false} :: 5 :: no unit
5\text{ impossible} :: 5 :: no unit
5\text{ possibly} :: 5 :: doubt
\text{5 January} :: 5 :: a date
5\text{ percent off} :: 5 :: words that change the value
\gcd(m,n) :: 1 :: letters, not polynomials
\gcd(2x,4) :: 2 :: letters, not polynomials
x>1 \text{ and } x<3 :: x>1 \text{ or } x<3 :: and is not or
x<2 \text{ and } x>3 :: (-\infty,2)\cup(3,\infty) :: and is not or
x>0 \text{ and } x<1 :: y>0 \text{ and } y<1 :: variables
(0,1),(2,3) :: (0,1)\cup(2,3) :: points are not intervals
\angle ABC :: \angle ACB :: another vertex
C(5,2) :: P(5,2) :: no points
\emptyset :: \{\emptyset\} :: a set with a member
\infty+1 :: \infty :: no arithmetic with infinity
1,00 :: 1,000 :: no thousands separator
5 \approx 6 :: 5 :: not near
\sin 10^\circ :: \sin 10 :: a degree is no unit there
x+y=3 :: x-y=3 :: equation
2x = 10 :: 10 :: an equation is not its right side
\sqrt{x}\sqrt{y} :: \sqrt{x+y} :: not linear
x\sqrt{y} :: |x|\sqrt{y} :: only y cannot be negative
\ln x^2 :: 2\ln y :: variables
\sqrt2+\sqrt3+\sqrt5 :: \sqrt{10+2\sqrt6+2\sqrt{10}+2\sqrt{15}}+10^{-60} :: beyond any floating point
2\begin{pmatrix} 1 \\ 2 \end{pmatrix} :: \begin{pmatrix} 1 \\ 4 \end{pmatrix} :: a matrix times a number
\frac{1}{1+\sqrt{2}} :: \sqrt{2}+1 :: conjugate
\log 2 :: \ln 2 :: base of the logarithm
"""

SAME = r"""
1/2 :: 0.5
.5 :: 0.50
1{,}000 :: 1000
10\,000 :: 10000
1,234 :: 1, 234
1\frac12 :: \frac32
-2\frac{1}{3} :: -\frac{7}{3}
3 1/2 :: 3.5
0.\overline{9} :: 1
0.1\overline{6} :: 1/6
6.72 \times 10^{-5} :: .0000672
5 million :: 5000000
12 :: 12\text{ cm}
12 cm :: 12\text{ cm}
12\text{ cm} :: 12
90 :: 90^\circ
\frac{\pi}{2} :: 90^\circ
50\% :: 0.5
50\% :: 50
\$5.00 :: 5
204 :: 204_5
10\text{ square units} :: 10\text{ units}^2
60\text{ mph} :: 60\text{ miles per hour}
576\pi :: 576\pi\;m^{2}
12th :: 12
1011_{\text{two}} :: 1011_2
10 \text{ sq. units} :: 10
£5 :: 5
\underline{12} :: 12
{\bf 12} :: 12
{1 \over 2} :: 0.5
{10 \choose 3} :: 120
1.2e3 :: 1200
0.\dot{3} :: 1/3
\lbrace 1,2\rbrace :: \{1,2\}
\text{infinity} :: \infty
D) :: D
\{x \in \mathbb{R} : x > 2\} :: (2,\infty)
3:00 PM :: 3:00 \text{ p.m.}
(x+1)(x-1) :: x^2-1
\frac{x^2-1}{x-1} :: x+1
\sqrt{8} :: 2\sqrt{2}
\sqrt{5+2\sqrt{6}} :: \sqrt2+\sqrt3
\frac{1}{1+\sqrt{2}} :: \sqrt{2}-1
\sqrt[3]{-8} :: -2
(-8)^{1/3} :: -2
\sin 2x :: 2\sin x\cos x
\cos 2x :: 1 - 2\sin^2 x
\sin 30^\circ :: \frac12
\sin^{-1} \frac12 :: \frac{\pi}{6}
\log_2 3 :: \frac{\ln 3}{\ln 2}
e^{2\ln 3} :: 9
e^{i\pi} :: -1
i(2-i) :: 1+2i
\sqrt{x^2} :: |x|
\lfloor \pi \rfloor :: 3
\binom{5}{2} :: \frac{5!}{2!3!}
\gcd(12,18) :: 6
x = 5 :: 5
5 = x :: x = 5
f(x) = x^2 :: x^2
y = 2x + 1 :: y - 2x = 1
2x+3y=6 :: 4x+6y=12
(2,3) :: (x,y) = (2,3)
(2,3) :: y = 3, x = 2
(f(n), g(n)) = (n, 1) :: f(n)=n, g(n)=1
x=2 \text{ and } y=3 :: y=3, x=2
-2 < x \le 5 :: (-2, 5]
-2 \le x \le 7 :: x \in [-2,7]
5 \ge x > -2 :: (-2, 5]
\{x | -2 \le x < 1\} :: [-2,1)
\{x | x = 3k, k \in \mathbb{Z}\} :: \{3k | k \in \mathbb{Z}\}
x \ne 3 :: (-\infty,3)\cup(3,\infty)
\mathbb{R} \setminus \{3\} :: (-\infty,3)\cup(3,\infty)
x \le -1 \text{ or } x \ge 1 :: (-\infty,-1]\cup[1,\infty)
[0,1]\cup[1,2] :: [0,2]
\{(1,2),(3,4)\} :: (3,4),(1,2)
x = \pm 2 :: 2, -2
\frac{-1 \pm \sqrt{5}}{2} :: \frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}
\begin{bmatrix} 0.5 \\ 2 \end{bmatrix} :: \begin{pmatrix} 1/2 \\ 2 \end{pmatrix}
\emptyset :: \{\}
6, 8\text{, and }10 :: 10, 8, 6
\text{two} :: 2
No solutions :: \text{no solution}
\text{A and B} :: \text{B, A}
(C) Plane :: \text{(C)}
B. 3(1+r)^x=7 :: \text{(B)}
3√13 :: 3\sqrt{13}
x² − 1 :: x^2-1
½ :: \frac{1}{2}
**73** :: 73
\(x^2+1\) :: x^2+1
\frac13 \approx 0.33 :: \frac13
101₂ :: 101_2
a₁+x²ⁿ :: a_1+x^{2n}
α + β :: \beta+\alpha
1⁄2 :: \frac12
∛8 :: 2
⌊3.5⌋ :: 3
x⩽3 :: x\le 3
“Yes” :: Yes
75¢ :: 75\text{ cents}
5 apples :: 5
5\text{ times} :: 5
\text{two apples} :: 2
\text{twenty} :: 20
\text{one half} :: \frac12
5\text{ L} :: 5\text{ liters}
(101)_2 :: 101_2
1110_{(2)} :: 1110_2
1110\text{ (base 2)} :: 1110_2
1BF_{16} :: \text{1BF}_{16}
1 = x :: 1
m\angle A=30^\circ :: 30^\circ
\angle CBA :: \angle ABC
\triangle BCA :: \triangle ABC
30^o :: 30^\circ
30^{\text{o}} :: 30^\circ
30^\circ\text{C} :: 30
\sin{30^\circ} :: \frac12
\text{The answer is } 42 :: 42
\text{Answer: }42 :: 42
\text{Option B} :: B
\text{Choice C} :: C
2:30 PM :: 2{:}30\text{ p.m.}
3:00\text{ PM} :: 3\text{ p.m.}
\text{March 3rd} :: \text{March 3}
\text{a right triangle} :: \text{right triangle}
\text{all real numbers} :: \mathbb{R}
f^{-1}(x) = \frac{x-1}{2} :: \frac{x-1}{2}
\text{The point }(3,4) :: (3,4)
P(3,4) :: (3,4)
10 000 :: 10000
1 000 000 :: 1000000
1,\;000 :: 1000
1\text{,}234 :: 1234
\begin{pmatrix} 1 \\ 2 \\ \end{pmatrix} :: \begin{pmatrix} 1 \\[1ex] 2 \end{pmatrix}
\frac15\begin{pmatrix} 3 \\ 4 \end{pmatrix} :: \begin{pmatrix} 3/5 \\ 4/5 \end{pmatrix}
x>0 \text{ and } x<1 :: (0,1)
x<-1, x>1 :: x<-1 \text{ or } x>1
\{-1,3,3\} :: -1,3,3
\gcd(b,a) :: \gcd(a,b)
\frac{\sqrt a}{\sqrt b} :: \sqrt{\frac ab}
\sqrt{ab} :: \sqrt a\sqrt b
\ln\frac ab :: \ln a-\ln b
\ln x^2 :: 2\ln x
\log_{10}2+\log_{10}5 :: 1
\frac{n!}{(n-1)!} :: n
\frac{a}{(a-b)(a-c)}+\frac{b}{(b-a)(b-c)} :: \frac{-c}{(c-a)(c-b)}
\sin x\cos y+\cos x\sin y :: \sin(x+y)
\tan 10^\circ+\tan 50^\circ+\sqrt3\tan 10^\circ\tan 50^\circ :: \sqrt3
\sqrt2+\sqrt3+\sqrt5 :: \sqrt{10+2\sqrt6+2\sqrt{10}+2\sqrt{15}}
\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5} :: 1
\csc 10^\circ-\sqrt3\sec 10^\circ :: 4
"""

# Of a completion, but not of two answers: what it adds, or the work it shows. prediction :: reference :: right?
IN_A_COMPLETION = r"""
18_7 :: 18 :: wrong
204 :: 204_5 :: right
x+y=12 :: 12 :: right
xy=12 :: 12 :: right
m+n=51 :: 51 :: right
x^2+y^2=12 :: 12 :: wrong
-x=5 :: 5 :: wrong
"""


def rows(table):
    return [tuple(line.split(" :: ")) for line in table.strip().splitlines()]


@pytest.mark.parametrize("prediction, gold, what", rows(DIFFERENT))
def test_different(prediction, gold, what):
    assert not grade(f"\\boxed{{{prediction}}}", gold)[0], what
    assert not is_equivalent(gold, prediction)


@pytest.mark.parametrize("prediction, gold", rows(SAME))
def test_same(prediction, gold):
    assert grade(f"\\boxed{{{prediction}}}", gold) == (True, "right")
    assert is_equivalent(gold, prediction), "not symmetric"


@pytest.mark.parametrize("prediction, gold, reason", rows(IN_A_COMPLETION))
def test_in_a_completion(prediction, gold, reason):
    assert grade(f"\\boxed{{{prediction}}}", gold) == (reason == "right", reason)


@pytest.mark.parametrize("text, answer", [
    (r"\boxed{1}, no: \boxed{2}", "2"), (r"\fbox{36}.", "36"), (r"it is $\boxed 2$.", "2"), (r"\boxed{1}}", "1"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{7} and then \boxed{8", "7"), (r"\boxed{ 15" + "\n}", "15"),
    (r"\boxed{x=\boxed{5}}", r"x=\boxed{5}"), (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"<think>\boxed{1}</think> \boxed{3}", "3"), (r"<think>\boxed{1}", "1"),
    (r"<think>\boxed{1}</think> 1", None), (r"\boxed{1} \boxed{}", None), ("1", None),
    ("", None), (r"\boxed{", None), (r"}}{{ \boxed}{ 8", None), (r"\boxedx{3}", None), (r"\boxed{ }", None),
    (None, None)])
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text, answer, reason", [
    (r"\boxed{5}", "5", "right"), (r"\boxed{6}", "5", "wrong"), ("5", "5", "no answer"), (5, "5", "no answer"),
    (None, "5", "no answer"), ([r"\boxed{5}"], "5", "no answer"), (r"\boxed{5", "5", "no answer"),
    (r"\boxed{\text{}}", r"\text{x}", "unparsable"), (r"\boxed{\text{}}", r"\emptyset", "unparsable"),
    (r"\boxed{5}", None, "unparsable"), (r"\boxed{\input{/etc/passwd}}", "5", "unparsable"),
    (r"\boxed{" + "\0" + "5}", "6", "unparsable"), (r"\boxed{" + "\ud800" + "}", "5", "unparsable"),
    (r"\boxed{" + "9" * 100_000 + "}", "9", "unparsable"), (r"\boxed{" + "(" * 400 + "}", "9", "unparsable"),
    (r"\boxed{" + r"\frac" * 150 + "}", "9", "unparsable"), (r"\boxed{x^2^3}", "5", "unparsable"),
    ("\\boxed{\\frac\n59}", r"\frac59", "right"),
    (r"\boxed{1 2}", "12", "unparsable"), (r"\boxed{(x+y)^2=81}", "81", "right")])
def test_reasons_and_malformed_input(text, answer, reason):
    assert grade(text, answer) == (reason == "right", reason)


@pytest.mark.parametrize("bomb", [
    r"9^{9^{9^9}}", r"2^{2^{101}}", r"99999999!", r"\frac{10000000!}{9999999!}", r"((2^{1000})^{1000})^{1000}",
    r"(x+1)^{100000}", r"x^{99999999999999999999}+1", r"\binom{5000}{2500}!", r"e^{e^{e^{e^{e^{10}}}}}",
    "-" * 900 + "1", r"\sin(7^{e^{e^{e^{10e}}}}+1)", r"\log_{2^5}(\log_{2^4}(\log_{2^3}(\log_{2^2}(7^{7^{7}}))))",
    r"\sqrt{" * 30 + "2" + "}" * 30, "+".join(rf"\sqrt{{{k}}}" for k in range(2, 60)),
    r"(1+x+y+z)^{60}(1+x+y)^{60}", ",".join(rf"\sqrt{{{k}}}" for k in range(60)), r"\frac{1}{1+" * 35 + "1" + "}" * 35,
    r"\{" * 30 + "1" + r"\pm1\}" * 30, r"\{(" * 20 + "1" + r"\pm1)\}" * 20, r"\sqrt[" * 90 + "2" + "]2" * 90,
    r"\sqrt" * 190 + "2", "x^{" * 60 + "2" + "}" * 60, r"e^{e^{e^{e^{e}}}}", r"\exp(10^{1000})", r"(x+1)^{10^{9}}",
    r"\lfloor e^{59000}\rfloor", r"\binom{x}{5000}", r"\cup".join(f"({2 * k},{2 * k + 1})" for k in range(40)),
    r"(x+y+z+1)^{400}-((x+1)^2+2(x+1)(y+z)+(y+z)^2)^{200}", "ﷺ" * 999, r"\sqrt{10^{9000}+1}",
    r"\binom{30^\circ \text{ cm}/99999}{5!\cdot y}", r"\binom{e}{30^\circ}"])
def test_bombs_do_not_go_off(bomb):
    grade(r"\boxed{\sin 1}", r"\cos 1")  # a child is there
    start = time.monotonic()
    assert not grade(f"\\boxed{{{bomb}}}", r"\frac{\pi}{7}")[0]
    assert time.monotonic() - start < 5  # 0.2 s on an idle machine: the work limits end them, not the CPU limit


def test_nothing_is_executed(tmp_path):
    canary = tmp_path / "canary"
    for code in (f"__import__('pathlib').Path('{canary}').touch()", f"open('{canary}','w')", "lambda: 5",
                 "().__class__.__bases__[0].__subclasses__()"):
        for form in (code, f"\\text{{{code}}}", f"\\operatorname{{{code}}}(1)"):
            assert not grade(f"\\boxed{{{form}}}", "5")[0]
    assert not list(tmp_path.iterdir())


def test_syntax_tree():
    """No torch, no project file, no evaluation of text, no pickle, no SIGALRM; functions of at most 40 lines."""
    forbidden = {"eval", "exec", "sympify", "parse_expr", "lambdify", "nsimplify", "alarm", "system", "__import__"}
    allowed = {*sys.stdlib_module_names, "sympy", "grader"} - {"pickle", "marshal", "shelve"}
    for node in itertools.chain.from_iterable(
            ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))) for name in ("grader.py", "meaning.py")):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert name not in forbidden and not (name == "compile" and isinstance(node.func, ast.Name)), name
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in allowed and node.level == 0
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 40, node.name
        assert not (isinstance(node, ast.Attribute) and node.attr == "SIGALRM")


def test_import_is_cheap():
    """0.04 s of CPU on an idle machine, no sympy before a comparison needs it, and then only in the child."""
    code = (r"import time; start = time.process_time(); import grader; took = time.process_time() - start; import sys;"
            r"assert grader.grade('\\boxed{\\frac12}', '0.5')[0]; "
            r"heavy = {'sympy', 'torch', 'mpmath'} & set(sys.modules); assert took < 0.25 and not heavy, (took, heavy)")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- properties of random expressions --------------------------------------------------------------------------------

numbers = st.integers(1, 40).map(str)
leaves = st.one_of(numbers, st.sampled_from(["x", "y", r"\pi", r"\sqrt{2}", r"\sqrt{3}"]))


def combined(inner):
    return st.one_of(st.tuples(st.sampled_from(["sum", "product"]), inner, inner),
                     st.tuples(st.just("fraction"), inner, numbers), st.tuples(st.just("square"), inner))


expressions = st.recursive(leaves, combined, max_leaves=6)


def latex(tree, pick=lambda options: options[0]):
    """The expression as LaTeX; pick chooses among spellings that mean the same."""
    if isinstance(tree, str):
        return tree
    kind, *parts = tree
    parts = [latex(part, pick) for part in parts]
    if kind in ("sum", "product") and pick([False, True]):
        parts.reverse()
    left, right = pick([("(", ")"), (r"\left(", r"\right)"), (r"\bigl( ", r"\bigr)")])
    space = pick(["", " ", r"\,", r"\ "])
    if kind == "sum":
        return f"{left}{parts[0]}{space}+{space}{parts[1]}{right}"
    if kind == "product":
        return pick([r"%s\cdot %s", r"%s \times %s", "%s*%s"]) % tuple(parts)
    if kind == "square":
        return pick([r"\left(%s\right)^{2}", "(%s)^2", "(%s)(%s)"]).replace("%s", parts[0])
    return pick([r"\frac{%s}{%s}", r"\dfrac{%s}{%s}", r"\tfrac{%s}{%s}", "(%s)/%s"]) % tuple(parts)


@settings(max_examples=150, deadline=None)
@given(expressions, st.integers())
def test_rewritings_are_equal(tree, seed):
    one, other = latex(tree), latex(tree, random.Random(seed).choice)
    assert is_equivalent(one, one) and is_equivalent(one, other) and is_equivalent(other, one), (one, other)


@settings(max_examples=150, deadline=None)
@given(expressions, st.data())
def test_near_misses_differ(tree, data):
    """A number increased in an expression without minus signs, whose value therefore grows for x, y > 0."""
    text = latex(tree)
    digits = [match for match in re.finditer(r"(?<![\^\d{])\d+(?!\d)", text)]
    if digits:
        match = data.draw(st.sampled_from(digits))
        near = f"{text[:match.start()]}{int(match[0]) + 1}{text[match.end():]}"
        assert not is_equivalent(text, near) and not is_equivalent(near, text), (text, near)
    assert not is_equivalent(text, f"-({text})") and not is_equivalent(text, f"{text}+1"), text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=3, unique=True), st.sampled_from(["()", "[]", "[)", "(]"]))
def test_brackets_and_order(values, brackets):
    inside, (left, right) = ",".join(map(str, values)), brackets
    assert is_equivalent(f"{left}{inside}{right}", rf"\left{left} {inside.replace(',', ', ')} \right{right}")
    for other in {"()", "[]", "[)", "(]"} - {brackets}:
        assert not is_equivalent(f"{left}{inside}{right}", f"{other[0]}{inside}{other[1]}")
    assert not is_equivalent(f"({inside})", f"({','.join(map(str, values[::-1]))})")
    assert is_equivalent(rf"\{{{inside}\}}", ", ".join(map(str, values[::-1])))


@settings(max_examples=100, deadline=None)
@given(st.integers(-10**9, 10**9), st.integers(0, 6))
def test_exact_decimals(numerator, places):
    whole, rest = divmod(abs(numerator), 10**places)
    text = "-" * (numerator < 0) + f"{whole}.{rest:0{places}d}"[:None if places else -2]
    fraction = rf"\frac{{{numerator}}}{{{10**places}}}"
    assert is_equivalent(text, fraction) and not is_equivalent(text, rf"\frac{{{numerator + 1}}}{{{10**places}}}")


# ---- fuzzing ---------------------------------------------------------------------------------------------------------

PIECES = r"""
    \frac \sqrt \sqrt[3] \dfrac \boxed \fbox \text \mathrm \left( \right) \left[ \right] \{ \} { } ( ) [ ] | \pm \mp
    \cdot \times / + - = < > \le \ge \in \cup \cap \setminus ^ _ ! % \% \$ $ , ; : . 0 1 2 7 12 3.5 .5 x y n i e f( g(
    \pi \infty \circ ^\circ \sin \cos^2 \log_2 \ln \arctan \binom \gcd( \lfloor \rfloor \begin{pmatrix} \end{pmatrix}
    & \\ \overline \theta \mathbb{R} \emptyset and or cm dollars \text{cm} \text{and} million th ^{ _{ \, \! \quad ~ '
    ** é √ ² ½ ° ∞""".split() + [" ", "\n", "\0", "\ud800"]
GOLDS = (r"\frac{\sqrt{77}}{1234567}", r"\text{Briana}", r"\left(3141, \frac{\pi}{777}\right)", "98765432101",
         r"\{-7771, 8\sqrt{333}\}", r"\sin x + \frac{y}{7777777}", r"y = 7^{x} + \ln 1234567")
BOXES = (r"\boxed{%s}", r"\boxed{%s}", r"\boxed{1+%s}", r"\boxed{%s", "%s", r"</think>\boxed %s")


FORMS = (r"\{%s\pm %s\}", r"\frac{%s}{%s}", r"\left(%s\right)^{%s}", r"%s+%s", r"%s-%s",
         r"%s\cdot %s", r"\sqrt[%s]{%s}",
         r"\log_{%s}{%s}", r"\binom{%s}{%s}", r"\sin\left(%s\right)\cos(%s)", r"(%s)!+%s", r"%s=%s", r"%s<%s", r"%s,%s",
         r"[%s,%s)\cup\{5\}", r"\{x|%s\le x<%s\}", r"\begin{pmatrix}%s&%s\end{pmatrix}", r"|%s|\pm %s", r"f(%s)=%s",
         r"\lfloor %s\rfloor+\tan^{-1}(%s)", r"e^{%s}-\ln(%s)", r"%s \text{ cm}/%s")
ATOMS = ("0", "1", "-1", "2", "7", "10", "99999", "10^{50}", "0.5", "x", "y", "n", "i", "e", r"\pi", r"\sqrt{2}",
         r"\infty", r"30^\circ", r"0.\overline{3}", r"1\frac{1}{2}", "50\\%", "204_5", "5!", r"\sin x")


def formula(randomness, depth):
    """A well-formed formula, most of them meaningless: the way into sympy."""
    if depth == 0 or randomness.random() < 0.2:
        return randomness.choice(ATOMS)
    return randomness.choice(FORMS) % (formula(randomness, depth - 1), formula(randomness, depth - 1))


def hostile(randomness):
    """A completion: a formula, pieces of LaTeX or raw bytes, of a few characters or up to 100 kB, mostly in a box."""
    size = int(10 ** randomness.uniform(0, 2)) if randomness.random() < 0.97 else int(10 ** randomness.uniform(2, 4.3))
    kind = randomness.random()
    if kind < 0.4:
        body = formula(randomness, randomness.randint(1, 5))
    elif kind < 0.8:
        body = "".join(randomness.choices(PIECES, k=size))
    else:
        raw = bytes(randomness.choices(range(256), k=size * 5))
        body = raw.decode(randomness.choice(["latin-1", "utf-8"]), "replace")
    return randomness.choice(BOXES) % body[:100_000]


def kilobytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def fuzz(count, seed):
    """Grades count hostile texts against references they cannot hit; the longest time, memory and reasons."""
    randomness, longest, reasons = random.Random(seed), 0.0, {}
    grade(r"\boxed{\sin 1}", r"\cos 1")
    for number in range(count):
        text = hostile(randomness)
        start = time.perf_counter()
        right, reason = grade(text, GOLDS[number % len(GOLDS)])
        longest = max(longest, time.perf_counter() - start)
        reasons[reason] = reasons.get(reason, 0) + 1
        assert not right, text
    return longest, reasons, [kilobytes(child.pid) for child in grader._children.idle]


def test_fuzz_short():
    longest, reasons, children = fuzz(1500, seed=1)
    assert longest < 5 and set(reasons) <= {"wrong", "no answer", "unparsable", "timeout"}  # 1 s on an idle machine
    assert all(memory < 1_100_000 for memory in children)


@pytest.mark.slow
def test_fuzz_long():
    """100,000 texts, some minutes. Run with -s for the figures."""
    before = kilobytes(os.getpid())
    longest, reasons, children = fuzz(100_000, seed=2)
    after = kilobytes(os.getpid())
    print(f"\nlongest {longest:.2f} s, {reasons}, parent {before} -> {after} kB, children {children} kB")
    assert longest < 5 and after < before + 200_000 and all(memory < 1_100_000 for memory in children)  # 1 s if idle


# ---- the child processes ---------------------------------------------------------------------------------------------

def test_threads():
    """Eight threads at once: every verdict is right and no more children than allowed are left."""
    pairs = [(rf"\sin^2 x + \cos^2 x + {k}", f"{k + 1 + k % 2}", k % 2 == 0) for k in range(40)]
    results = {}

    def work(part):
        for prediction, gold, _ in pairs[part::8]:
            results[prediction] = is_equivalent(prediction, gold)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[prediction] for prediction, _, _ in pairs] == [expected for _, _, expected in pairs]
    assert len(grader._children.idle) <= 2 * grader.CHILDREN


def test_a_killed_child_is_replaced():
    """Another program kills them all: no right answer is lost."""
    assert is_equivalent(r"\tan x", r"\frac{\sin x}{\cos x}")
    for child in list(grader._children.idle):
        os.kill(child.pid, signal.SIGKILL)
    assert [grade(r"\boxed{\tan x}", r"\frac{\sin x}{\cos x}")[1] for _ in range(4)] == ["right"] * 4


@pytest.mark.parametrize("work, reason", [
    ("while True: pass", "timeout"), ("x = [0] * 10**9", "timeout"), ("os.kill(os.getpid(), 9)", "timeout"),
    ("if os.path.exists(path): print('\"right\"', flush=True)\n"
     "else: open(path, 'w'); os.kill(os.getpid(), 9)", "right")])
def test_the_ends_of_a_child(monkeypatch, tmp_path, work, reason):
    """Of its own limits: timeout at once. Killed by others: asked for again, once."""
    started, children = [], grader.Children()
    code = (f"import os, resource, signal, sys\npath = {str(tmp_path / 'asked')!r}\nsys.stdin.readline()\n"
            f"resource.setrlimit(resource.RLIMIT_AS, (grader_bytes := {grader.CHILD_BYTES}, grader_bytes))\n"
            f"signal.setitimer(signal.ITIMER_PROF, 0.2)\n{work}")

    def start():
        started.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL))
        return started[-1]

    monkeypatch.setattr(children, "start", start)
    assert children.ask("1", "2", True) == reason
    for child in started:
        child.kill()
        child.communicate()


def test_work_is_limited_before_time():
    """Equal, and the proof has no end: a count of calls ends it, in the same child. The CPU limit is for accidents."""
    grade(r"\boxed{\sin 1}", r"\cos 1")
    before = {child.pid for child in grader._children.idle}
    assert grade(r"\boxed{\sqrt{\frac{1-\cos x}{2}}}", r"|\sin\frac{x}{2}|")[1] == "timeout"
    assert before == {child.pid for child in grader._children.idle}


def test_the_costliest_accepted_comparisons():
    """Their CPU time is a tenth of the limit, so no load turns one into a timeout: 0.08 s at most if it is idle."""
    code = r"""
import time, meaning
from grader import CPU_SECONDS, clean
asker, worst = meaning.Meaning(), 0
for pair in meaning._WARM_UP:
    asker.reason(*map(clean, pair), True)
for pair in ((r"\sin x\cos y+\cos x\sin y", r"\sin(x+y)"), (r"\tan^2 y+1", r"\sec^2 y"),
             (r"\cos 4x", r"8\cos^4x-8\cos^2x+1"),
             (r"\frac{5}{1+\sqrt[3]{32\cos^4 15^\circ-10-8\sqrt{3}}}", r"1-\sqrt[3]{4}+\sqrt[3]{16}"),
             (r"\frac{a}{(a-b)(a-c)}+\frac{b}{(b-a)(b-c)}+\frac{c}{(c-a)(c-b)}", "0"),
             (r"\sin 3^\circ+\sin 57^\circ", r"\sin 63^\circ"), (r"\cos 1^\circ+\cos 119^\circ", r"\cos 59^\circ")):
    start = time.process_time()
    assert asker.reason(*map(clean, pair), True) == "right", pair
    worst = max(worst, time.process_time() - start)
print(f"factor {CPU_SECONDS / worst:.1f}")
assert worst < CPU_SECONDS / 3, worst  # a tenth if idle"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)  # -s shows the factor


@pytest.mark.parametrize("ending", ["sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_orphans(ending):
    code = ("import os, signal, sys, grader; grader.is_equivalent('\\\\sin 1', '\\\\cos 1'); "
            f"print(*[c.pid for c in grader._children.idle], flush=True); {ending}")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert out
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in out):
        assert time.monotonic() < deadline, "a child outlived its parent"
        time.sleep(0.05)


def test_fork():
    """After a fork both processes grade, each with children of its own."""
    assert is_equivalent(r"\tan x", r"\frac{\sin x}{\cos x}")
    code = r"""
import os, grader
assert grader.is_equivalent(r"\tan x", r"\frac{\sin x}{\cos x}")
pid = os.fork()
good = grader.is_equivalent(r"\sin 2x", r"2\sin x\cos x") and not grader.is_equivalent(r"\sin x", r"\cos x")
if pid == 0:
    os._exit(0 if good else 1)
assert os.waitpid(pid, 0)[1] == 0 and good"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# ---- the command line ------------------------------------------------------------------------------------------------

def run(*arguments):
    return subprocess.run([sys.executable, "grader.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)


def test_command_line(tmp_path):
    pairs = [(r"\boxed{1/2}", "0.5"), (r"\boxed{2}", "0.5"), ("2", "2")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"prediction": p, "gold": g}) + "\n" for p, g in pairs))
    result = run(tmp_path / "pairs.jsonl")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0 and [(line["verdict"], line["reason"]) for line in lines] == [
        (True, "right"), (False, "wrong"), (False, "no answer")]
    assert all(line["ms"] >= 0 for line in lines) and result.stderr.strip() == "1 no answer, 1 right, 1 wrong"


@pytest.mark.parametrize("content, message", [
    (None, "No such file"), ("{}\n", "line 1: field 'prediction' is missing"),
    ('{"prediction": "1"}', "line 1: field 'gold' is missing"),
    ('{"prediction": "1", "gold": "1"}\n\n{oops\n', "line 3: not a JSON object"), ("3\n", "line 1: not a JSON object"),
    ("[" * 200_000, "line 1: not a JSON object"), (b"\xff\xfe{}", "line 1: not a JSON object")])
def test_command_line_mistakes(tmp_path, content, message):
    path = tmp_path / "pairs.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run(path)
    assert result.returncode == 2 and result.stderr.startswith(f"error: {path}") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_command_line_ends_quietly(tmp_path):
    """An empty file has no pairs; | head has enough after a line; blank lines are no pairs."""
    (tmp_path / "empty.jsonl").touch()
    assert run(tmp_path / "empty.jsonl").stderr.strip() == "no pairs"
    (tmp_path / "many.jsonl").write_text('\n{"prediction": "", "gold": "1"}\n' * 20_000)
    result = subprocess.run(f"{sys.executable} grader.py {tmp_path}/many.jsonl | head -1", shell=True, cwd=ROOT,
                            capture_output=True, text=True)
    assert "no answer" in result.stdout and "error" not in result.stderr and "Traceback" not in result.stderr


# ---- corpora ---------------------------------------------------------------------------------------------------------

def corpus(shared, name):
    path = shared / "grader" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is absent: set RLOO_SHARED")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name, least", [("identity", 1), ("nearmiss", 1), ("rewrites", 0.995)])
def test_answers(shared, name, least):
    found = corpus(shared, name)
    wrong = [row["id"] for row in found if grade(f"\\boxed{{{row['answer']}}}", row["gold"])[0] != row["expected"]]
    assert len(wrong) <= (1 - least) * len(found), wrong


def test_cases(shared):
    wrong, slow = [], []
    grade(r"\boxed{\sin 1}", r"\cos 1")
    for row in corpus(shared, "cases"):
        start = time.process_time()
        wrong += [row["id"]] * (grade(row["prediction"], row["gold"])[0] != row["expected"])
        slow += [row["id"]] * (time.process_time() - start > 0.1)
    assert not wrong and len(slow) <= 3


def test_real_responses(shared):
    found = corpus(shared, "real_pairs")
    verdicts = [(row, grade(row["response"], row["gold"])[0]) for row in found]
    paid = [row["id"] for row, right in verdicts if right and not row["truth"]]
    missed = [row["id"] for row, right in verdicts if row["truth"] and not right]
    assert not paid and len(missed) <= 0.003 * len(found), (paid, missed)


def test_training_references(shared):
    """Every MATH reference is right in its own solution. Two solutions end with an empty box: no reference."""
    path = shared / "data" / "math_train.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is absent: set RLOO_SHARED")
    solutions = [json.loads(line)["solution"] for line in path.read_text(encoding="utf-8").splitlines()]
    references = [extract_answer(solution) for solution in solutions]
    assert references.count(None) <= 2
    assert all(grade(solution, reference)[0] for solution, reference in zip(solutions, references) if reference)
    assert all(grader.parse(grader.clean(reference)) for reference in references if reference)
