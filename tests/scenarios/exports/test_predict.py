"""Models that do not generate text predict every row of a file, as plain transformers and sentence-transformers do.

Rows need no label. Each kind of task is trained once, in a run of a few steps.
"""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import finetune
from finetune.commands.export import export
from finetune.commands.generate import GenerationOptions, generate_file
from finetune.errors import DataError, UserError
from tests.scenarios.trained import stay
from tests.task_cases import classification, embedding, images, masked_lm, preference
from tests.task_cases.classification import exported, held_out
from tests.task_cases.preference import SIDES, rows_of, tokens_of
from tests.task_cases.runs import launch, prepare

library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra dev)")
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

CLASS, PAIRED, SEVERAL, NUMBER, DECODER, TAGS = classification.CASES
PAIRS, SCORED, CANDIDATES = embedding.CASES
REWARD = next(case for case in preference.CASES if case.name == "reward")
IMAGES, MASKED = images.CASES[0], masked_lm.CASES[0]
CASES = (*classification.CASES, *embedding.CASES, REWARD, IMAGES, MASKED)
ADAPTED = (CLASS, TAGS, PAIRS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("predictions")
    prepare(CASES, place)
    return place


@pytest.fixture(scope="module")
def runs(folder):
    found = launch(None, [*((case, "full") for case in CASES), *((case, "lora") for case in ADAPTED)], folder)
    assert [run.error for run in found.values() if run.error] == []
    return found


@pytest.fixture
def predicted(tmp_path, monkeypatch):
    """Return a function that predicts rows and returns the rows that were written."""
    monkeypatch.setattr("finetune.runtime.distributed.shut_down", stay)

    def predict(source, rows, name="rows.jsonl", text=None, **options):
        path, output = tmp_path / name, tmp_path / "out.jsonl"
        path.write_text(text or "".join(json.dumps(row) + "\n" for row in rows))
        output.unlink(missing_ok=True)
        settings = {"adapter": None, "max_new_tokens": 6, "batch_size": 4, "temperature": 0.0, "top_p": 1.0, "seed": 0}
        settings |= {"system": None, "trust_remote_code": False, **options}
        assert generate_file(source, rows=path, output=output, options=GenerationOptions(**settings)) == 0
        return [json.loads(line) for line in output.read_text().splitlines()]

    return predict


def without(rows, *columns):
    return [{name: value for name, value in row.items() if name not in columns} for row in rows]


def predictions(rows):
    return [row["prediction"] for row in rows]


def logits_of(case, run, folder):
    """Return the logits that transformers alone computes for each row, one row at a time, and the classes' names."""
    model = exported(run.final, AutoModelForSequenceClassification).eval()
    tokenizer, rows = AutoTokenizer.from_pretrained(run.final), held_out(folder / case.name)
    texts = [[row[name] for name in ("text", "text_pair") if name in row] for row in rows]
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(*text, return_tensors="pt")).logits for text in texts])
    return logits, [model.config.id2label[index] for index in range(logits.shape[1])]


