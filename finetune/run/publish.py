"""What a run leaves in `final/` goes to the hub, where its job asks for that; a failure to do so fails no training."""

from collections.abc import Callable
from pathlib import Path

from finetune.config.load import LoadedConfig
from finetune.errors import HubError
from finetune.export.push import push_folder
from finetune.run.over import FOLDER, RECORD, read_record
from finetune.runtime import files, ranks
from finetune.runtime.redact import redacted_text


def publish_final(loaded: LoadedConfig, *, say: Callable[[str], None] = print) -> None:
    """Upload `final/` once, from the main process; say where it is, or warn why it is not. No collective.

    The record beside `final/` keeps the answer, and the same command tries again what has failed.
    """
    section, run = loaded.config.export, Path(loaded.config.run.folder)
    if section.push_to_hub is None or not ranks.is_main() or (record := read_record(run)) is None:
        return
    if record.get("pushed_to") == redacted_text(section.push_to_hub):
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
