"""Cases drawn by hypothesis: healthy projects with something wrong in job file, rows, disk or model."""

import copy
import functools
import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from PIL import Image
from ruamel.yaml import YAML

from finetune.config.schema import items_of, keys_of, run_schema
from tests.fuzz.cases import CODE, JOB, Case, Change, Ground
from tests.fuzz.texts import JSON, TEMPLATES, VALUES
from tests.fuzz.texts import YAML as YAML_TEXTS

Strategy = st.SearchStrategy[Case]
CHECK, PREPARE, TRAIN = ("check", "job.yaml"), ("prepare", "--config", "job.yaml"), ("train", "--config", "job.yaml")
HEALTHY: dict[str, Any] = YAML(typ="safe", pure=True).load(JOB)

values = st.one_of(
    st.sampled_from(VALUES),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(VALUES),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=8,
    ),
)


def dotted_keys() -> list[str]:
    """Return every key of a job file, dotted."""

    def walk(nodes: dict[str, Any], prefix: str) -> list[str]:
        found = []
        for name, node in nodes.items():
            found += [prefix + name, *walk(dict(keys_of(node)), f"{prefix}{name}.")]
            found += walk(dict(items_of(node)), f"{prefix}{name}.0.")
        return found

    return walk(dict(keys_of(run_schema())), "")


@st.composite
def job_structures(draw: st.DrawFn) -> Case:
    """A job file in which up to three keys hold something else, are gone, misspelt or wrapped."""
    job = json.loads(json.dumps(HEALTHY))
    for _ in range(draw(st.integers(1, 3))):
        key, act = (
            draw(st.sampled_from(dotted_keys())),
            draw(st.sampled_from(("put", "put", "put", "remove", "misspell"))),
        )
        _edit(job, key.split("."), act, copy.deepcopy(draw(values)))
    return Case(CHECK, {"job.yaml": _as_yaml(job)})


def _edit(job: Any, path: list[str], act: str, value: Any) -> None:
    *outer, last = path
    for name in outer:
        if not isinstance(job, dict):
            return
        job = job.setdefault(name, {} if name != "0" else [])
    if isinstance(job, list):
        job.append(value)
    elif isinstance(job, dict):
        if act == "remove":
            job.pop(last, None)
        else:
            job[last + "x" if act == "misspell" else last] = value


def _as_yaml(job: Any) -> str:
    """Return the job as JSON, which YAML is; infinities and NaN in YAML's own spelling."""
    text = json.dumps(job, indent=1, ensure_ascii=False, default=str)
    return text.replace("-Infinity", "-.inf").replace("Infinity", ".inf").replace("NaN", ".nan")


@st.composite
def job_texts(draw: st.DrawFn) -> Case:
    """A job file whose text was damaged: pieces put in, lines doubled, removed, cut off, or bytes."""
    text = JOB
    for _ in range(draw(st.integers(1, 4))):
        text = draw(damaged_text(text, YAML_TEXTS))
    if draw(st.integers(0, 9)) == 0:
        return Case(CHECK, {"job.yaml": draw(damaged_bytes(text.encode("utf-8", errors="surrogatepass")))})
    return Case(CHECK, {"job.yaml": text})


@st.composite
def overrides(draw: st.DrawFn) -> Case:
    """A healthy job with `--set` of anything."""
    words = list(CHECK)
    for _ in range(draw(st.integers(1, 2))):
        key = draw(st.sampled_from(dotted_keys()) | st.text(max_size=12))
        value = draw(values.map(_as_yaml) | st.sampled_from(YAML_TEXTS) | st.text(max_size=20))
        words += ["--set", f"{key}={value}".replace("\0", "")]  # no command line can hold a NUL
    return Case(tuple(word.encode("utf-8", errors="replace").decode() for word in words))


