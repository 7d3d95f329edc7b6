"""A table refuses what is invalid or taken, and names the closest entry for an unknown name."""

from dataclasses import dataclass

import pytest

from finetune.errors import RegistryError, UserError
from finetune.registry.table import Entry, Table, import_attribute


@dataclass(frozen=True, kw_only=True)
class Color(Entry):
    is_warm: bool = False


@pytest.fixture
def colors() -> Table[Color]:
    red = Color(name="red", description="the color of blood", is_warm=True)
    return Table("color", Color, (red, Color(name="blue"), Color(name="infrared", is_internal=True)))


def test_entries_are_looked_up_by_name_in_the_order_of_registration(colors):
    assert [entry.name for entry in colors] == ["red", "blue", "infrared"]
    assert colors["red"].is_warm and "blue" in colors and "green" not in colors and None not in colors


def test_an_internal_entry_is_not_a_choice_and_is_not_described(colors):
    assert colors.choices == ("red", "blue")
    assert colors.describe() == "`red`: the color of blood. `blue`."


def test_an_entry_of_another_package_is_a_choice_like_any_other(colors):
    colors.register(Color(name="octarine", implementation="math:tau"))
    assert colors.choices[-1] == "octarine"
    assert colors.resolve("octarine") == pytest.approx(6.2832, abs=1e-4)


def test_a_second_entry_with_the_same_name_is_refused(colors):
    colors.register(Color(name="octarine", implementation="math:tau"))
    with pytest.raises(RegistryError, match=r"color `octarine`: the name is taken by math:tau, so other:octarine"):
        colors.register(Color(name="octarine", implementation="other:octarine"))
    assert colors["octarine"].implementation == "math:tau"


def test_an_entry_of_another_type_is_refused(colors):
    with pytest.raises(RegistryError, match=r"color `loud`: is a Entry, not a Color"):
        colors.register(Entry(name="loud"))


@pytest.mark.parametrize("name", ["", "Red", "dark red", "1st", "red-ish"])
def test_a_name_that_yaml_users_would_not_write_is_refused(name):
    with pytest.raises(RegistryError, match="lowercase letters, digits and underscores"):
        Entry(name=name)


@pytest.mark.parametrize("path", ["math", "math.tau", "math:", ":tau", "math:tau:e", "my module:tau"])
def test_an_implementation_that_is_not_a_dotted_path_is_refused(path):
    with pytest.raises(RegistryError, match=r"of the form package\.module:attribute"):
        Entry(name="tau", implementation=path)


def test_an_unknown_name_is_an_error_of_the_user_with_a_suggestion(colors):
    with pytest.raises(UserError, match=r"there is no color `bleu`\. Did you mean `blue`\?"):
        colors["bleu"]
    with pytest.raises(UserError, match=r"there is no color `xyz`\. Known are red, blue"):
        colors.resolve("xyz")


def test_a_module_without_the_attribute_is_named():
    with pytest.raises(RegistryError, match="math:taw: the module has no `taw`"):
        import_attribute("math:taw")
