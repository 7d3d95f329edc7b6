"""What a run leaves in `final/` goes to the hub, where its job asks for that; a failure to do so fails no training."""

import json
from collections.abc import Callable
from pathlib import Path

from finetune.config.load import LoadedConfig
from finetune.errors import HubError
from finetune.export.push import push_folder
from finetune.run.over import FOLDER, RECORD
from finetune.runtime import files, ranks


def publish_final(loaded: LoadedConfig, *, say: Callable[[str], None] = print) -> None:
    """Upload `final/` once, from the main process; say where it is, or warn why it is not. No collective.

    The record beside `final/` keeps the answer, and the same command tries again what has failed.
    """
    section, run = loaded.config.export, Path(loaded.config.run.folder)
    if section.push_to_hub is None or not ranks.is_main() or not (run / RECORD).is_file():
        return
    record = json.loads((run / RECORD).read_text(encoding="utf-8"))
    if record.get("pushed_to") == section.push_to_hub:
        return
    try:
        address = push_folder(run / FOLDER, section.push_to_hub, private=section.private)
    except HubError as error:
        say(f"warning: export.push_to_hub: {error}")
        record |= {"pushed_to": None, "push_problem": str(error)}
    else:
        say(f"uploaded to {address}")
        record |= {"pushed_to": section.push_to_hub, "push_problem": None}
    files.write_json(run / RECORD, record)
