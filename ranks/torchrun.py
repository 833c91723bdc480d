"""torchrun, without the traceback that it prints after a rank's own error of one line, and after
Ctrl-C."""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def exit_code() -> int:
    """Run torchrun. Returns the exit code of the rank that failed first, as a shell has it."""
    # these messages are about the processes that torchrun then ends
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(exit_code())
