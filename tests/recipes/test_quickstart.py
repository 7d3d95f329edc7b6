import json

from finetune.recipes.quickstart import SKILLS, instruction_rows, quickstart_files


def rows_of(text):
    return [json.loads(line)["messages"] for line in text.splitlines()]


def words_of(messages):
    return tuple(messages[0]["content"].split(": ")[1].split())


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    assert quickstart_files(seed=1) == quickstart_files(seed=1) == quickstart_files()
    assert quickstart_files(seed=1) != quickstart_files(seed=2)


def test_held_out_word_lists_are_not_in_the_training_rows():
    files = quickstart_files()
    train, held_out = (rows_of(files[name]) for name in ("train.jsonl", "held_out.jsonl"))
    assert (len(train), len(held_out)) == (4000, 200)
    assert {words_of(row) for row in train}.isdisjoint(words_of(row) for row in held_out)
    assert len({words_of(row) for row in train + held_out}) == 4200


def test_every_skill_is_asked_in_both_sets():
    for text in quickstart_files().values():
        assert {row[0]["content"].split(":")[0] for row in rows_of(text)} == set(SKILLS)


def test_answers_follow_the_instruction():
    answers = {skill: " ".join(apply(["star", "moon", "rose"])) for skill, apply in SKILLS.items()}
    assert answers == {
        "Repeat these words": "star moon rose",
        "Reverse these words": "rose moon star",
        "Shout these words": "STAR MOON ROSE",
        "Give the first word": "star",
        "Give the last word": "rose",
        "Leave out the first word": "moon rose",
        "Leave out the last word": "star moon",
    }


def test_a_row_is_a_user_turn_and_an_assistant_turn():
    for row in instruction_rows(50, seed=7):
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        skill = user["content"].split(":")[0]
        assert assistant["content"] == " ".join(SKILLS[skill](words_of(row["messages"])))