def damaged_text(text: str, pieces: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Return the text with one thing done to it."""
    places = st.integers(0, len(text))
    lines = text.splitlines(keepends=True) or [""]
    numbers = st.integers(0, len(lines) - 1)
    return st.one_of(
        st.builds(lambda at, piece: text[:at] + piece + text[at:], places, st.sampled_from(pieces)),
        st.builds(
            lambda at, piece, to: text[:at] + piece + text[at + to :],
            places,
            st.sampled_from(pieces),
            st.integers(1, 20),
        ),
        st.builds(lambda at: text[:at], places),
        st.builds(lambda at: "".join(lines[: at + 1] + lines[at:]), numbers),
        st.builds(lambda at: "".join(lines[:at] + lines[at + 1 :]), numbers),
    )


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the bytes with bits flipped, cut off, filled with zeros or with something else at their end."""
    act = draw(st.sampled_from(("flip", "flip", "flip", "cut", "zeros", "more", "nothing", "doubled", "noise")))
    at = draw(st.integers(0, max(0, len(content) - 1)))
    if act == "flip" and content:
        return content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
    if act == "cut":
        return content[:at]
    if act == "zeros":
        return content[:at] + bytes(min(64, len(content) - at)) + content[at + 64 :]
    if act == "more":
        return content + draw(st.binary(min_size=1, max_size=16))
    if act == "doubled":
        return content + content
    if act == "noise":
        return content[:at] + draw(st.binary(min_size=1, max_size=32)) + content[at:]
    return b""


@st.composite
def damaged_json(draw: st.DrawFn, content: bytes) -> bytes:
    """Return JSON in which some values anywhere are others, are gone, or have another name."""
    try:
        root = [json.loads(content)]
    except ValueError:
        return draw(damaged_bytes(content))
    for _ in range(draw(st.integers(1, 2))):
        node: Any = root
        for _ in range(draw(st.integers(0, 6))):
            inner = node[draw(st.sampled_from(sorted(_names(node), key=str)))]
            if not _names(inner):
                break
            node = inner
        name = draw(st.sampled_from(sorted(_names(node), key=str)))
        if isinstance(node, dict) and draw(st.integers(0, 3)) == 0:
            value = node.pop(name)
            if draw(st.booleans()):
                node[str(name) + draw(st.sampled_from(("x", "\x1b[1m", "/../x", "\0")))] = value
        else:
            node[name] = copy.deepcopy(draw(values))  # those of the corpus are shared
    return json.dumps(root[0], default=str).encode()


def _names(node: Any) -> list[Any]:
    return list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []


@st.composite
def damaged_tensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Return a safetensors file whose header lies: its length, its JSON, the places and shapes in it."""
    size = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + size], content[8 + size :]
    act = draw(st.sampled_from(("size", "header", "header", "header", "bytes")))
    if act == "size":
        other = draw(st.sampled_from((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1, len(content))))
        return other.to_bytes(8, "little") + header + rest
    if act == "bytes":
        return draw(damaged_bytes(content))
    header = draw(damaged_json(header))
    return len(header).to_bytes(8, "little") + header + rest


ODD: tuple[Change, ...] = (
    None,
    "/",
    "-> /dev/zero",
    "-> nowhere",
    "-> .",
    "",
    "[]",
    "{}",
    "null",
    b"\xff\xfe",
    "[" * 5000,
    CODE,
)
"""What may lie in the place of any file."""


def damaged_file(path: str, content: bytes) -> st.SearchStrategy[Change]:
    """Return what may have become of a file, as its kind suggests."""
    if path.endswith(".json"):
        kind: st.SearchStrategy[Change] = damaged_json(content)
    elif path.endswith(".safetensors"):
        kind = damaged_tensors(content)
    elif path.endswith((".jsonl", ".yaml", ".jinja", ".md")):
        kind = damaged_text(content.decode(), (*JSON, *YAML_TEXTS, *TEMPLATES))
    else:
        kind = damaged_bytes(content)
    return st.one_of(kind, kind, kind, damaged_bytes(content), st.sampled_from(ODD))


@st.composite
def rows(draw: st.DrawFn, ground: Ground) -> Case:
    """Rows that are wrong, in the formats that a job can name, under the tasks that read them."""
    task, healthy = draw(st.sampled_from(tuple(ROWS.items())))
    kind = draw(st.sampled_from(("jsonl", "jsonl", "jsonl", "json", "csv", "parquet", "txt")))
    name = f"rows.{kind}"
    job = json.loads(json.dumps(HEALTHY))
    job["task"], job["data"]["train"] = {"name": task}, {"path": name}
    del job["data"]["validation"], job["evaluate"]
    if task != "sft":
        del job["data"]["chat_template"]
    if task == "masked_lm":
        job["model"]["from_config"] = {"model_type": "bert", "values": {"hidden_size": 16, "num_hidden_layers": 1}}
    content = draw(_rows_as(kind, healthy))
    odd = draw(st.integers(0, 19)) == 0
    change: Change = draw(st.sampled_from(ODD)) if odd else content
    words = draw(st.sampled_from((PREPARE, PREPARE, ("preview", "--config", "job.yaml"))))
    return Case(words, {"job.yaml": _as_yaml(job), name: change})


_TURNS = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"messages": _TURNS},
    "pretrain": {"text": "red blue green"},
    "text_classification": {"text": "red", "label": "warm"},
    "preference": {"messages": _TURNS[:1], "chosen": "red", "rejected": "blue"},
    "token_classification": {"tokens": ["red", "blue"], "tags": ["A", "B"]},
    "seq2seq": {"source": "red", "target": "blue"},
    "masked_lm": {"text": "red blue green"},
}


@st.composite
def _rows_as(draw: st.DrawFn, kind: str, healthy: dict[str, Any]) -> bytes:
    wrong = [json.loads(draw(damaged_json(json.dumps(healthy).encode()))) for _ in range(draw(st.integers(1, 3)))]
    table = [healthy, *wrong, healthy]
    if kind == "jsonl":
        lines = [json.dumps(row).encode() for row in table]
        if draw(st.booleans()):
            lines[draw(st.integers(0, len(lines) - 1))] = draw(st.sampled_from(JSON)).encode(
                "utf-8", errors="surrogatepass"
            )
        return b"\n".join(lines) + draw(st.sampled_from((b"\n", b"", b"\0", b"\xff", b"\r\n\r\n", b"\n\n{")))
    if kind == "json":
        return json.dumps(table).encode() if draw(st.booleans()) else draw(damaged_bytes(json.dumps(table).encode()))
    if kind == "csv":
        names = list(healthy)
        text = ",".join(names) + "\n" + "\n".join(",".join(str(row) for _ in names) for row in table)
        return draw(damaged_text(text, (*JSON, '"', '""', ",,,,", "\n\n", "a," * 3000))).encode(
            "utf-8", errors="surrogatepass"
        )
    if kind == "parquet":
        return draw(_parquet(healthy))
    return draw(damaged_text("red blue\ngreen\n", JSON)).encode("utf-8", errors="surrogatepass")


@st.composite
def _parquet(draw: st.DrawFn, healthy: dict[str, Any]) -> bytes:
    columns: dict[str, Any] = {}
    for name in healthy:
        kind = draw(st.sampled_from(tuple(COLUMNS)))
        columns[draw(st.sampled_from((name, name, name, "x", "\x1b[1m")))] = COLUMNS[kind](healthy[name])
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    content = file.getvalue()
    return content if draw(st.integers(0, 2)) else draw(damaged_bytes(content))


COLUMNS: dict[str, Callable[[Any], pa.Array]] = {
    "good": lambda value: pa.array([value, value]),
    "null": lambda value: pa.array([value, None]),
    "nulls": lambda value: pa.nulls(2),
    "numbers": lambda value: pa.array([1, 2]),
    "decimals": lambda value: pa.array([1, 2]).cast(pa.decimal128(30, 2)),
    "bytes": lambda value: pa.array([b"\xff\xfe", b""]),
    "times": lambda value: pa.array([0, 1], pa.timestamp("ns", tz="UTC")),
    "maps": lambda value: pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    "lists": lambda value: pa.array([[[[["a"]]]], []]),
    "words": lambda value: pa.array(["a", "b"]).dictionary_encode(),
    "empty": lambda value: pa.array(["", ""]),
}


_CSV = '1;"red; blue"\n2;green\n1;"she said ""red"""\n'
_NESTED = json.dumps({"info": 1, "data": {"items": [{"text": "red blue"}, {"text": "green"}]}})
_CONLL = "-DOCSTART- O\n\nred A\nblue B\n\n# id = 1\ngreen A\n"
FILES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("rows.csv", "text_classification", _CSV, {"columns": {"label": 0, "text": 1}, "delimiter": ";"}),
    ("rows.csv", "text_classification", f"label;text\n{_CSV}", {"delimiter": ";", "encoding": "cp1252"}),
    ("rows.tsv", "text_classification", f"label;text\n{_CSV}".replace(";", "\t"), {"quotes": False}),
    ("rows.csv", "pretrain", _CSV, {"columns": {"0": "a", "1": "text"}, "delimiter": ";", "encoding": "utf-16"}),
    ("rows.json", "pretrain", _NESTED, {"records": "data.items"}),
    ("rows.conll", "token_classification", _CONLL, {}),
    ("rows.bio", "token_classification", _CONLL, {"columns": {"tokens": 0, "tags": 1}}),
    ("rows.txt", "pretrain", "red blue\ngreen\n", {"encoding": "shift_jis"}),
)
_FILE_PIECES = ('"', '""', ";", "\t", "\r", "\n\n", "\0", "\ufeff", "# ", "{", "]", "a;" * 3000, "\u00e9", "\u202e")


