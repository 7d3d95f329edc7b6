"""Loads an exported folder as anybody would, and compares it with what the training said: run as a program.

Imports nothing of this package, so that none of its patches, registered classes or caches can hide a fault. The first
line of its standard input names the request, a JSON file; the answer is written next to it.
"""

import ctypes
import hashlib
import inspect
import json
import math
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

if __name__ == "__main__":  # what it will need is imported while the folder is still being written
    for _name in sys.argv[1:]:
        if _name == "peft":
            import peft
        else:
            getattr(transformers, _name, None)

ANSWER = "answer.json"
MAX_NAMED = 3

Json = dict[str, Any]


def main() -> None:
    """Answer the request, whatever becomes of it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with who asked
    line = sys.stdin.readline().strip()
    if not line:
        return
    request: Json = json.loads(Path(line).read_text(encoding="utf-8"))
    torch.set_num_threads(request["num_threads"])
    answer: Json = {"problems": request["problems"], "notes": [], "distance": None}
    try:
        _Verification(request, answer).run()
    except Exception as error:
        answer["problems"].append(f"it cannot be loaded: {type(error).__name__}: {_first_lines(error)}")
    path = Path(line).with_name(ANSWER)
    path.with_suffix(".part").write_text(json.dumps(answer), encoding="utf-8")
    path.with_suffix(".part").rename(path)


class _Verification:
    """The comparisons of one folder; problems are sentences about it."""

    def __init__(self, request: Json, answer: Json) -> None:
        self.request = request
        self.folder = Path(request["folder"])
        self.problems: list[str] = answer["problems"]
        self.notes: list[str] = answer["notes"]
        self.answer = answer
        self.trusts = {"trust_remote_code": request["trust_remote_code"]}
        self.rows: list[Json] = []
        self.logits: list[Tensor] = []  # of the folder, in float32

    def run(self) -> None:
        """Compare the tokenizer, then tensors and logits; what is wrong with the files, the request knows already."""
        if self.request["tokens"]:
            self._compare_tokens(self.request["tokens"])
        if self.request["only_tensors"]:
            self._compare_tensor_files()
            return
        model = self._load(self.folder, is_adapter=self.request["is_adapter"], expected=True)
        self.rows = _read_rows(Path(self.request["rows"])) if self.request["rows"] else []
        self.logits = [_logits(model, row) for row in self.rows]
        if any(not bool(torch.isfinite(each).all()) for each in self.logits):
            self.problems.append("its logits are not finite.")
            return
        del model
        if not self.rows:
            return
        if self.request["compares_logits"]:
            self._compare_logits(self.logits, [row["logits"] for row in self.rows], self.request["tolerance"])
        if self.request["unmerged"]:
            self._compare_merge()
        if self.problems and all("logits" in each for each in self.problems):
            self.problems.append(
                "All tensors and settings in it are those that were to be written, so their computation (a merge, a "
                "gathering) is wrong."
            )

    # Tokens.

    def _compare_tokens(self, expected: Json) -> None:
        reader = transformers.AutoTokenizer
        tokenizer = reader.from_pretrained(self.folder, local_files_only=True, **self.trusts)
        wrong = []
        for each in expected["texts"]:
            found = tokenizer(each["text"], add_special_tokens=each["special"], verbose=False)["input_ids"]
            if list(found) != each["ids"]:
                wrong.append(f"{_shown(each['text'])}: {_both(each['ids'], list(found))}")
        for each in expected["conversations"]:
            text = tokenizer.apply_chat_template(each["turns"], tokenize=False, **each["arguments"])
            if text != each["text"]:
                wrong.append(f"the chat template renders {_shown(text)} instead of {_shown(each['text'])}")
        for name, value in expected["special_ids"].items():
            if getattr(tokenizer, name) != value:
                wrong.append(f"{name} is {getattr(tokenizer, name)} instead of {value}")
        self.answer["num_texts"] = len(expected["texts"]) + len(expected["conversations"])
        if wrong:
            count = f"{len(wrong)} of {self.answer['num_texts']} texts"
            name = type(tokenizer).__name__
            self.problems.append(
                f"AutoTokenizer loads it as {name}, which differs from the training's "
                f"{expected['class']} in {count}:\n    " + "\n    ".join(wrong[:MAX_NAMED])
            )

    # Tensors.

    def _load(self, folder: Path, *, is_adapter: bool, expected: bool = False, dtype: Any = torch.float32) -> Any:
        place = self.request["base"] if is_adapter else {"place": str(folder), "options": {}}
        if is_adapter and place["place"] is None:
            place = {**place, "place": str(folder / "base")}
        model = self._load_whole(place, may_lack=is_adapter and place.get("config") is not None, dtype=dtype)
        if expected:
            self._compare_tensors(model.state_dict(), self.request["tensors"])
        if is_adapter:
            model = self._with_adapter(model, folder, place)
            if expected:
                self._compare_adapter(model)
        return model.eval()

    def _load_whole(self, place: Json, *, may_lack: bool, dtype: torch.dtype) -> Any:
        reader = getattr(transformers, self.request["head_class"])
        options = {**place["options"], **self.trusts, "dtype": dtype, "use_safetensors": True}
        if place.get("config"):
            options["config"] = transformers.AutoConfig.from_pretrained(place["config"], **self.trusts)
            options["ignore_mismatched_sizes"] = True
        model, loading = reader.from_pretrained(place["place"], output_loading_info=True, **options)
        wrong = {key: sorted(map(str, loading.get(key) or ())) for key in ("missing_keys", "mismatched_keys")}
        wrong["unexpected_keys"] = sorted(map(str, loading.get("unexpected_keys") or ()))
        if may_lack or place["place"] != str(self.folder):
            wrong = {}
        for key, names in wrong.items():
            if names:
                self.problems.append(
                    f"transformers finds {len(names)} {key.replace('_keys', '')} tensors: "
                    f"{', '.join(names[:MAX_NAMED])}."
                )
        return model

    def _with_adapter(self, model: Any, folder: Path, place: Json) -> Any:
        size = place.get("num_embeddings") or 0
        if size and size > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(size, mean_resizing=False)
        return peft.PeftModel.from_pretrained(model, str(folder))

    def _compare_tensors(self, found: Mapping[str, Tensor], expected: Json) -> None:
        """Compare each tensor with what was to be written; it is loaded in float32, which changes no value."""
        wrong = [
            f"{name} ({why})"
            for name, facts in expected.items()
            if (why := _difference(found.get(name), facts)) is not None
        ]
        if wrong:
            self.problems.append(
                f"{len(wrong)} of {len(expected)} tensors are not those that were to be written: "
                f"{', '.join(wrong[:MAX_NAMED])}."
            )

    def _compare_adapter(self, model: Any) -> None:
        """Compare the adapter's file, and what peft has made of it in the model."""
        expected = self.request["adapter_tensors"]
        found: dict[str, Tensor] = {}
        for path in sorted(self.folder.glob("adapter_model*.safetensors")):
            found.update(_tensors_in(path))
        self._compare_tensors(found, expected)
        loaded = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        self._compare_tensors(loaded, {name: facts for name, facts in expected.items() if name in loaded})

    def _compare_tensor_files(self) -> None:
        """Compare tensors file by file, without a model: for what does not fit in memory."""
        expected = {**self.request["tensors"], **self.request["adapter_tensors"]}
        wrong, num_compared = [], 0
        for path in sorted(self.folder.rglob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a dict
                    if name not in expected:
                        continue
                    num_compared += 1
                    if (why := _difference(file.get_tensor(name), expected[name])) is not None:
                        wrong.append(f"{name} ({why})")
        self.notes.append(f"{num_compared} of {len(expected)} tensors were compared in their files")
        if wrong:
            self.problems.append(f"{len(wrong)} tensors differ in the files: {', '.join(wrong[:MAX_NAMED])}.")

    # Logits.

    def _compare_logits(self, found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: Json) -> None:
        measured = _distance(found, wanted, tolerance)
        self.answer["distance"] = max(measured, self.answer["distance"] or 0.0)
        limit, rule = tolerance["limit"], tolerance["rule"]
        if not measured <= limit and not self.problems and (floor := self._rounding_floor(tolerance)) > limit / 2:
            limit, rule = 2 * floor, f"twice what the rounding of {tolerance['dtype']} changes in this model"
            self.notes.append(f"{limit:.2g} was allowed, {rule}")
        if not measured <= limit:
            what = "in the median position" if tolerance["is_median"] else "in the worst position"
            self.problems.append(
                f"its logits differ from {tolerance['of']} by {measured:.2g} of their size {what}; "
                f"{limit:.2g} is allowed ({rule})."
            )

    def _rounding_floor(self, tolerance: Json) -> float:
        """Return how far the folder's own logits in the dtype of the training are from those in float32."""
        if tolerance["dtype"] == "float32":
            return 0.0
        dtype = getattr(torch, tolerance["dtype"])
        model = self._load(self.folder, is_adapter=self.request["is_adapter"], dtype=dtype)
        floor = _distance([_logits(model, row) for row in self.rows], self.logits, tolerance)
        return floor if math.isfinite(floor) else 0.0

    def _compare_merge(self) -> None:
        """Compare the merged model with base and adapter, unmerged, in float32; see `verify.tolerance`."""
        model = self._load(Path(self.request["unmerged"]), is_adapter=True)
        wanted = [_logits(model, row) for row in self.rows]
        if self.request["compares_logits"]:  # with the trained model, whose precision may be lower
            self._compare_logits(wanted, [row["logits"] for row in self.rows], self.request["tolerance"])
        self._compare_logits(self.logits, wanted, self.request["merge_tolerance"])
        kind = self.request["merged_dtype"]
        if kind == "float32" or self.problems:
            return
        merged = model.merge_and_unload()
        exact = _distances([_logits(merged, row) for row in self.rows], wanted)
        sharp = self.request["rounded_tolerance"]
        if float(exact.max()) > sharp["limit"]:
            self.notes.append("peft's own merge differs from the adapter, so the rounded weights were not compared")
            return
        self._name_merged_differences(merged, getattr(torch, kind))

    def _name_merged_differences(self, merged: Any, kind: torch.dtype) -> None:
        """Compare every weight with peft's own merge: rounded, they differ by one step of the dtype at most."""
        reader = getattr(transformers, self.request["head_class"])
        written = reader.from_pretrained(self.folder, dtype=kind, use_safetensors=True, **self.trusts).state_dict()
        wrong: dict[str, float] = {}
        for name, value in merged.state_dict().items():
            if name in written and value.is_floating_point() and value.shape == written[name].shape:
                step = torch.finfo(kind).eps * value.abs().clamp(min=torch.finfo(kind).tiny)
                step += 16 * torch.finfo(torch.float32).eps * value.abs().max()  # where base and adapter cancel
                over = float(((written[name].float() - value).abs() - 1.01 * step).max())
                if over > 0:
                    wrong[name] = over
        if wrong:
            names = sorted(wrong, key=lambda name: -wrong[name])
            self.problems.append(
                f"{len(names)} merged tensors differ from peft's own merge by more than rounding: "
                f"{', '.join(names[:MAX_NAMED])}."
            )


def digest(tensor: Tensor) -> str:
    """Return a digest of the values."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:32]


def _difference(found: Tensor | None, facts: Json) -> str | None:
    if found is None:
        return "missing"
    if list(found.shape) != facts["shape"]:
        return f"{tuple(found.shape)} instead of {tuple(facts['shape'])}"
    same = digest(found.to(getattr(torch, facts["dtype"]))) == facts["digest"]
    return None if same else "other values"


def _tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        yield from [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118  # not a dict


def _read_rows(path: Path) -> list[Json]:
    """Return rows as `inputs`, `positions` and `logits`."""
    rows: dict[int, Json] = {}
    for name, tensor in _tensors_in(path):
        number, part, *rest = name.split("/")
        row = rows.setdefault(int(number), {"inputs": {}})
        if part == "inputs":
            row["inputs"][rest[0]] = tensor
        else:
            row[part] = tensor
    return [rows[number] for number in sorted(rows)]


@torch.no_grad()
def _logits(model: nn.Module, row: Json) -> Tensor:
    """Return the logits at the row's positions, [positions, classes]."""
    named = set(inspect.signature(model.forward).parameters)
    inner = getattr(model, "get_base_model", lambda: model)()
    named |= set(inspect.signature(inner.forward).parameters)
    given = {name: value for name, value in row["inputs"].items() if name in named}
    if "use_cache" in named:
        given["use_cache"] = False
    out = model(**given)
    logits = out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state
    flat = logits.float().reshape(-1, logits.shape[-1])
    chosen: Tensor = flat if "positions" not in row else flat[row["positions"]]
    return chosen


def _distances(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Return how far apart the logits of each position are, as a part of their size.

    The size is how far they are from their mean, at least as much as in an average position.
    """
    if [each.shape for each in found] != [each.shape for each in wanted]:
        return torch.full((1,), torch.inf)
    one, other = torch.cat(list(found)), torch.cat(list(wanted))
    size = (other - other.mean(-1, keepdim=True) if other.shape[-1] > 2 else other).norm(dim=-1)
    part: Tensor = (one - other).norm(dim=-1) / size.clamp(min=float(size.square().mean().sqrt()) or 1.0)
    return part


def _distance(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: Json) -> float:
    distances = _distances(found, wanted)
    return float(distances.median() if tolerance["is_median"] else distances.max())


def _both(wanted: Sequence[int], found: Sequence[int]) -> str:
    """Return where two lists of ids part."""
    pairs = zip(wanted, found, strict=False)
    start = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(wanted), len(found)))
    first = max(0, start - 1)
    shown = [f"{'... ' if first else ''}{list(ids[first : first + 8])}" for ids in (wanted, found)]
    return f"trained with {shown[0]}, loaded gives {shown[1]}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def _first_lines(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:400]


if __name__ == "__main__":
    main()