@pytest.mark.parametrize(
    ("case", "variant"),
    [(CLASS, "full"), (CLASS, "lora"), (PAIRED, "full"), (DECODER, "full")],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_the_likeliest_class_has_the_softmax_of_the_exported_model(runs, predicted, folder, case, variant):
    run = runs[case.name, variant]
    rows = without(held_out(folder / case.name), "label")
    written = predicted(run.folder, rows)
    assert without(written, "prediction") == rows and len(rows) == 21
    logits, names = logits_of(case, run, folder)
    probabilities = logits.softmax(dim=-1)
    assert [found["label"] for found in predictions(written)] == [names[i] for i in probabilities.argmax(dim=-1)]
    scores = [found["score"] for found in predictions(written)]
    assert scores == pytest.approx(probabilities.amax(dim=-1).tolist(), abs=1e-6)
    assert all(found.keys() == {"label", "score"} for found in predictions(written))
    asked = predictions(predicted(run.folder, rows, probabilities=True))
    assert [found["probabilities"] for found in asked] == [
        pytest.approx(dict(zip(names, row, strict=True)), abs=1e-6) for row in probabilities.tolist()
    ]


def test_a_run_its_final_an_export_and_a_checkpoint_predict_alike(runs, predicted, folder, tmp_path):
    run, rows = runs[CLASS.name, "full"], without(held_out(folder / CLASS.name), "label")
    export(run.final, step=None, to=tmp_path / "model", dtype="float32", merge=False, push_to_hub=None)
    (checkpoint,) = (run.folder / "checkpoints").glob("step-*")
    first, *others = (predicted(source, rows) for source in (run.folder, run.final, checkpoint, tmp_path / "model"))
    assert [predictions(other) for other in others] == [
        [{"label": row["label"], "score": pytest.approx(row["score"], abs=1e-6)} for row in predictions(first)]
    ] * 3


def test_several_classes_are_those_above_one_half(runs, predicted, folder):
    logits, names = logits_of(SEVERAL, runs[SEVERAL.name, "full"], folder)
    written = predicted(runs[SEVERAL.name, "full"].final, held_out(folder / SEVERAL.name), probabilities=True)
    for found, row in zip(predictions(written), logits.sigmoid().tolist(), strict=True):
        assert found["probabilities"] == pytest.approx(dict(zip(names, row, strict=True)), abs=1e-6)
        assert found["labels"] == [name for name, value in zip(names, row, strict=True) if value > 0.5]
        assert found["scores"] == [found["probabilities"][name] for name in found["labels"]]
    assert len({len(found["labels"]) for found in predictions(written)}) > 1


def test_a_regression_gives_its_number(runs, predicted, folder):
    logits, _ = logits_of(NUMBER, runs[NUMBER.name, "full"], folder)
    written = predicted(runs[NUMBER.name, "full"].folder, without(held_out(folder / NUMBER.name), "label"))
    assert [found["value"] for found in predictions(written)] == pytest.approx(logits[:, 0].tolist(), abs=1e-6)


@pytest.mark.parametrize("variant", ["full", "lora"])
def test_every_word_gets_a_tag_even_of_a_sentence_longer_than_the_model_reads(runs, predicted, folder, variant):
    run, rows = runs[TAGS.name, variant], without(held_out(folder / TAGS.name), "tags")
    model, tokenizer = exported(run.final, AutoModelForTokenClassification), AutoTokenizer.from_pretrained(run.final)
    written = predictions(predicted(run.folder, rows))
    for row, found in zip(rows, written, strict=True):
        words = [row["tokens"][0], *(f" {word}" for word in row["tokens"][1:])]
        inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            scores = model.eval()(**inputs).logits[0].softmax(dim=-1)
        best = [scores[inputs.word_ids(0).index(number)].max(dim=-1) for number in range(len(words))]
        assert found["tags"] == [model.config.id2label[int(each.indices)] for each in best]
        assert found["scores"] == pytest.approx([float(each.values) for each in best], abs=1e-6)
    long, text = predictions(predicted(run.folder, [{"tokens": ["oslo", "red"] * 60}, {"text": "red oslo, blue"}]))
    assert len(long["tags"]) == len(long["scores"]) == 120
    assert text["tokens"] == ["red", "oslo", ",", "blue"] and len(text["tags"]) == 4


@pytest.mark.parametrize("variant", ["full", "lora"])
def test_vectors_are_those_of_sentence_transformers(runs, predicted, folder, variant, tmp_path):
    run = runs[PAIRS.name, variant]
    model = library.SentenceTransformer(str(run.final), device="cpu")
    rows = without(held_out(folder / PAIRS.name), "positive")
    for row, found in zip(rows, predictions(predicted(run.folder, rows)), strict=True):
        query = model.encode(row["anchor"], prompt_name="query")
        if not row["negatives"]:
            np.testing.assert_allclose(found["embedding"], query, atol=1e-6)
            continue
        np.testing.assert_allclose(found["embeddings"]["anchor"], query, atol=1e-6)
        passages = model.encode(row["negatives"], prompt_name="passage")
        np.testing.assert_allclose(found["embeddings"]["negatives"], passages, atol=1e-6)
    texts = ["red blue " * 60, "pink", "blue red green"]
    theirs = model.encode(texts, prompt_name="passage")
    assert np.linalg.norm(theirs, axis=1) == pytest.approx(1.0, abs=1e-5)
    export(run.folder, step=None, to=tmp_path / "model", dtype=None, merge=variant == "lora", push_to_hub=None)
    for source in (run.folder, tmp_path / "model"):
        found = predictions(predicted(source, [{"text": text} for text in texts]))
        np.testing.assert_allclose([each["embedding"] for each in found], theirs, atol=1e-6)


def test_a_decoder_pools_its_last_token(runs, predicted, folder):
    run, rows = runs[SCORED.name, "full"], without(held_out(folder / SCORED.name), "score")
    model = library.SentenceTransformer(str(run.final), device="cpu")
    found = [each["embeddings"] for each in predictions(predicted(run.folder, rows))]
    for name in ("sentence1", "sentence2"):
        theirs = model.encode([row[name] for row in rows])
        np.testing.assert_allclose([each[name] for each in found], theirs, atol=1e-6)


def test_passages_are_scored_and_sorted_as_by_a_cross_encoder(runs, predicted, folder, tmp_path):
    run, rows = runs[CANDIDATES.name, "full"], held_out(folder / CANDIDATES.name)
    model = library.CrossEncoder(str(run.final), device="cpu")
    listed = [{"query": row["query"], "passages": [row["positive"], *row["negatives"]]} for row in rows]
    export(run.folder, step=None, to=tmp_path / "model", dtype=None, merge=False, push_to_hub=None)
    for source, given in ((run.folder, rows), (run.folder, listed), (tmp_path / "model", listed)):
        for row, found in zip(listed, predictions(predicted(source, given)), strict=True):
            theirs = model.predict([(row["query"], passage) for passage in row["passages"]])
            assert found["scores"] == pytest.approx(theirs.tolist(), abs=1e-6)
            ranked = model.rank(row["query"], row["passages"])
            assert [found["scores"][i] for i in found["order"]] == pytest.approx(
                [float(r["score"]) for r in ranked], abs=1e-6
            )


def test_answers_are_scored_by_a_reward_model(runs, predicted, folder, tmp_path):
    run, rows = runs[REWARD.name, "full"], rows_of(folder / REWARD.name / "held_out_pairs.jsonl")
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(run.final),
        AutoTokenizer.from_pretrained(run.final),
    )
    export(run.folder, step=None, to=tmp_path / "model", dtype=None, merge=False, push_to_hub=None)
    with torch.no_grad():
        expected = [
            {side: model.eval()(tokens_of(tokenizer, row["prompt"], row[side])[0]).logits.item() for side in SIDES}
            for row in rows
        ]
    for source in (run.folder, tmp_path / "model"):
        found = predictions(predicted(source, without(rows, "margin")))
        assert [each["scores"] for each in found] == [pytest.approx(each, abs=1e-5) for each in expected]
        single = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
        assert [each["score"] for each in predictions(predicted(source, single))] == pytest.approx(
            [each["chosen"] for each in expected], abs=1e-5
        )


