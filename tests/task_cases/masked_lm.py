"""`masked_lm` on lines of words: a small BERT with a tokenizer of its kind."""

import hashlib
import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.small_job import WORDS
from tests.task_cases.case import Case
from tests.task_cases.language import AT_TARGETS

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

JOB = f"""
run: {{folder: runs/masked_lm, seed: 7}}
model:
  from_config:
    model_type: bert
    values:
      {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
       max_position_embeddings: 128, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}}
  tokenizer: {{name: ./tokenizer}}
data: {{train: {{path: train.txt}}, validation: {{path: held_out.txt}}, max_length: 48}}
task: {{name: masked_lm, masked_lm: {{fraction: 0.3}}}}
{AT_TARGETS}
"""


def lines(folder: Path) -> None:
    """Write lines of two to ten words, and a WordPiece tokenizer that cuts them into pieces."""
    chance = random.Random(5)
    for name, count in (("train.txt", 50), ("held_out.txt", 7)):
        rows = (" ".join(chance.choices(WORDS, k=chance.randint(2, 10))) for _ in range(count))
        (folder / name).write_text("\n".join(rows))
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(WORDS, trainer)
    ends = [(name, backend.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    backend.post_processor = processors.BertProcessing(*ends)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    tokenizer.save_pretrained(folder / "tokenizer")


def loss_of_hidden(final: Path, folder: Path) -> float:
    """Return the mean loss over the tokens that an evaluation hides."""
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    special = set(tokenizer.all_special_ids)
    ordinary = [i for i in range(len(tokenizer)) if i not in special]
    total, count = 0.0, 0
    for number, line in enumerate((folder / "held_out.txt").read_text().splitlines()):
        ids = np.array(tokenizer(line)["input_ids"])
        shown, hidden = _hidden(ids, special=special, ordinary=ordinary, mask=tokenizer.mask_token_id, number=number)
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor(shown)[None]).logits[0, hidden]
        total += cross_entropy(logits.double(), torch.tensor(ids[hidden]), reduction="sum").item()
        count += len(hidden)
    return total / count


def _hidden(
    ids: np.ndarray, *, special: set[int], ordinary: list[int], mask: int, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what is shown of the sample, and the places that are hidden: three in ten."""
    digest = hashlib.blake2b(f"0/hiding/{number}".encode(), digest_size=8).digest()
    draw = np.random.default_rng(int.from_bytes(digest, "little") >> 1)
    places = np.array([place for place, token in enumerate(ids) if token not in special])
    hidden = np.sort(draw.choice(places, max(1, round(0.3 * len(places))), replace=False))
    lot, shown = draw.random(len(hidden)), ids.copy()
    shown[hidden[lot < 0.1]] = draw.choice(ordinary, int((lot < 0.1).sum()))
    shown[hidden[lot >= 0.2]] = mask
    return shown, hidden


CASES = (Case("masked_lm", JOB, lines, "loss", loss_of_hidden),)
