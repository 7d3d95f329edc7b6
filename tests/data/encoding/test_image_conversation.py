"""Conversations with images become tokens as the model's processor writes them."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from tokenizers.processors import TemplateProcessing

from finetune.data.encoding.image_conversation import ImageConversationEncoder, ImageTextProcessor, images_of
from finetune.data.images import StoredImage
from finetune.errors import DataError
from tests.data.picture_processors import llava, picture, qwen, smolvlm
from tests.data.template_tokenizers import targets
from tests.refusals import refused

PROCESSORS = {"llava": llava, "qwen": qwen, "smolvlm": smolvlm}
IMAGE = {"type": "image"}


def said(text):
    return {"type": "text", "text": text}


def row(*contents, images=()):
    """Return a row of turns, of the user and the assistant by turns, that shows these images."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    return {"messages": turns, "images": [StoredImage("a picture", content=image) for image in images]}


def encoded(processor, given, **named):
    (outcome,) = ImageConversationEncoder(processor, **named)([given])
    if isinstance(outcome, DataError):
        raise outcome
    return outcome


TALK = row(
    [said("left"), IMAGE, said("right"), IMAGE],
    "a cat and a dog",
    "and now?",
    "a cow",
    images=[picture(60, 40), picture(30, 20, seed=1)],
)


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_tokens_are_those_that_the_processor_gives(name):
    processor = PROCESSORS[name]()
    features = encoded(processor, TALK)
    turns = [
        {**turn, "content": [said(turn["content"])] if isinstance(turn["content"], str) else turn["content"]}
        for turn in TALK["messages"]
    ]
    text = processor.apply_chat_template(turns)
    images = [Image.open(BytesIO(image.content)) for image in TALK["images"]]
    given = processor(text=[text], images=[images])
    assert features.arrays["input_ids"].tolist()[: len(given["input_ids"][0]) - 1] == given["input_ids"][0][:-1]
    assert targets(features, processor.tokenizer) == ["a cat and a dog<|im_end|>", "a cow<|im_end|>"]


@pytest.mark.parametrize("name", PROCESSORS)
def test_an_image_takes_the_image_tokens_of_the_model_and_has_no_target(name):
    processor = PROCESSORS[name]()
    features = encoded(processor, TALK, train_on="all")
    token = ImageTextProcessor(processor).token_id
    places = features.arrays["input_ids"] == token
    num_tokens = {"llava": 8, "qwen": 3, "smolvlm": 2 * 5 * 4}[name]
    assert processor.tokenizer.convert_ids_to_tokens(token) == ("<|image_pad|>" if name == "qwen" else "<image>")
    assert places.sum() == num_tokens
    assert not features.arrays["is_target"][places].any()
    assert features.arrays["is_target"][~places].sum() > 20


def test_the_processor_is_asked_which_tokens_are_of_images():
    features = encoded(qwen(), TALK)
    told = features.arrays["mm_token_type_ids"]
    assert np.array_equal(told == 1, features.arrays["input_ids"] == ImageTextProcessor(qwen()).token_id)


def test_a_beginning_of_sequence_that_the_tokenizer_writes_stands_before_the_conversation():
    processor = llava(bos_token="<bos>")
    words, begin = processor.tokenizer, processor.tokenizer.bos_token_id
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", begin)])
    features = encoded(processor, TALK)
    assert features.arrays["input_ids"][:2].tolist() == [begin, words.convert_tokens_to_ids("<|im_start|>")]
    assert targets(features, words) == ["a cat and a dog<|im_end|>", "a cow<|im_end|>"]


def test_training_on_the_last_answer_keeps_only_images_before_it():
    given = row([IMAGE], "one", [IMAGE], images=[picture(), picture(seed=1)])
    features = encoded(llava(), given, train_on="last_assistant")
    assert len(images_of(features)) == 1


def test_a_system_prompt_is_given_in_the_form_that_the_template_wants():
    features = encoded(llava(), row([IMAGE], "one", images=[picture()]), system_prompt="Be brief.")
    assert "Be brief." in llava().tokenizer.decode(features.arrays["input_ids"].tolist())


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_mark_in_a_text_is_text(name):
    processor = PROCESSORS[name]()
    mark = processor.image_token
    given = row([IMAGE, said(f"what is {mark}<|im_end|>?")], "a mark", images=[picture()])
    features, plain = encoded(processor, given), encoded(processor, row([IMAGE, said("what")], "a", images=[picture()]))
    token = processor.tokenizer.convert_tokens_to_ids(mark)
    assert np.sum(features.arrays["input_ids"] == token) == np.sum(plain.arrays["input_ids"] == token) > 0
    assert targets(features, processor.tokenizer) == ["a mark<|im_end|>"]
    assert "control_rows" in features.findings.flags
    for told in {"mm_token_type_ids"} & features.arrays.keys():
        assert np.array_equal(features.arrays[told] > 0, features.arrays["input_ids"] == token)


def test_a_template_that_drops_images_is_refused():
    processor = llava()
    processor.tokenizer.chat_template = processor.tokenizer.chat_template.replace("<image>", "")
    with refused(DataError, "1 images", "0 times"):
        encoded(processor, row([IMAGE, said("what?")], "one", images=[picture()]))


def test_an_image_that_is_broken_is_named_by_its_number():
    with refused(DataError, "image 2"):
        encoded(llava(), row([IMAGE, IMAGE], "one", images=[picture(), b"hello"]))


def test_a_processor_without_an_image_token_is_refused():
    processor = llava()
    processor.image_token = None
    with refused(DataError, "LlavaProcessor"):
        ImageConversationEncoder(processor)
