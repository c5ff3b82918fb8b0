"""train.py with a fault planted in one rank, for tests/test_train.py:

    torchrun --nproc_per_node 2 tests/workers_train.py RANK STEP <flags of train.py>

On that rank the sampling of that step raises, as a full disk, a broken kernel or a bug would.
"""

import os
import sys

import workers_common  # noqa: F401  puts the project on the path

import train


def main(rank, step, flags):
    healthy, calls = train.attempt, []

    def attempt(*args, **options):
        calls.append(step)
        if int(os.environ["RANK"]) == rank and len(calls) == step:
            raise RuntimeError("planted fault: the sampler broke")
        return healthy(*args, **options)

    train.attempt = attempt
    train.main(flags)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
