"""sentence-transformers loads what a run exports, and its own evaluators measure what the run has measured."""

import pytest
import torch

from finetune.commands.evaluate import find_evaluation_target, measure_metrics
from finetune.commands.export import export
from tests.task_cases.classification import held_out
from tests.task_cases.embedding import CASES
from tests.task_cases.runs import launch, prepare

ABSENT = "sentence-transformers is not installed (extra dev)"
library = pytest.importorskip("sentence_transformers", reason=ABSENT)
evaluation = pytest.importorskip("sentence_transformers.evaluation", reason=ABSENT)
reranking = pytest.importorskip("sentence_transformers.cross_encoder.evaluation", reason=ABSENT)
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

PAIRS, SCORED, CANDIDATES = CASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("sentences")
    prepare(CASES, place)
    return place


@pytest.fixture(scope="module")
def runs(folder):
    return launch(None, [(case, variant) for case in CASES for variant in ("full", "lora")], folder)


@pytest.fixture(params=["full", "lora", "merged", "checkpoint"])
def exported(request, runs, tmp_path):
    """Return a function that gives the exported folder of a case and its run."""

    def of(case):
        run = runs[case.name, "full" if request.param == "full" else "lora"]
        assert run.error is None
        if request.param in ("full", "lora"):
            return run.final, run
        source = run.final if request.param == "merged" else run.folder
        export(source, step=None, to=tmp_path / "merged", dtype=None, merge=True, push_to_hub=None)
        return tmp_path / "merged", run

    return of


def test_retrieval_is_measured_alike(exported, folder):
    final, run = exported(PAIRS)
    model = library.SentenceTransformer(str(final), device="cpu")
    assert model.max_seq_length == 48
    assert (model.prompts["query"], model.prompts["document"]) == ("query: ", "passage: ")
    assert model.similarity_fn_name == "cosine"
    rows = held_out(folder / PAIRS.name)
    passages = sorted({each for row in rows for each in (row["positive"], *row["negatives"])})
    anchors = sorted({row["anchor"] for row in rows})
    right = {a: {row["positive"] for row in rows if row["anchor"] == a} for a in anchors}
    for size, suffix in ((None, ""), (8, "_dim_8")):
        measured = evaluation.InformationRetrievalEvaluator(
            {each: each for each in anchors},
            {each: each for each in passages},
            right,
            mrr_at_k=[10],
            ndcg_at_k=[10],
            precision_recall_at_k=[1, 5, 10],
            query_prompt_name="query",
            corpus_prompt_name="document",
            truncate_dim=size,
        )(model)
        for name in ("recall@1", "recall@5", "recall@10", "ndcg@10", "mrr@10"):
            ours = run.metrics[name.replace("@", "_at_") + suffix]
            assert measured[f"cosine_{name}"] == pytest.approx(ours, abs=1e-6), (name, size)


def test_scores_are_correlated_alike(exported, folder):
    final, run = exported(SCORED)
    rows = held_out(folder / SCORED.name)
    texts = [[row[name] for row in rows] for name in ("sentence1", "sentence2")]
    evaluator = evaluation.EmbeddingSimilarityEvaluator(*texts, [r["score"] for r in rows])
    measured = evaluator(library.SentenceTransformer(str(final), device="cpu"))
    assert measured["spearman_cosine"] == pytest.approx(run.metrics["spearman"], abs=1e-6)
    assert measured["pearson_cosine"] == pytest.approx(run.metrics["pearson"], abs=1e-5)


def test_candidates_are_ranked_alike(exported, folder):
    final, run = exported(CANDIDATES)
    model = library.CrossEncoder(str(final), device="cpu")
    assert isinstance(model.activation_fn, torch.nn.Identity)
    assert model.max_seq_length == 48
    rows = [
        {"query": row["query"], "positive": [row["positive"]], "negative": row["negatives"]}
        for row in held_out(folder / CANDIDATES.name)
    ]
    evaluator = reranking.CrossEncoderRerankingEvaluator(rows, at_k=10)
    measured = evaluator(model)
    assert measured["mrr@10"] == pytest.approx(run.metrics["mrr_at_10"], abs=1e-6)
    assert measured["ndcg@10"] == pytest.approx(run.metrics["ndcg_at_10"], abs=1e-6)


@pytest.mark.parametrize("variant", ["full", "lora"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_export_is_evaluated_as_its_run_was(runs, case, variant):
    run = runs[case.name, variant]
    target = find_evaluation_target(run.final, step=None, job=None, overrides=())
    assert measure_metrics(target).metrics == pytest.approx(dict(run.metrics), rel=1e-5, nan_ok=True)
