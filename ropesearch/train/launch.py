"""`python -m ropesearch.train.launch ...`: torchrun with the same words, that ends with what its processes ended with.

torchrun itself ends with 1 whatever happens, so a batch script could not tell a stop (75: ask for the same again) from
an error. It also would not heed SIGUSR2, which schedulers are told to send before a time limit.
"""

import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ropesearch.stopping import INTERRUPTED, STOPPED

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun; returns 75 when it or one of its processes was stopped, 130 when it was interrupted, else the exit
    code of the process that failed first, 0 when all came to their end."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        run.main([f"--signals-to-handle={_SIGNALS}", *words])
    except SignalException as stopped:
        return INTERRUPTED if stopped.sigval is signal.SIGINT else STOPPED
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]
        if STOPPED in codes:
            return STOPPED
        _, first = failed.get_first_failure()
        code = int(first.exitcode)
        return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main())
