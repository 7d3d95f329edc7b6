"""Rows to predict, which need no label: the columns that a model reads, by the names that the job gives them."""

from finetune.data.formats.columns import Columns, quoted_list
from finetune.data.formats.conversations import read_exchange, turns_of, with_system
from finetune.data.formats.row_format import read_negatives, read_tokens, with_tools
from finetune.data.formats.spans import words_of
from finetune.data.rows import Row, describe
from finetune.data.turns import read_turns
from finetune.errors import DataError

QUERIES = ("anchor", "query", "sentence1")
_PASSAGES = ("text", "positive", "sentence2")


def read_unlabeled_text(columns: Columns) -> Row:
    """Return `text`, and `text_pair` if the row has one."""
    return {name: columns.text(name) for name in ("text", *_present(columns, "text_pair"))}


def read_unlabeled_words(columns: Columns) -> Row:
    """Return the words, `tokens`: of the row, or of its `text`, as the format `spans` reads them."""
    is_split = _present(columns, "tokens")
    return {"tokens": read_tokens(columns) if is_split else words_of(columns.text("text"))}


def read_unlabeled_image(columns: Columns) -> Row:
    """Return the image, whose file is read later."""
    return {"image": columns.image(columns.value("image"), title=columns.title("image"))}


def read_texts_to_embed(columns: Columns) -> Row:
    """Return the `queries` and `passages` of all columns that the row has, and the `texts` by column, in this order."""
    queries = {name: columns.text(name) for name in _present(columns, *QUERIES)}
    passages = {name: columns.text(name) for name in _present(columns, *_PASSAGES)}
    negatives = read_negatives(columns)
    texts = {**queries, **passages, **({"negatives": negatives} if negatives else {})}
    if not texts:
        raise _lacking(columns, *QUERIES, *_PASSAGES)
    return {"queries": list(queries.values()), "passages": [*passages.values(), *negatives], "texts": texts}


def read_passages_to_rank(columns: Columns) -> Row:
    """Return `queries`, which is one, and `passages`: the row's list, positive and negatives, or second text."""
    queries = _present(columns, *QUERIES, "text")[:1]
    passages = [columns.text(name) for name in _present(columns, "positive", "sentence2", "text_pair")]
    listed = columns.optional("passages")
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise DataError(f"{columns.title('passages')} must be a list of texts, but is {describe(listed)}.")
        passages += listed
    passages += read_negatives(columns)
    if not queries or not passages:
        raise _lacking(columns, *(QUERIES if passages else ("passages", "positive")))
    return {"queries": [columns.text(queries[0])], "passages": passages}


def read_answers_to_score(columns: Columns) -> Row:
    """Return `conversations`, the prompt with each answer, by the answer's column; and `tools` if the row has any."""
    conversations = {
        name: with_system(read_turns(columns.json_value(name), title=columns.title(name)), columns)
        for name in _present(columns, "messages", "conversations")[:1]
    }
    if not conversations:
        names = _present(columns, "completion", "chosen", "rejected")[:2]
        if not names:
            raise _lacking(columns, "messages", "conversations", "completion", "chosen", "rejected")
        prompt = turns_of(columns, "prompt", by="user") if _present(columns, "prompt") else []
        prompt, answers, _ = read_exchange(columns, prompt, names)
        conversations = {name: [*prompt, *answer] for name, answer in zip(names, answers, strict=True)}
    return with_tools({"conversations": conversations}, columns)


def _present(columns: Columns, *names: str) -> list[str]:
    """Return the names of columns in which the row has a value."""
    return [name for name in names if columns.optional(name) is not None]


def _lacking(columns: Columns, *names: str) -> DataError:
    return DataError(f"has none of the columns {quoted_list(names)}; its columns are {quoted_list(columns.row)}.")
