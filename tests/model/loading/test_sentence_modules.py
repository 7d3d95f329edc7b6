"""A run warns if its pooling differs from the one that the model was trained with."""

import json

import pytest

from finetune.config.sections.model import ModelSection
from finetune.model.loading.pretrained import pooling_warning

OLD = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
NEW = {"embedding_dimension": 8, "pooling_mode": "lasttoken"}


@pytest.mark.parametrize(("content", "usual"), [(OLD, "cls"), (NEW, "last_token")])
def test_a_pooling_that_differs_from_the_model_is_warned_about(tmp_path, content, usual):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(content))
    section = ModelSection(name=str(tmp_path))
    assert pooling_warning(section, usual) is None
    assert f"write `pooling: {usual}`" in pooling_warning(section, "mean")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pooling_mode": ["mean", "cls"]}', '{"pooling_mode": "max"}'])
def test_pooling_files_without_information_give_no_warning(tmp_path, content):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(content)
    assert pooling_warning(ModelSection(name=str(tmp_path)), "mean") is None
    assert pooling_warning(ModelSection(name=str(tmp_path / "1_Pooling")), "mean") is None
