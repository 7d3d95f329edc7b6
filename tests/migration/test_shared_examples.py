"""The examples that other trainers ship, where they lie next to the checkout."""

from pathlib import Path

import pytest

from finetune.migration.migrate import migrate_file

EXAMPLES = Path(__file__).parents[3] / "shared" / "data" / "peer_configs"


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason=f"there are no examples of other trainers in {EXAMPLES}")
def test_every_key_of_the_examples_is_mapped_or_named_and_each_job_checks():
    files = [path for path in sorted(EXAMPLES.glob("*/*")) if path.suffix in (".yaml", ".yml")]
    assert len(files) >= 90
    in_scope = without_loss = 0
    for path in files:
        migration = migrate_file(path)
        draft = migration.draft
        assert not migration.problems, path.name
        assert draft.keys_of("unknown") == [], path.name
        assert draft.outcomes.keys() == draft.file.leaves.keys(), path.name
        in_scope += not draft.out_of_scope
        without_loss += not draft.out_of_scope and not draft.keys_of("not_possible")
    assert without_loss >= 70 and in_scope > 80
