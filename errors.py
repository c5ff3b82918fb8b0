"""The one error type for mistakes a user can mend, and the one place that turns errors into an exit status.

It has a file of its own because model.py, data.py and fsdp_utils.py all raise it and must not import each other.
"""

import functools
import os
import signal
import sys
import time
import traceback


class UserError(Exception):
    """A wrong flag, file or value. The message is one line: what is wrong, where, and what to do."""


def exits_cleanly(main):
    """Wraps a command's main(): a UserError is printed once a node and every process exits 2.

    Any other error is printed by the process it hit, which leaves at once; torchrun then ends the others.
    """

    @functools.wraps(main)
    def wrapper(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except UserError as error:
            if os.environ.get("LOCAL_RANK", "0") != "0":
                # The node's first process prints, then torchrun ends this one. To leave before that would end that one
                # unheard; and if it has no error of its own, this one speaks.
                signal.signal(signal.SIGTERM, lambda *_: _leave(2))
                time.sleep(5)
            print(f"error: {error}", file=sys.stderr, flush=True)
            _leave(2)
        except Exception:
            if "RANK" not in os.environ:
                raise
            print(f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            _leave(1)

    return wrapper


def _leave(status):
    sys.stdout.flush()
    os._exit(status)  # not sys.exit: interpreter shutdown may wait for peers that wait for us
