"""How the commands speak to people: the one error type for user mistakes, the parser, progress, exit status.

It has a file of its own because model.py, data.py and fsdp_utils.py all raise the error and must not import each other.
"""

import argparse
import difflib
import functools
import os
import signal
import sys
import time
import traceback

from tqdm import tqdm


class UserError(Exception):
    """A wrong flag, file or value. The message is one line: what is wrong, where, and what to do."""


class CommandLine(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UserErrors, that shows the module docstring as it is written."""

    def __init__(self, description, **options):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=layout, allow_abbrev=False, **options)

    def error(self, message):
        raise UserError(f"{message}; see python {self.prog} --help")

    def parse_args(self, argv=None):
        """As in argparse, but an unknown argument is met with the nearest one there is."""
        args, unknown = self.parse_known_args(argv)
        for text in (text for text in argv or () if text != text.encode(errors="replace").decode()):
            self.error(f"an argument is not UTF-8: {printable(text)[:80]}")
        for name in (argument.partition("=")[0] for argument in unknown):
            self.error(f"unknown argument {name}{nearest(name, self._option_string_actions)}")
        return args


def nearest(name, known):
    """" (nearest: ...)" where one of the known names is like `name`, else ""."""
    found = difflib.get_close_matches(name, known, 1)
    return f" (nearest: {found[0]})" if found else ""


class Progress:
    """Shows how far `generate` is: a bar on a terminal, elsewhere a line every half a minute.

    Use it as a context, and as the `progress` callback of `generate`. total: completions of this process.
    """

    def __init__(self, title, total, shown):
        self.title, self.total, self.shown = title, total, shown
        self.bar = tqdm(total=self.total, desc=title, leave=False, disable=not (shown and sys.stderr.isatty()),
                        bar_format="{desc} {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt}{postfix}")  # fmt: skip
        self.start = self.said = time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.bar.close()

    def __call__(self, finished, alive, tokens):
        now = time.perf_counter()
        text = f"{alive} alive, {self.total - finished - alive} waiting, {tokens / (now - self.start):,.0f} tok/s"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(finished - self.bar.n)
        if self.shown and self.bar.disable and now - self.said > 30:
            self.said = now
            print(f"{self.title}: {finished} of {self.total}, {text}", flush=True)


def printable(text):
    """Text of a model or a file for a terminal: control characters, which could steer it, come out escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def exits_cleanly(main):
    """Wraps a command's main(): under torchrun the process ends with it; a UserError is printed once a node, exit 2.

    Any other error is printed by the process it hit, which leaves at once; torchrun then ends the others.
    """

    @functools.wraps(main)
    def wrapper(*args, **kwargs):
        try:
            main(*args, **kwargs)
            if "RANK" in os.environ:
                _leave(0)  # a thread of the process group that outlives it once aborted a run that had finished
        except (UserError, FloatingPointError) as error:  # a model whose numbers are no numbers is bad input, too
            if os.environ.get("LOCAL_RANK", "0") != "0":
                # The node's first process prints, then torchrun ends this one. To leave before that would end that one
                # unheard; and if it has no error of its own, this one speaks.
                signal.signal(signal.SIGTERM, lambda *_: _leave(2))
                time.sleep(5)
            print(f"error: {error}", file=sys.stderr, flush=True)
            _leave(2)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
            _leave(130)
        except Exception:
            if "RANK" not in os.environ:
                raise
            print(f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            _leave(1)

    return wrapper


def _leave(status):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: interpreter shutdown may wait for peers that wait for us