@st.composite
def files(draw: st.DrawFn) -> Case:
    """Files of rows as people have them, damaged, with keys that may not fit them: in a job, or looked at alone."""
    name, task, text, keys = draw(st.sampled_from(FILES))
    encoding = draw(st.sampled_from((keys.get("encoding", "utf-8"), "utf-8", "utf-16", "utf-16-le", "cp1252")))
    damaged = draw(damaged_text(text, _FILE_PIECES) | st.just(text)).encode(encoding, errors="replace")
    content = draw(damaged_bytes(damaged) | st.just(damaged))
    if draw(st.booleans()):
        name, content = f"{name}.gz", draw(damaged_bytes(gzip.compress(content)) | st.just(gzip.compress(content)))
    other = draw(st.sampled_from(FILES))[3]
    job = json.loads(json.dumps(HEALTHY))
    job["task"], job["data"]["train"] = {"name": task}, {"path": name, **draw(st.sampled_from((keys, keys, other)))}
    del job["data"]["validation"], job["evaluate"], job["data"]["chat_template"]
    words = draw(st.sampled_from((PREPARE, ("preview", name))))
    return Case(words, {"job.yaml": _as_yaml(job), name: content})


@st.composite
def templates(draw: st.DrawFn) -> Case:
    """Templates of rows and chats, in a job or as a file."""
    template = draw(
        st.sampled_from(TEMPLATES) | st.lists(st.sampled_from(TEMPLATES), min_size=2, max_size=3).map("".join)
    )
    job = json.loads(json.dumps(HEALTHY))
    del job["data"]["validation"], job["evaluate"]
    files: dict[str, Change] = {}
    if draw(st.booleans()):
        job["task"], job["data"]["train"] = (
            {"name": "pretrain"},
            {"path": "train.jsonl", "template": {"text": template}},
        )
        del job["data"]["chat_template"]
    elif draw(st.booleans()):
        files["chat.jinja"] = template
        job["data"]["chat_template"] = "./chat.jinja"
    else:
        job["data"]["chat_template"] = template
    return Case(PREPARE, {"job.yaml": _as_yaml(job), **files})


