"""The time of grader.py against Math-Verify on the same full responses, interleaved in one run, one process each.

    python bench/bench_grader.py [--pairs real_pairs.jsonl] [--limit N] [--repeats 1]

Math-Verify is optional (`pip install math-verify`); without it only our own times are printed. It is called as its
documentation says: both texts parsed with the default extraction, then verified, with its own time limits. Each pair is
graded by one and directly afterwards by the other, so load on the machine meets both. Start-up (imports, our child
process) is not counted for either: both grade a warm-up pair first.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grader  # noqa: E402


def math_verify():
    """A function (response, gold) -> bool, None where Math-Verify is not installed."""
    try:
        from math_verify import parse, verify
    except ImportError:
        return None
    logging.disable(logging.CRITICAL)  # it logs every time limit it hits

    def judge(response, gold):
        return verify(parse(f"\\boxed{{{gold}}}"), parse(response))

    return judge


def timed(function, *arguments):
    start = time.perf_counter()
    try:
        verdict = function(*arguments)
    except Exception:
        verdict = False
    return bool(verdict), (time.perf_counter() - start) * 1e3


def p99(times):
    return sorted(times)[int(len(times) * 0.99)]


def row(name, times):
    return (f"{name:12} mean {statistics.fmean(times):9.3f} ms   median {statistics.median(times):8.3f} ms   "
            f"p99 {p99(times):9.3f} ms   longest {max(times):9.1f} ms")


def compare(pairs, repeats):
    """Times and agreement with the settled verdicts, per contestant; the least time of the repeats of each pair."""
    contestants = {"grader.py": lambda response, gold: grader.grade(response, gold)[0]}
    judge = math_verify()
    if judge:
        contestants["Math-Verify"] = judge
    else:
        print("Math-Verify is not installed (pip install math-verify): only grader.py is timed", file=sys.stderr)
    times, right = {name: [] for name in contestants}, dict.fromkeys(contestants, 0)
    for function in contestants.values():
        timed(function, r"\boxed{\tan x}", r"\frac{\sin x}{\cos x}")
        timed(function, r"\boxed{\tan y}", r"\frac{\cos y}{\sin y}")
    for pair in pairs:
        for name, function in contestants.items():
            runs = [timed(function, pair["response"], pair["gold"]) for _ in range(repeats)]
            times[name].append(min(ms for _, ms in runs))
            right[name] += runs[0][0] == pair["truth"]
    return times, right


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared = Path(os.environ.get("RLOO_SHARED") or ROOT.parent / "shared")
    parser.add_argument("--pairs", type=Path, default=shared / "grader" / "real_pairs.jsonl",
                        help='lines with "response", "gold" and "truth"')
    parser.add_argument("--limit", type=int, default=None, help="only the first N pairs")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each pair; the fastest counts")
    options = parser.parse_args()
    if not options.pairs.is_file():
        print(f"error: {options.pairs} does not exist: name a file with --pairs or set RLOO_SHARED", file=sys.stderr)
        sys.exit(2)
    pairs = [json.loads(line) for line in options.pairs.read_text(encoding="utf-8").splitlines()][:options.limit]
    times, right = compare(pairs, options.repeats)
    for name, values in times.items():
        print(f"{row(name, values)}   right {right[name]} of {len(pairs)}")
    if len(times) == 2:
        ours, theirs = times["grader.py"], times["Math-Verify"]
        measures = {"mean": statistics.fmean, "median": statistics.median, "p99": p99}
        ratios = ", ".join(f"{name} {measure(theirs) / measure(ours):.1f}" for name, measure in measures.items())
        print(f"Math-Verify / grader.py: {ratios}")


if __name__ == "__main__":
    main()
