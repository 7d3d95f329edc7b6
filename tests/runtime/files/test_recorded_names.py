"""A recorded name belongs to one class or function and stays with it."""

from finetune.runtime.files.recorded_names import recorded_as, recorded_name


@recorded_as("of.old.Encoder")
class Encoder:
    @recorded_as("of.old.Encoder.encode")
    def encode(self):
        pass

    def decode(self):
        pass


class Faster(Encoder):
    pass


@recorded_as("of.old.encode")
def encode():
    pass


def test_an_instance_and_a_function_have_the_name_that_was_given():
    assert recorded_name(Encoder()) == "of.old.Encoder"
    assert recorded_name(encode) == "of.old.encode"
    assert recorded_name(Encoder().encode) == recorded_name(Faster().encode) == "of.old.Encoder.encode"


def test_classes_and_functions_without_a_recorded_name_have_none():
    assert recorded_name(Faster()) is None, "a subclass does something else than the class whose name it would have"
    assert recorded_name(Encoder().decode) is None
    assert recorded_name(lambda: None) is None