@st.composite
def checkpoints(draw: st.DrawFn, ground: Ground) -> Case:
    """A run's folder with something wrong in it, met by the commands that read it back."""
    commands = (("ls",), ("ls", "--verify"), ("ls", "--json"), ("show",), ("show", "--json"), ("verify",), ("prune",))
    looks = [("checkpoint", words[0], "runs/job", *words[1:]) for words in commands]
    after = [("checkpoint", "export", "runs/job", "--to", "out/x"), ("evaluate", "runs/job"), TRAIN, TRAIN]
    paths = [path for path in ground.files("runs", "job") if not path.startswith("runs/job/final/")]
    case = draw(_with_damage(ground, paths, st.sampled_from((*looks, *after)), most=2))
    return replace(case, same_model=case.words == TRAIN)


@st.composite
def prepared_sets(draw: st.DrawFn, ground: Ground) -> Case:
    """Tokenized rows in the cache with something wrong in them: what is trained is the healthy project's model."""
    again = (*TRAIN, "--set", "run.folder=runs/again")
    case = draw(_with_damage(ground, ground.files("cache"), st.sampled_from((again, again, PREPARE)), most=2))
    return replace(case, same_model=True)


@st.composite
def models(draw: st.DrawFn, ground: Ground) -> Case:
    """A model folder or an adapter with something wrong in it, met by the commands that load it."""
    loads = (
        ("chat", "runs/job/final", "--max-new-tokens", "2"),
        ("generate", "runs/job/final", "--input", "prompts.jsonl", "--output", "out/a.jsonl", "--max-new-tokens", "2"),
        ("chat", "adapter", "--max-new-tokens", "2"),
        ("export", "adapter", "--merge", "--to", "out/merged"),
        ("evaluate", "runs/job/final", "--config", "job.yaml"),
        PREPARE,
    )
    words = draw(st.sampled_from(loads))
    paths = ground.files("tokenizer") if words == PREPARE else ground.files("runs", "job", "final")
    if "adapter" in words:
        paths = [*paths, *ground.files("adapter") * 3]
    case = draw(_with_damage(ground, paths, st.just(words), most=2))
    stdin = draw(st.sampled_from((b"hi\n", b"y\nhi\n", b"", b"\xff\xfe\n", b"/adapter x\n", b"\x1b[2J\n")))
    return Case(case.words, case.files, stdin)


