"""Which parameters learn is said by patterns on their names."""

import pytest
from torch import nn

from finetune.errors import ModelError
from finetune.model.freeze import freeze, train_only


class Tied(nn.Module):
    """Embeddings that are the head, and a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layer = nn.Linear(2, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def learning(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("pattern", ["embed*", "head.*"])
def test_only_what_fits_learns_and_a_tied_weight_has_both_names(pattern):
    model = Tied()
    train_only(model, (pattern,))
    assert learning(model) == ["embed.weight"]


def test_without_patterns_everything_learns():
    model = Tied()
    train_only(model, ())
    assert learning(model) == ["embed.weight", "layer.weight", "layer.bias"]


def test_what_fits_is_frozen():
    model = Tied()
    assert freeze(model, ("layer.*", "layer.bias")) == ("layer.weight", "layer.bias")
    assert learning(model) == ["embed.weight"]


@pytest.mark.parametrize(("change", "key"), [(freeze, "model.freeze"), (train_only, "model.train_only")])
def test_a_pattern_that_fits_nothing_names_what_is_there(change, key):
    with pytest.raises(ModelError, match=f"{key}: no parameter is called `layers.*`.*`layer.weight`"):
        change(Tied(), ("layers.*",))
