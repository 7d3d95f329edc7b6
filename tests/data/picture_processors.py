"""Processors of images and text, built without a hub: LLaVA's, Qwen2-VL's and SmolVLM's, with a tokenizer of bytes."""

from io import BytesIO
from unittest.mock import patch

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
)
from transformers.processing_utils import ProcessorMixin

QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def template(image):
    """Return a chat template that writes `image` for each part of that type, and takes texts as parts alone."""
    return (
        "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
        "{% for part in turn.content %}{% if part.type == 'image' %}" + image + "{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer(*special, **named):
    """Return a tokenizer of bytes with the marks of ChatML and these."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={sign: place for place, sign in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>", *special]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", additional_special_tokens=marks, **named
    )


def llava(**named):
    """Return LLaVA's processor: an image is 4 tokens."""
    size = {"height": 16, "width": 16}
    return LlavaProcessor(
        CLIPImageProcessor(size=size, crop_size=size),
        tokenizer("<image>", chat_template=template("<image>"), **named),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("<image>"),
    )


def qwen():
    """Return Qwen2-VL's processor: the tokens of an image depend on its size; 28 x 28 pixels are one."""
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    words = tokenizer(*marks, chat_template=template(QWEN_IMAGE))
    pixels = Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28})
    with patch.object(ProcessorMixin, "check_argument_for_proper_class"):  # its part for videos needs torchvision
        return Qwen2VLProcessor(pixels, words, None, chat_template=template(QWEN_IMAGE))


def smolvlm():
    """Return the processor of Idefics3 and SmolVLM: images are cut in pieces, with text between these."""
    marks = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    words = tokenizer(*marks, chat_template=template("<image>"))
    pixels = Idefics3ImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return Idefics3Processor(pixels, words, image_seq_len=4, chat_template=template("<image>"))


def picture(width=30, height=20, *, seed=0):
    """Return the encoded bytes of an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()