@st.composite
def _with_damage(
    draw: st.DrawFn, ground: Ground, paths: list[str], words: st.SearchStrategy[tuple[str, ...]], *, most: int
) -> Case:
    chosen = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=most, unique=True))
    files = {path: draw(damaged_file(path, ground.read(path))) for path in chosen}
    return Case(draw(words), files)


AUTO_MAP = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}


@st.composite
def hostile_models(draw: st.DrawFn, ground: Ground) -> Case:
    """A model folder that brings code and would like to have it run."""
    case = draw(models(ground))
    places = [path for path in ground.files("runs", "job", "final") + ground.files("adapter") if path.endswith(".json")]
    path = draw(st.sampled_from(places))
    values = json.loads(ground.read(path))
    name = draw(st.sampled_from(("auto_map", "custom_pipelines", "auto_mapping", "attn_implementation", "model_type")))
    values[name] = draw(
        st.sampled_from((AUTO_MAP, "evil.T", "evil", "x/y:evil", {"parent_library": "evil"}, ["evil.T", None]))
    )
    folder = path.rpartition("/")[0]
    brought = (
        "evil.py",
        "custom_generate/generate.py",
        "modeling_evil.py",
        "__init__.py",
        "setup.py",
        "sitecustomize.py",
    )
    files = {f"{folder}/{name}": CODE for name in brought}
    return Case(case.words, {path: json.dumps(values), **files}, case.stdin)


