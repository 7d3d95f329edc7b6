from finetune.config.schema import all_keys, node_at


def test_the_schema_of_a_key_is_the_same_by_itself_as_in_the_whole():
    whole = dict(all_keys())
    assert len(whole) > 200
    assert {key: node_at(key) for key in whole} == whole
