"""Conversations with images become batches as the model's processor makes them, and every batch holds an image."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.batch import IGNORED
from finetune.data.encoding.image_conversation import images_of
from finetune.data.formats.conversations import UNREAD_IMAGE
from finetune.data.images import StoredImage
from finetune.errors import DataError
from finetune.task.generation import generate_tokens
from finetune.task.protocol import TaskContext, build_task
from tests.data.picture_processors import llava, picture, qwen, smolvlm
from tests.refusals import pinned, refused

PROCESSORS = {"llava": llava, "qwen": qwen, "smolvlm": smolvlm}
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "num_key_value_heads": 2, "vocab_size": 280, "initializer_range": 0.3, "pad_token_id": 0}
CONFIGS = {
    "llava": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **SIZES, "image_size": 16, "patch_size": 8},
    },
    "qwen": {
        "model_type": "qwen2_vl",
        "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
    },
    "smolvlm": {
        "model_type": "idefics3",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**SIZES, "image_size": 16, "patch_size": 2},
        "scale_factor": 4,
    },
}
IMAGE = {"type": "image"}


def row(*images, asked="what?", answer="a cat"):
    """Return a question that shows images and its answer."""
    content = [*([IMAGE] * len(images)), {"type": "text", "text": asked}] if images else asked
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": [StoredImage("a picture", content=image) for image in images]}


@pytest.fixture(scope="module", params=PROCESSORS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def task(name):
    processor = PROCESSORS[name]()
    data = DataSection(train=TrainingSourceSection(path="/nowhere/rows.jsonl"), max_length=256)
    return build_task(
        TaskContext(TaskSection(name="vision_language_sft"), data, processor.tokenizer, processor=processor)
    )


@pytest.fixture(scope="module")
def model(name, task):
    torch.manual_seed(0)
    values = dict(CONFIGS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values, **task.head_values)
    return AutoModelForImageTextToText.from_config(config).eval()


ONE = row(picture(60, 40))
TWO = row(picture(30, 20, seed=1), picture(50, 50, seed=2), asked="which of these?", answer="the second")
NONE = row(answer="a dog, surely")


def encoded(task, *rows):
    return [task.encode_row(each) for each in rows]


def test_a_vision_batch_equals_the_output_of_the_processor(task):
    features = encoded(task, ONE, NONE, TWO)
    batch = task.collate(features)
    processor = task._processor
    texts = [processor.tokenizer.decode(each.arrays["input_ids"].tolist()) for each in features]
    unexpanded = [processor.apply_chat_template(each) for each in map(_in_parts, (ONE, NONE, TWO))]
    images = [images_of(each) for each in features]
    given = processor(text=unexpanded, images=images, padding=True, return_tensors="pt")
    assert all(texts)
    assert batch.inputs.keys() == given.keys()
    for key in given:
        if key in ("input_ids", "attention_mask", "mm_token_type_ids"):  # the newline after the answer is not a target
            shortened = [each[:length] for each, length in zip(given[key], _lengths(features), strict=True)]
            own = [each[:length] for each, length in zip(batch.inputs[key], _lengths(features), strict=True)]
            assert all(torch.equal(*pair) for pair in zip(own, shortened, strict=True))
        else:
            assert torch.equal(batch.inputs[key], given[key])


def _lengths(features):
    return [each.length - 1 for each in features]


def _in_parts(given):
    return [
        {
            **turn,
            "content": [{"type": "text", "text": turn["content"]}]
            if isinstance(turn["content"], str)
            else turn["content"],
        }
        for turn in given["messages"]
    ]


def test_a_batch_without_images_shows_a_blank_one_that_does_not_count(task):
    (alone,) = encoded(task, NONE)
    batch = task.collate([alone])
    assert batch.inputs["input_ids"].shape[0] == 2
    assert "pixel_values" in batch.inputs
    assert (batch.labels[1] == IGNORED).all()
    assert (batch.num_tokens, batch.num_targets, batch.sample_ids) == (alone.length, alone.num_targets, (-1,))


def test_every_parameter_that_a_model_reads_has_a_gradient_without_any_image(task, model):
    batch = task.collate(encoded(task, NONE))
    model.zero_grad()
    task.loss_sums(model, batch)["loss_sum"].backward()
    of_images = {n: p.grad for n, p in model.named_parameters() if "vision" in n or "visual" in n}
    found = {n: grad for n, grad in of_images.items() if grad is not None}
    assert len(found) > len(of_images) / 2
    assert all(not grad.any() for grad in found.values())


def test_the_loss_of_rows_together_is_that_of_the_rows_alone(task, model):
    features = encoded(task, ONE, NONE, TWO)
    with torch.no_grad():
        together = task.loss_sums(model, task.collate(features))["loss_sum"]
        alone = sum(task.loss_sums(model, task.collate([each]))["loss_sum"] for each in features)
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)


@pytest.mark.parametrize("shown", [ONE, TWO, NONE], ids=["one", "two", "none"])
def test_a_generated_vision_answer_equals_that_of_transformers(task, model, shown):
    (features,) = encoded(task, shown)
    prompt = task.prompt(features)
    settings = {"pad_id": task.pad_id, "max_new_tokens": 6, "device": torch.device("cpu")}
    (answer,) = generate_tokens(model, [prompt], stop_ids=frozenset(), **settings)
    (stopped,) = generate_tokens(model, [prompt], stop_ids=frozenset({answer[2]}), **settings)
    assert stopped == answer[: answer.index(answer[2]) + 1]
    text = task._processor.apply_chat_template(_in_parts(shown)[:1], add_generation_prompt=True)
    inputs = task._processor(
        text=[text], images=[images_of(features)] if shown["images"] else None, return_tensors="pt"
    )
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert answer == expected[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_vision_prompt_ends_before_the_last_answer_and_has_it_as_reference(task):
    prompt = task.prompt(encoded(task, ONE)[0])
    words = task.tokenizer
    assert words.decode(list(prompt.input_ids)).endswith("<|im_start|>assistant\n")
    assert words.decode(list(prompt.reference_ids)) == "a cat<|im_end|>"
    assert not prompt.companion_ids
    assert task.prompt(encoded(task, NONE)[0]).companion_ids


def test_a_row_without_turns_is_refused(task):
    with refused(DataError, "turns"):
        task.encode_row({"text": "hello"})


def test_text_alone_does_not_learn_from_images(tokenizer, data):
    sft = build_task(TaskContext(TaskSection(name="sft"), data, tokenizer))
    with refused(DataError, "task.name: vision_language_sft"):
        sft.encode_row(ONE)


@pytest.mark.parametrize("text", ["<image>\nwhat?", "what is an <image>?"])
def test_a_placeholder_in_the_text_of_a_row_without_images_is_refused(task, text):
    with refused(DataError, "`columns: {images: NAME}`"):
        task.encode_row(row(asked=text))


def test_images_that_are_not_read_are_refused_with_the_line_to_write_and_other_rows_are_encoded(task):
    outcomes = task.samples.encode([{**NONE, UNREAD_IMAGE: "photo"}, ONE])
    pinned(outcomes[0], "`columns: {images: photo}`")
    assert outcomes[1].num_targets > 0
