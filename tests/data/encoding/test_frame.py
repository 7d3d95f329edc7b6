"""What a tokenizer writes around every text."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from finetune.data.encoding.frame import frame_of

PROCESSORS = {
    (0, 0): None,
    (0, 1): processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)]),
    (1, 1): processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]),
    (2, 0): processors.TemplateProcessing(single="<s> </s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]),
}


@pytest.mark.parametrize("frame", PROCESSORS)
def test_the_tokens_around_a_text_are_counted(frame):
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if PROCESSORS[frame] is not None:
        backend.post_processor = PROCESSORS[frame]
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert frame_of(made) == frame
