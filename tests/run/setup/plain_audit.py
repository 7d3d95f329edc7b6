"""What becomes of rows of question and answer, counted again by other means and without a line of the package.

The conversation is written out by hand, tokenized once as a whole, and a token is a target if its characters are within
an answer or the `<|im_end|>` behind it.
"""

import gzip
import json


def read(path):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def gsm8k(row):
    return [("user", row["question"]), ("assistant", row["answer"])]


def hh_rlhf(row):
    turns = []
    for part in row["chosen"].split("\n\nHuman: ")[1:]:
        asked, *answered = part.split("\n\nAssistant: ")
        turns += [("user", asked.strip()), *(("assistant", answer.strip()) for answer in answered)]
    return turns


def tokens_and_targets(turns, tokenizer):
    text, answers = "", []
    for role, content in turns:
        text += f"<|im_start|>{role}\n"
        if role == "assistant":
            answers.append((len(text), len(text) + len(content) + len("<|im_end|>")))
        text += f"{content}<|im_end|>\n"
    found = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    is_target = [any(a <= start and end <= b for a, b in answers) for start, end in found["offset_mapping"]]
    return found["input_ids"], is_target


def plain_audit(path, turns_of, tokenizer, *, max_length, over_length):
    names = "rows samples tokens targets truncated_rows truncated_tokens truncated_targets long_rows dropped_tokens"
    counts = dict.fromkeys([*names.split(), "dropped_targets", "rows_without_target", "longest", "duplicates"], 0)
    seen = set()
    for number, row in enumerate(read(path), start=1):
        ids, is_target = tokens_and_targets(turns_of(row), tokenizer)
        counts["rows"] += 1
        if len(ids) > counts["longest"]:
            counts["longest"], counts["longest_place"] = len(ids), f"{path}, row {number}"
        if any(is_target) and len(ids) > max_length and over_length == "drop":
            counts["long_rows"] += 1
            counts["dropped_tokens"] += len(ids)
            counts["dropped_targets"] += sum(is_target)
            continue
        if any(is_target) and len(ids) > max_length:
            counts["truncated_rows"] += 1
            counts["truncated_tokens"] += len(ids) - max_length
            counts["truncated_targets"] += sum(is_target[max_length:])
            ids, is_target = ids[:max_length], is_target[:max_length]
        if not any(is_target):
            counts["rows_without_target"] += 1
            continue
        counts["samples"] += 1
        counts["tokens"] += len(ids)
        counts["targets"] += sum(is_target)
        counts["duplicates"] += tuple(ids) in seen
        seen.add(tuple(ids))
    return counts
