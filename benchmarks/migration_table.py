"""Print what `finetune init --from` makes of a folder of configs of other trainers: a table, and what is not possible.

    python benchmarks/migration_table.py FOLDER [--each]

Every `.yaml`, `.yml` and `.json` file below the folder is read; those in a folder with a peer's name are read as its.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.migration.migrate import PEERS, Migration, migrate_file

FATES = ("mapped", "not_needed", "not_possible", "unknown")


def configs(folder: Path) -> Iterator[tuple[str | None, Path]]:
    """Yield each config and the peer that the name of a folder above it says."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".yaml", ".yml", ".json"):
            yield next((part for part in path.parts if part in PEERS), None), path


def is_without_loss(migration: Migration) -> bool:
    draft = migration.draft
    return not draft.keys_of("not_possible") and not draft.keys_of("unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", action="store_true", help="also print what is not possible, file by file")
    options = parser.parse_args()
    rows: dict[str, Counter[str]] = {}
    for peer, path in configs(options.folder):
        try:
            migration = migrate_file(path, peer=peer)
        except FinetuneError as error:
            print(f"{path}: {error}")
            continue
        draft = migration.draft
        row = rows.setdefault(migration.title, Counter())
        row["files"] += 1
        row["keys"] += len(draft.file.leaves)
        row.update({fate: len(draft.keys_of(fate)) for fate in FATES})  # type: ignore[arg-type]
        row["lost"] += len(draft.file.leaves.keys() - draft.outcomes.keys())
        row["check"] += not migration.problems
        row["in scope"] += not draft.out_of_scope
        row["without loss"] += not draft.out_of_scope and is_without_loss(migration)
        if options.each and (draft.out_of_scope or not is_without_loss(migration)):
            keys = ", ".join([*draft.keys_of("not_possible"), *draft.keys_of("unknown")])
            print(f"{path.name}: {f'out of scope ({draft.out_of_scope}): ' if draft.out_of_scope else ''}{keys}")
    columns = ("files", "keys", *FATES, "lost", "check", "in scope", "without loss")
    rows["all"] = sum(rows.values(), Counter())
    print(f"{'peer':<22}" + "".join(f"{column:>13}" for column in columns))
    for title, row in rows.items():
        print(f"{title:<22}" + "".join(f"{row[column]:>13,}" for column in columns))


if __name__ == "__main__":
    main()
