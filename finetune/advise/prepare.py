"""`finetune prepare`: everything is tokenised before training, on the CPU, without a model and a process group."""

import sys
from collections.abc import Sequence
from pathlib import Path

from finetune.advise.audit_tables import print_audit
from finetune.advise.prepare_progress import progress_shown
from finetune.advise.preview import without_limits
from finetune.config.load import load_config
from finetune.data.audit.audit import Streamed
from finetune.data.prepared.shares import REMEDY
from finetune.errors import DataError
from finetune.report.announcer import Announcer
from finetune.run.audit import audit_lessons
from finetune.run.lessons import make_lessons
from finetune.run.verifying import mend_sets
from finetune.runtime.log import quieten


def prepare(path: Path, overrides: Sequence[str]) -> None:
    """Tokenise what the job learns from and is evaluated on, print the audit, and say what training will find.

    What is cut off by a kill or Ctrl-C goes on at the next start. Raises ConfigError and DataError as training does,
    for shares above the limits of `data.audit` once the audit is printed.
    """
    quieten(is_main=True)
    config = load_config(path, overrides).config
    try:
        with progress_shown() as (say, watch):
            lessons = make_lessons(without_limits(config), Announcer(is_main=True, write=say), watch=watch)
            mend_sets(lessons)
    except KeyboardInterrupt:
        print("what is tokenised is kept: the same command goes on where it stopped", file=sys.stderr)
        raise
    audit = audit_lessons(config, lessons)
    print()
    print_audit(audit)
    if audit.exceeded:
        raise DataError(f"training with this job stops here: {'; '.join(map(str, audit.exceeded))} {REMEDY}")
    streams = [key for key, source in lessons.sources.items() if isinstance(source, Streamed)]
    for key in streams:
        print(f"{key} is a stream: it is tokenised while the model trains")
    if len(streams) < len(lessons.sources) or lessons.validation_set is not None:
        print("training with this job finds what is tokenised and does not do it again")
