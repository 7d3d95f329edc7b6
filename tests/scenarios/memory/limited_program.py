"""A run of `finetune` whose ranks may take MEGABYTES more from when the longest batch is tried, or would be.

`limited_program.py MEGABYTES[,MEGABYTES of rank 1,...] WORDS...`: the limit is one of the data segment (RLIMIT_DATA),
beyond which torch's allocator raises an error. `0` is no limit. `datasets`, which Accelerate imports with the loader of
several processes, is imported before: pyarrow reserves a gigabyte of addresses that it does not use.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import datasets  # noqa: F401

from finetune.__main__ import main
from finetune.run import train as run

resolve = run.resolve_microbatch_size


def limited(*values: Any, **named: Any) -> Any:
    own = int(os.environ.get("RANK", "0"))
    if megabytes := LIMITS[min(own, len(LIMITS) - 1)]:
        line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmData"))
        limit = 1024 * int(line.split()[1]) + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return resolve(*values, **named)


if __name__ == "__main__":
    LIMITS = [int(each) for each in sys.argv[1].split(",")]
    run.resolve_microbatch_size = limited  # type: ignore[assignment]
    del sys.argv[1]
    main()