MARKUP = (
    *(
        "</script><pwned>",
        "<img src=x onerror=pwned>",
        "\"'><pwned x=",
        "<!--<script>",
        "{{7*7}}{% raw %}",
        "\u2028]]>",
    ),
    *("<a href='javascript:pwned'>x</a>", "&lt;pwned&gt;", "</title><pwned>", "=cmd|' /C calc'!A0", "<b>%{x}</b>"),
)
"""Texts that a page must show as they are; no element `pwned` may come of them."""


@st.composite
def damaged_lines(draw: st.DrawFn, content: bytes) -> bytes:
    """Return JSON lines, one to three of which are damaged, doubled or hold markup."""
    lines = content.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        act = draw(st.sampled_from(("json", "json", "bytes", "again", "markup", "markup")))
        if act == "json":
            lines[at] = draw(damaged_json(lines[at]))
        elif act == "bytes":
            lines[at] = draw(damaged_bytes(lines[at]))
        elif act == "again":
            lines.insert(draw(st.integers(0, len(lines))), lines[at])
        else:
            lines[at] = _with_markup(lines[at], draw(st.sampled_from(MARKUP)))
    return b"\n".join(lines) + b"\n"


def _with_markup(content: bytes, markup: str) -> bytes:
    """Return JSON with the markup in place of every text but the kind of event, and as another name of every object."""

    def changed(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: v if k in ("event", "time") else changed(v) for k, v in node.items()} | {markup: markup}
        if isinstance(node, list):
            return [changed(each) for each in node]
        return markup if isinstance(node, str) else node

    try:
        return json.dumps(changed(json.loads(content))).encode()
    except ValueError:
        return content


@st.composite
def pages(draw: st.DrawFn, ground: Ground) -> Case:
    """What a run has recorded with something wrong or with markup in it, met by the commands that show it."""
    compared = ("compare", "runs/job", "runs/other")
    shows = (("report", "runs/job"), (*compared, "--html", "out/c.html"), (*compared, "--json"))
    names = ("events.jsonl", "events.jsonl", "environment.json", "status.json", "resolved.yaml", "audit.json")
    files: dict[str, Change] = {}
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        path = f"runs/job/{name}"
        content = ground.read(path)
        if name.endswith(".jsonl"):
            files[path] = draw(damaged_lines(content))
        elif draw(st.booleans()) and name.endswith(".json"):
            files[path] = _with_markup(content, draw(st.sampled_from(MARKUP)))
        else:
            files[path] = draw(damaged_file(path, content))
    return Case(draw(st.sampled_from(shows)), files)


@st.composite
def continued(draw: st.DrawFn, ground: Ground) -> Case:
    """Answers of a killed `generate` with something wrong in them, met by the same command again."""
    given = ("--input", "prompts.jsonl", "--output", "out/a.jsonl", "--max-new-tokens", "2")
    folder = "out/.a.jsonl.parts"
    lines = b'{"row": 0, "answer": "red"}\n'
    files: dict[str, Change] = {f"{folder}/rank-00000.jsonl": draw(st.sampled_from(ODD) | damaged_lines(lines))}
    if draw(st.booleans()):
        files[f"{folder}/about.json"] = draw(st.sampled_from(ODD) | damaged_json(b'{"rows": "x", "seed": 0}'))
    return Case(("generate", "runs/job/final", *given), files)


@st.composite
def streams(draw: st.DrawFn, ground: Ground) -> Case:
    """A stream's folder in the cache with something wrong in it, met by the same training and by `prepare`."""
    words = draw(st.sampled_from((STREAMED, STREAMED, (*PREPARE, "--set", STREAM))))
    healthy = _left_by(ground, STREAMED, "cache/streams", "*")
    files: dict[str, Change] = {**healthy}
    for path in draw(st.lists(st.sampled_from(sorted(healthy)), min_size=1, max_size=2, unique=True)):
        files[path] = draw(damaged_file(path, healthy[path]))
    return Case(words, files)


STREAM = "data.train={path: train.jsonl, stream: {window_rows: 8}}"
STREAMED = (*TRAIN, "--set", "run.folder=runs/stream", "--set", STREAM)


