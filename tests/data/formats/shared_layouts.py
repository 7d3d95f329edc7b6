"""What the rows in `shared/data/layouts` mean, written from its table without finetune: see test_layouts.py."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[4] / "shared/data/layouts"


def turns(pairs, *, names=None):
    names = names or {}
    return " | ".join(f"{names.get(role, role)}: {text}" for role, text in pairs)


SPEAKERS = {"human": "user", "gpt": "assistant", "model": "assistant"}


def from_value(messages):
    return [(SPEAKERS.get(turn["from"], turn["from"]), turn["value"]) for turn in messages]


def chat(pairs):
    return turns(pairs[:-1]), pairs[-1][1]


def messages(row, name="messages"):
    return chat([(turn["role"], turn["content"]) for turn in row[name]])


def asked(question, *more):
    return "user: " + "\n\n".join(part for part in (question, *more) if part)


def called(turn, calls):
    return f"{turn}: {[{'name': call['name'], 'arguments': call['arguments']} for call in calls]}"


def hh(text):
    pieces = text.split("\n\n")[1:]
    return [(("user" if piece.startswith("Human") else "assistant"), piece.split(": ", 1)[1]) for piece in pieces]


def glaive(row):
    pairs = [("system", row["system"].removeprefix("SYSTEM: "))]
    for piece in row["chat"].split("\n\n\n"):
        who, text = piece.split(": ", 1)
        role = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}[who]
        pairs.append((role, text.removesuffix("<|endoftext|>").strip()))
    return chat(pairs)


def guanaco(row):
    pairs = []
    for piece in row["text"].split("### ")[1:]:
        who, text = piece.split(": ", 1)
        pairs.append(({"Human": "user", "Assistant": "assistant"}[who], text.strip()))
    return chat(pairs)


def openai_functions(row):
    first, call, result, last = row["messages"]
    calls = [{**call["function_call"], "arguments": json.loads(call["function_call"]["arguments"])}]
    start = f"user: {first['content']} | {called('assistant', calls)} | tool: {result['content']}"
    return start, last["content"]


def openai_tools(row):
    first, call, result, last = row["messages"]
    calls = [{**c["function"], "arguments": json.loads(c["function"]["arguments"])} for c in call["tool_calls"]]
    start = f"user: {first['content']} | {called('assistant', calls)} | tool: {result['content']}"
    return start, last["content"]


def swift(row):
    first, call, result, last = row["messages"]
    start = (
        f"user: {first['content']} | {called('assistant', [json.loads(call['content'])])} | tool: {result['content']}"
    )
    return start, last["content"]


def capybara(row):
    return chat(
        [pair for each in row["conversation"] for pair in (("user", each["input"]), ("assistant", each["output"]))]
    )


def gemini(row):
    def text(content):
        return "".join(part["text"] for part in content["parts"])

    pairs = [("system", text(row["systemInstruction"]))]
    return chat(pairs + [(SPEAKERS.get(turn["role"], turn["role"]), text(turn)) for turn in row["contents"]])


def openhermes(row):
    system = [("system", row["system_prompt"])] if row["system_prompt"] else []
    return chat(system + from_value(row["conversations"]))


def orca(row):
    system = f"system: {row['system']} | " if row["system"] else ""
    return f"{system}user: {row['question']}", row["chosen"], row["rejected"]


def shp(row):
    better, worse = ("human_ref_A", "human_ref_B") if row["labels"] == 1 else ("human_ref_B", "human_ref_A")
    return asked(row["history"]), row[better], row[worse]


def nectar(row):
    ranked = sorted(row["answers"], key=lambda each: each["rank"])
    question = row["prompt"].split("Human: ")[1].split("\n\nAssistant:")[0]
    return asked(question), ranked[0]["answer"], ranked[-1]["answer"]


def mmlu(row):
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCDEFGH", row["choices"], strict=False))
    return f"user: {row['question']}\n{lines}", f"{'ABCDEFGH'[row['answer']]}. {row['choices'][row['answer']]}"


def doccano(row):
    words = [("Anna", 0), ("lives", 5), ("in", 11), ("Rome", 14), (".", 18)]
    assert row["text"] == "Anna lives in Rome."
    labels = {start: label for start, _, label in row["label"]}
    return [word for word, _ in words], [f"B-{labels[start]}" if start in labels else "O" for _, start in words]


def msmarco(row):
    texts, marks = row["passages"]["passage_text"], row["passages"]["is_selected"]
    return (
        row["query"],
        texts[marks.index(1)] if 1 in marks else "",
        [t for t, m in zip(texts, marks, strict=True) if not m],
    )


def llava(row):
    start, target = chat(from_value(row["conversations"]))
    return start.replace("<image>\n", ""), target


TOXIC = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")

SHARED = {
    "alpaca": lambda row: (asked(row["instruction"], row["input"]), row["output"]),
    "dolly": lambda row: (asked(row["instruction"], row["context"]), row["response"]),
    "slimorca": lambda row: chat(from_value(row["conversations"])),
    "openhermes": openhermes,
    "ultrachat": messages,
    "wildchat": lambda row: messages(row, "conversation"),
    "oasst_flat": None,
    "glaive_functions": glaive,
    "xlam_calls": lambda row: (asked(row["query"]), json.loads(row["answers"])),
    "openai_tools": openai_tools,
    "openai_functions": openai_functions,
    "openai_weights": messages,
    "swift_agent": swift,
    "xsum": lambda row: (asked(row["document"]), row["summary"]),
    "cnn_dailymail": lambda row: (asked(row["article"]), row["highlights"]),
    "squad": lambda row: (asked(row["question"], row["context"]), (row["answers"]["text"] or ["unanswerable"])[0]),
    "mmlu": mmlu,
    "translation": lambda row: (asked(row["translation"]["en"]), row["translation"]["de"]),
    "numina": messages,
    "capybara": capybara,
    "gemini": gemini,
    "guanaco": guanaco,
    "ultrafeedback_binarized": lambda row: (
        asked(row["prompt"]), row["chosen"][-1]["content"], row["rejected"][-1]["content"]
    ),
    "orca_pairs": orca,
    "hh": lambda row: (turns(hh(row["chosen"])[:-1]), hh(row["chosen"])[-1][1], hh(row["rejected"])[-1][1]),
    "kto_mix": lambda row: (
        asked(row["prompt"][0]["content"]), row["completion"][0]["content"], row["label"]
    ),
    "shp": shp,
    "nectar": nectar,
    "llama_factory_ranking": lambda row: (
        turns(from_value(row["conversations"])), row["chosen"]["value"], row["rejected"]["value"]
    ),
    "go_emotions": lambda row: (row["text"], row["labels"]),
    "multi_hot": lambda row: (row["text"], row["labels"]),
    "toxic_columns": lambda row: (row["comment_text"], [name for name in TOXIC if row[name]]),
    "snli": lambda row: (row["premise"], row["hypothesis"], row["label"]),
    "conll_numbers": lambda row: (row["tokens"], row["ner_tags"]),
    "tags_ignored": lambda row: (row["tokens"], row["tags"]),
    "doccano_spans": doccano,
    "mined_negatives": lambda row: (row["query"], row["positive"], [row["negative_1"], row["negative_2"]]),
    "bge": lambda row: (row["query"], row["pos"][0], row["neg"]),
    "msmarco_passages": msmarco,
    "relevance": lambda row: (row["query"], row["document"], row["score"]),
    "llava": llava,
    "image_question": lambda row: (asked(row["question"]), row["answer"]),
}  # fmt: skip