def test_images_are_classified(runs, predicted, folder):
    run, files = runs[IMAGES.name, "full"], sorted((folder / IMAGES.name / "held_out").rglob("*.png"))
    model = AutoModelForImageClassification.from_pretrained(run.final).eval()
    pixels = AutoImageProcessor.from_pretrained(run.final)(
        [Image.open(f).convert("RGB") for f in files], return_tensors="pt"
    )
    with torch.no_grad():
        probabilities = model(**pixels).logits.softmax(dim=-1)
    found = predictions(predicted(run.final, [{"image": str(file)} for file in files]))
    assert [each["score"] for each in found] == pytest.approx(probabilities.amax(dim=-1).tolist(), abs=1e-5)
    assert [model.config.label2id[each["label"]] for each in found] == probabilities.argmax(dim=-1).tolist()


def test_rows_are_read_as_the_job_reads_them_or_by_the_usual_names(runs, predicted, capsys):
    run = runs[CLASS.name, "full"]
    own = predictions(predicted(run.folder, [{"text": "red blue"}, {"text": "  "}, {"text": "grey " * 90}]))
    assert own[1] is None  # there is nothing to classify
    assert "cut off: 1 row, the first" in capsys.readouterr().out
    assert predictions(predicted(run.folder, [], name="rows.csv", text="id,text\n1,red blue\n")) == [
        {"label": own[0]["label"], "score": pytest.approx(own[0]["score"], abs=1e-6)}
    ]
    found = finetune.generate(run.folder, ["red blue", {"text": "grey " * 90}], probabilities=True)
    assert [each["label"] for each in found] == [own[0]["label"], own[2]["label"]]
    assert sum(found[0]["probabilities"].values()) == pytest.approx(1.0)
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: .*`text`"):
        predicted(run.folder, [{"text": "red"}, {"id": 2}])


def test_a_model_or_an_option_without_a_prediction_is_refused_by_name(runs, predicted):
    with pytest.raises(UserError, match=r"task `masked_lm`.*fill-mask"):
        predicted(runs[MASKED.name, "full"].folder, [{"text": "red"}])
    for option in ({"system": "Be brief."}, {"temperature": 0.5}):
        with pytest.raises(UserError, match=f"--{next(iter(option))} does not apply to predictions"):
            predicted(runs[CLASS.name, "full"].folder, [{"text": "red"}], **option)
