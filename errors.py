"""The one error type for mistakes a user can mend, and the one place that turns it into an exit status.

It has a file of its own because model.py, data.py and fsdp_utils.py all raise it and must not import each other.
"""

import functools
import os
import sys


class UserError(Exception):
    """A wrong flag, file or value. The message is one line: what is wrong, where, and what to do."""


def exits_cleanly(main):
    """Wraps a command's main(): a UserError is printed once a node (by its first process) and every process exits 2."""

    @functools.wraps(main)
    def wrapper(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"error: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(2)  # not sys.exit: interpreter shutdown would wait for peers that wait for us

    return wrapper