@st.composite
def sweeps(draw: st.DrawFn, ground: Ground) -> Case:
    """A sweep's folder with something wrong in its journal or in the state of a run, met by the sweep again."""
    words = ("sweep", "--config", "job.yaml", "--set", "run.seed=1,2", "--folder", "runs/sweep")
    healthy = _left_by(ground, words, "runs/sweep", "sweep.journal", "status.json")
    path = draw(st.sampled_from(("runs/sweep/sweep.journal", "runs/sweep/sweep.journal", *sorted(healthy))))
    content = healthy[path]
    lines = damaged_lines(content) if path.endswith(".journal") else damaged_json(content)
    damage = draw(st.one_of(lines, lines, lines, damaged_bytes(content), st.sampled_from(ODD)))
    more = draw(
        st.sampled_from(((), ("--json",), ("--search", "3"), ("--retry-failed",), ("--set", "train.steps=3,4")))
    )
    return Case((*words, *more, "--dry-run"), {**healthy, path: damage})


@functools.cache
def _left_by(ground: Ground, words: tuple[str, ...], folder: str, *names: str) -> dict[str, bytes]:
    """Return what the command leaves on the healthy project; it is run once."""
    return ground.left_by(words, folder, names)


IMAGES = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
VIT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}


@st.composite
def images(draw: st.DrawFn) -> Case:
    """Folders of images, one to three of which are damaged, are no image, or are larger than they say."""
    job = json.loads(json.dumps(HEALTHY))
    job["task"], job["data"] = {"name": "image_classification"}, {"train": {"path": "train"}, "cache_folder": "cache"}
    values = {**VIT, "patch_size": 8}
    job["model"] = {"from_config": {"model_type": "vit", "values": values}, "image_processor": {"size": 16}}
    del job["evaluate"]
    files: dict[str, Change] = {f"train/{name}/good.png": _image("PNG", (16, 16)) for name in ("disc", "square")}
    for number in range(draw(st.integers(1, 3))):
        file_type = draw(st.sampled_from(IMAGES))
        size = draw(st.sampled_from(((16, 16), (1, 1), (3, 700), (256, 256))))
        name = f"train/disc/{number}.{draw(st.sampled_from((file_type.lower(), 'png', 'jpg', 'jpeg', 'tif')))}"
        content = _image(file_type, size)
        whole = st.one_of(damaged_bytes(content), damaged_bytes(content), st.just(content), _huge_png())
        files[name] = draw(st.one_of(whole, whole, whole, whole, st.sampled_from(ODD)))
    words = draw(st.sampled_from((PREPARE, PREPARE, ("preview", "--config", "job.yaml"), TRAIN)))
    return Case(words, {"job.yaml": _as_yaml(job), **files})


def _image(file_type: str, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(file, file_type)
    return file.getvalue()


@st.composite
def _huge_png(draw: st.DrawFn) -> bytes:
    """Return a PNG whose header has another width and height, with the right checksum."""
    content = _image("PNG", (16, 16))
    sides = st.sampled_from((0, 1, 17, 5000, 60_000, 2**31 - 1, 2**32 - 1))
    header = b"IHDR" + struct.pack(">II", draw(sides), draw(sides)) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def kinds(ground: Ground) -> dict[str, tuple[int, Strategy]]:
    """Return every kind of case by name, with its share in a hundred."""
    return {
        "job structures": (16, job_structures()),
        "job texts": (12, job_texts()),
        "overrides": (9, overrides()),
        "rows": (14, rows(ground)),
        "files": (4, files()),
        "templates": (4, templates()),
        "checkpoints": (10, checkpoints(ground)),
        "prepared sets": (4, prepared_sets(ground)),
        "models": (10, models(ground)),
        "hostile models": (4, hostile_models(ground)),
        "pages": (5, pages(ground)),
        "continued": (2, continued(ground)),
        "streams": (1, streams(ground)),
        "sweeps": (2, sweeps(ground)),
        "images": (3, images()),
    }
