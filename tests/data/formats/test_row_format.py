"""What the columns of a row mean, in every format, and what is said when they do not mean it."""

import pickle

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.formats.row_format import choose_format
from finetune.data.rows import RawRow
from finetune.errors import DataError
from tests.refusals import refused

KEY = "data.train"
USER, ASSISTANT = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def read(row, said=None, **keys):
    """Read one row as the section's format does."""
    say = (said if said is not None else []).append
    raw = RawRow("rows.jsonl", 1, row)
    form = choose_format(SourceSection(path="rows.jsonl", **keys), raw, key=KEY, log=say)
    return pickle.loads(pickle.dumps(form)).read(raw)


ROWS = {
    "messages": ({"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}),
    "messages as JSON text": (
        {"messages": '[{"role": "user", "content": "Hi."}]', "tools": '[{"name": "f"}]'},
        {"messages": [USER], "tools": [{"name": "f"}]},
    ),
    "conversations": (
        {
            "conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}],
            "system": "Be kind.",
        },
        {"messages": [{"role": "system", "content": "Be kind."}, USER, ASSISTANT]},
    ),
    "prompt_completion": ({"prompt": "Hi.", "completion": "Hello."}, {"messages": [USER, ASSISTANT]}),
    "prompt_completion of turns": (
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
        {"messages": [USER, ASSISTANT, USER, ASSISTANT], "num_context_turns": 3},
    ),
    "instruction": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Add.\n\n1 2"},
                {"role": "assistant", "content": "3"},
            ]
        },
    ),
    "preference": (
        {"prompt": "Hi.", "chosen": "Hello.", "rejected": "Go away."},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "Go away."}]},
    ),
    "preference whose prompt is what both begin with": (
        {"chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "No."}]},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "No."}]},
    ),
    "labelled": ({"text": "Good!", "label": 1}, {"text": "Good!", "label": 1}),
    "labelled with several labels": ({"text": "a", "label": ["x", "y"]}, {"text": "a", "label": ["x", "y"]}),
    "labelled with a number": ({"text": "a", "label": 0.5}, {"text": "a", "label": 0.5}),
    "labelled pairs": ({"text": "a", "text_pair": "b", "label": True}, {"text": "a", "label": True, "text_pair": "b"}),
    "tagged": ({"tokens": ["Rio", "!"], "tags": ["B-LOC", "O"]}, {"tokens": ["Rio", "!"], "tags": ["B-LOC", "O"]}),
    "text": ({"text": "Once."}, {"text": "Once."}),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_format_is_inferred_from_the_columns_of_the_first_row_and_logged(name):
    row, meant = ROWS[name]
    said = []
    assert read(row, said) == meant
    listed = ", ".join(f"`{column}`" for column in row)
    assert said == [f"{KEY}.format is not set: the columns {listed} are read as `{name.split(' ')[0]}`"]


def test_the_users_columns_are_mapped_and_the_unread_are_named():
    said = []
    row = {"question": "Hi.", "answer": "Hello.", "id": 7}
    assert read(row, said, columns={"prompt": "question", "completion": "answer"}) == {"messages": [USER, ASSISTANT]}
    assert said[1:] == [f"{KEY}: unused columns: `id`"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]},
        {"prompt": "Hi.", "completion": "Hello."},
        {"instruction": "Hi.", "output": "Hello."},
        {"prompt": "Hi.", "chosen": "Hello.", "rejected": "No."},
        {"prompt": "Hi.", "completion": "Hello.", "label": True},
    ],
    ids=lambda row: " ".join(row),
)
def test_a_rows_own_arguments_of_the_chat_template_are_read_in_every_format_of_turns(row):
    keys = {"format": "judged"} if "label" in row else {}
    plain = read(row, **keys)
    for value in ({"brief": True}, '{"brief": true}'):
        assert read({**row, "chat_template_kwargs": value}, **keys) == {
            **plain,
            "chat_template_kwargs": {"brief": True},
        }
    for value in (None, {}, "{}"):
        assert read({**row, "chat_template_kwargs": value}, **keys) == plain
    for wrong in ([1], "{", "[1]"):
        with refused(DataError, "`chat_template_kwargs`"):
            read({**row, "chat_template_kwargs": wrong}, **keys)


def test_only_a_first_row_with_template_arguments_changes_the_identity():
    def identity(row):
        return choose_format(
            SourceSection(path="rows.jsonl"), RawRow("rows.jsonl", 1, row), key=KEY, log=str
        ).identity()

    row = {"messages": [USER, ASSISTANT]}
    assert identity(row) == identity({**row, "id": 7}) == ["messages", {}, {}]
    assert identity({**row, "chat_template_kwargs": {}}) == ["messages", {}, {}, "chat_template_kwargs"]


