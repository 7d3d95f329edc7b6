"""Every key of every table has an outcome, whatever its value, and nothing is in two places."""

import itertools
import random

import pytest
from ruamel.yaml import YAML

from finetune.config.schema import node_at
from finetune.migration.migrate import PEERS, migrate_file
from finetune.migration.rules import NoCounterpart

VALUES = (
    *(None, True, False, 0, 1, 2, 0.1, 1e-4, 100, "", "x", "lora", "bf16", "dpo", "cosine", "epoch", "steps", "no"),
    *([], ["a", "b"], ["sigmoid", "sft"], "org/name", "org/a,org/b", "torchtune.x.lora_y", "none", "auto", -1, 4, 8),
    *(["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"], "train", "last", "./rows.jsonl"),
)


@pytest.mark.parametrize("name", PEERS)
def test_each_key_of_a_table_names_a_key_of_ours_or_a_reason(name):
    assert len(PEERS[name].table.rules) > 60
    for key, rule in PEERS[name].table.rules.items():
        if rule.kind == "key":
            assert node_at(rule.name) is not None, f"{key}: there is no key {rule.name}"
        elif rule.kind != "fact":
            assert rule.why.rstrip(".)`") and not rule.why.endswith(" "), key


@pytest.mark.parametrize("name", PEERS)
def test_each_key_that_a_trainer_s_own_package_has_is_in_its_table(name):
    table = PEERS[name].table
    assert len(table.known_keys) > 100
    assert [key for key in sorted(table.known_keys) if table.find(key) is None] == []


def nested(key, value):
    """Return a config with one key: `a[].b` in a list of one section."""
    for part in reversed(key.split(".")):
        value = {part.removesuffix("[]"): [value] if part.endswith("[]") else value}
    return value


def merged(one, other):
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return (
            [merged(one[0], other[0])] if isinstance(one, list) and isinstance(other, list) and one and other else one
        )
    return {
        key: merged(one[key], other[key]) if key in one and key in other else one.get(key, other.get(key))
        for key in one | other
    }


@pytest.mark.full
@pytest.mark.parametrize("name", PEERS)
def test_configs_of_random_keys_and_values_lose_none(name, tmp_path):
    chance = random.Random(name)
    keys = [key.replace(".*", ".other") for key in PEERS[name].table.rules]
    path = tmp_path / "theirs.yaml"
    num_leaves = 0
    for _ in range(60):
        chosen = chance.sample(keys, k=min(len(keys), 40))
        config = {"learning_rate": 1e-4, "surely_unknown": 1}
        for key in chosen:
            config = merged(config, nested(key, chance.choice(VALUES)))
        with path.open("w") as file:
            YAML(typ="safe").dump(config, file)
        migration = migrate_file(path, peer=name)
        fates = [set(migration.draft.keys_of(fate)) for fate in ("mapped", "not_needed", "not_possible", "unknown")]
        assert set.union(*fates) == set(migration.draft.file.leaves)
        assert all(not one & other for one, other in itertools.combinations(fates, 2))
        assert "surely_unknown" in fates[3]
        num_leaves += len(migration.draft.file.leaves)
    assert num_leaves > 1000


def test_converters_refuse_values_of_other_types_with_a_message():
    for peer in PEERS.values():
        for key, rule in peer.table.rules.items():
            for value in ("text that is no value", [1, {}], {"a": 1}, True, -5):
                try:
                    rule.convert(value)
                except NoCounterpart as error:
                    assert str(error), key


def test_reasons_of_facts_without_a_key_are_sentences_without_an_end():
    for peer in PEERS.values():
        assert all(reason and not reason.endswith(".") for reason in peer.table.left_over.values())


def test_a_section_that_lacks_keys_keeps_those_that_it_has(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text("tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer}\nbatch_size: 2\n")
    migration = migrate_file(path)
    assert {problem.key for problem in migration.problems} >= {"data.train", "model"}
    assert migration.draft.entries["train.microbatch_size"].value == 2


def test_characters_that_end_a_line_stay_within_their_comment(tmp_path):
    path = tmp_path / "theirs.yaml"
    text = 'base_model: a/b\ndatasets: [{path: a/b}]\n"evil\\u2028run: 1": "x\\u2028train: 2"\n'
    text += 'output_dir: "a\\u2028b # c"\n'
    path.write_text(f"{text}sequence_len: 8\nmicro_batch_size: 1\nlearning_rate: 1e-4\n")
    migration = migrate_file(path)
    assert not migration.problems
    assert YAML(typ="safe").load(migration.job)["run"] == {"folder": "./a\u2028b # c"}
