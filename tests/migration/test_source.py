import pytest

from finetune.errors import ConfigError, UserError
from finetune.migration.source import read_peer_file


def read(tmp_path, text, name="theirs.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_peer_file(path)


def test_every_plain_value_is_a_leaf_with_its_line(tmp_path):
    file = read(tmp_path, "a: 1\nrows:\n  - path: x\n    roles: [one, two]\n  - path: y\nempty:\nsection: {}\n")
    assert {key: (leaf.line, leaf.value) for key, leaf in file.leaves.items()} == {
        "a": (1, 1),
        "rows.0.path": (3, "x"),
        "rows.0.roles": (4, ["one", "two"]),
        "rows.1.path": (5, "y"),
        "empty": (6, None),
        "section": (7, {}),
    }
    assert file.leaves["rows.1.path"].pattern == "rows[].path" and file.leaves["rows.1.path"].position == 1


def test_references_to_other_keys_are_replaced_and_aliases_expanded(tmp_path):
    file = read(tmp_path, "n: 4\nout: /tmp/${name}\nname: run\nlogs: ${out}/logs\nm: ${n}\na: &x [1]\nb: *x\n")
    assert file.leaves["logs"].value == "/tmp/run/logs"
    assert file.leaves["m"].value == 4
    assert file.leaves["b"].value == [1]


def test_json_is_read_with_tabs_and_lines(tmp_path):
    file = read(tmp_path, '{\n\t"learning_rate": 1e-4,\n\t"fsdp": []\n}\n', "training_args.json")
    assert (file.leaves["learning_rate"].line, file.leaves["learning_rate"].value) == (2, 1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n\tb: 2\n", r"line 2: this is not YAML.*spaces, not with tabs"),
        ("a: !!python/object/apply:os.system ['id']\n", r"line 1, a: the tag .* is not allowed"),
        ("a: 1\n---\nb: 2\n", r"line 2: this is not YAML.*One|line 2: .*one document per file"),
        ("a: ${HOME}/x\n", r"line 1, a: `\$\{HOME\}` is not another key of this file.*write the value itself"),
        ("a: ${oc.env:HOME}\n", r"line 1, a: `\$\{oc.env:HOME\}` is not another key"),
        ("a: ${a}\n", r"line 1, a: its references do not end"),
        ("a: {{ model }}\n", r"line 1"),
        ('a: "{{ model }}"\n', r"line 1, a: Jinja in a value is not expanded"),
        ("x: &x {b: 1}\na:\n  <<: *x\n", r"line 3, a.<<.*: merge keys are not read"),
        ("a: 1\na: 2\n", r"line 2, a: the key already exists on line 1"),
    ],
)
def test_text_that_a_config_cannot_hold_is_one_message_with_its_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith("theirs.yaml has 1 problem")
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "text\n"])
def test_a_file_without_keys_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="has no keys"):
        read(tmp_path, text)


def test_a_file_of_10_mb_is_refused_without_reading_it_whole(tmp_path):
    with pytest.raises(UserError, match="larger than 1 MiB"):
        read(tmp_path, "a: " + "x" * 10_000_000)


def test_a_missing_file_and_a_folder_are_one_message(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_peer_file(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="folder"):
        read_peer_file(tmp_path)