def test_the_first_format_that_fits_is_taken():
    said = []
    read({"text": "x", "prompt": "a", "completion": "b", "messages": [USER]}, said)
    read({"text": "x", "prompt": "a", "completion": "b"}, said)
    read({"text": "x", "label": 1, "prompt": "a"}, said)
    assert [line.rpartition(" ")[2] for line in said[::2]] == ["`messages`", "`prompt_completion`", "`labelled`"]


def test_mapped_columns_and_templates_decide_the_format():
    row = {"chosen": "Once.", "rejected": "Never."}
    assert read(row, columns={"text": "chosen"}) == {"text": "Once."}
    assert read(row, template={"text": "{{ chosen }}"}) == {"text": "Once."}


def test_functions_are_tools_without_the_wrapper():
    bare = WEATHER["function"]
    assert read({"messages": [USER], "functions": [bare, WEATHER]})["tools"] == [WEATHER, WEATHER]
    assert read({"messages": [USER], "tools": [bare], "functions": [WEATHER]})["tools"] == [bare]
    assert read({"messages": [USER], "functions": None}) == {"messages": [USER]}


def test_answers_of_a_pair_may_be_single_turns_of_any_shape():
    row = {
        "conversations": [{"from": "human", "value": "Hi."}],
        "chosen": {"from": "gpt", "value": "Hello."},
        "rejected": {"role": "assistant", "content": "No."},
    }
    assert read(row, format="preference", columns={"prompt": "conversations"}) == {
        "prompt": [USER],
        "chosen": [ASSISTANT],
        "rejected": [{"role": "assistant", "content": "No."}],
    }


def test_unusual_keys_of_turns_are_logged_once():
    said = []
    row = {"contents": [{"role": "user", "parts": [{"text": "Hi."}]}]}
    assert read(row, said, format="messages", columns={"messages": "contents"}) == {"messages": [USER]}
    assert said == ["data.train: the turns of `contents` are read from their keys `role`, `parts`"]


BAD_ROWS = [
    {"prompt": {"a": 1}, "completion": "b"},
    {"prompt": "a", "completion": 42},
    {"prompt": "a", "completion": None},
    {"messages": "hello"},
    {"messages": []},
    {"messages": [USER], "tools": [1]},
    {"chosen": "a", "rejected": "b"},
    {"text": "a", "label": ["b", {}]},
    {"tokens": "a b", "tags": ["O", "O"]},
    {"tokens": ["a"], "tags": [0.5]},
    {"tokens": ["a", "b"], "tags": ["O"]},
    {"a": 1},
]


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_value_of_the_wrong_type_is_named(row):
    with refused(DataError, "rows.jsonl, row 1"):
        read(row)


def test_the_row_without_the_column_is_named_with_the_remedy():
    form = choose_format(
        SourceSection(path="x"), RawRow("f", 1, {"prompt": "a", "completion": "b"}), key=KEY, log=lambda _: None
    )
    with refused(DataError, "rows.jsonl, row 17", "`completion`", "`prompt`, `answer`", "data.train.columns"):
        form.read(RawRow("rows.jsonl", 17, {"prompt": "a", "answer": "b"}))


def test_a_mapping_the_wrong_way_round_is_refused():
    with refused(DataError, "`prompt_completion`", "`question`", "`prompt`, `completion`"):
        read({"prompt": "a", "completion": "b"}, format="prompt_completion", columns={"question": "prompt"})


def with_class_names(row, names, said=None, **keys):
    """Read one row of a dataset that names the numbers of some columns."""
    raw = RawRow("rows.parquet", 1, row)
    say = (said if said is not None else []).append
    section = SourceSection(path="rows.parquet", **keys)
    return choose_format(section, raw, key=KEY, log=say, class_names=lambda: names).read(raw)


def test_integer_labels_become_the_class_names_of_the_dataset_and_this_is_logged():
    said = []
    names = {"sentiment": ("bad", "good"), "ner_tags": ("O", "B-PER")}
    row = with_class_names({"text": "a", "sentiment": 1}, names, said, columns={"label": "sentiment"})
    assert row == {"text": "a", "label": "good"}
    assert f"{KEY}: the numbers of `sentiment` have names in the dataset, which are the classes: `bad`, `good`" in said
    tagged = with_class_names({"tokens": ["Ann", "is"], "ner_tags": [1, 0]}, names, columns={"tags": "ner_tags"})
    assert tagged["tags"] == ["B-PER", "O"]


@pytest.mark.parametrize("none", [-1, -100, None])
def test_a_label_that_has_no_name_in_the_dataset_is_none_or_refused(none):
    names = {"label": ("bad", "good"), "tags": ("O", "B-PER")}
    assert with_class_names({"text": "a", "label": none}, names) == {"text": "a", "label": None}
    assert with_class_names({"tokens": ["a", "b"], "tags": [1, none]}, names)["tags"] == ["B-PER", None]
    with refused(DataError, "row 1", "`label`", "2,", "2 classes"):
        with_class_names({"text": "a", "label": -2}, names)
