"""A program that loads an exported folder with public APIs and compares it with the trained model.

It imports nothing from this package, so that patches, registered classes or caches cannot hide an error. The first
line of its standard input is the path of the request, a JSON file; the answer is written next to it.
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

if __name__ == "__main__" and sys.platform == "linux":
    # PR_SET_PDEATHSIG: end with the parent process, also if it dies during the imports below, which take seconds
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

if __name__ == "__main__":  # import libraries while the folder is still being written
    for _name in sys.argv[1:]:
        if _name == "peft":
            import peft
        else:
            getattr(transformers, _name, None)

ANSWER = "answer.json"
MAX_NAMED = 3

Json = dict[str, Any]


def main() -> None:
    """Read the request and write an answer, also after an error."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: exit with the parent process
    line = sys.stdin.readline().strip()
    if not line:
        return
    request: Json = json.loads(Path(line).read_text(encoding="utf-8"))
    torch.set_num_threads(request["num_threads"])
    answer: Json = {"problems": request["problems"], "notes": [], "distance": None}
    try:
        _Verification(request, answer).run()
    except Exception as error:
        reason = re.sub(r"\s+", " ", str(error)).strip()[:400]
        answer["problems"].append(f"loading it failed: {type(error).__name__}: {reason}")
    path = Path(line).with_name(ANSWER)
    path.with_suffix(".part").write_text(json.dumps(answer), encoding="utf-8")
    path.with_suffix(".part").rename(path)


class _Verification:
    """The comparisons of one folder; problems are sentences about the folder."""

    def __init__(self, request: Json, answer: Json) -> None:
        self.request = request
        self.folder = Path(request["folder"])
        self.problems: list[str] = answer["problems"]
        self.notes: list[str] = answer["notes"]
        self.answer = answer
        self.trust = {"trust_remote_code": request["trust_remote_code"]}
        self.rows: list[Json] = []
        self.logits: list[Tensor] = []  # of the folder's model, in float32

    def run(self) -> None:
        """Compare the tokenizer, then tensors and logits; the request already contains the problems of other files."""
        if self.request["tokens"]:
            self._compare_tokens(self.request["tokens"])
        if self.request["only_tensors"]:
            self._compare_tensor_files()
            return
        model = self._load(self.folder, is_adapter=self.request["is_adapter"], compares_tensors=True)
        self.rows = _read_rows(Path(self.request["rows"])) if self.request["rows"] else []
        self.logits = [_logits(model, row) for row in self.rows]
        if any(not bool(torch.isfinite(logits).all()) for logits in self.logits):
            self.problems.append("its logits are not finite.")
            return
        del model
        if not self.rows:
            return
        if self.request["compares_logits"]:
            self._compare_logits(self.logits, [row["logits"] for row in self.rows], self.request["tolerance"])
        if self.request["unmerged"]:
            self._compare_merge()
        if self.problems and all("logits" in problem for problem in self.problems):
            self.problems.append(
                "All tensors and settings were written correctly, so the computation of the tensors (merging, "
                "gathering) is wrong."
            )

    # Tokens.

    def _compare_tokens(self, expected: Json) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True, **self.trust)
        differences = []
        for sample in expected["texts"]:
            ids = list(tokenizer(sample["text"], add_special_tokens=sample["special"], verbose=False)["input_ids"])
            if ids != sample["ids"]:
                differences.append(f"{_shortened(sample['text'])}: {_first_difference(sample['ids'], ids)}")
        for conversation in expected["conversations"]:
            arguments = conversation["arguments"]
            text = tokenizer.apply_chat_template(conversation["turns"], tokenize=False, **arguments)
            if text != conversation["text"]:
                trained = _shortened(conversation["text"])
                differences.append(f"the chat template renders {_shortened(text)} instead of {trained}")
        for name, value in expected["special_ids"].items():
            if getattr(tokenizer, name) != value:
                differences.append(f"{name} is {getattr(tokenizer, name)} instead of {value}")
        num_texts = self.answer["num_texts"] = len(expected["texts"]) + len(expected["conversations"])
        if differences:
            self.problems.append(
                f"AutoTokenizer loads it as {type(tokenizer).__name__}, which differs from the tokenizer in training, "
                f"{expected['class']}, for {len(differences)} of {num_texts} texts:\n    "
                + "\n    ".join(differences[:MAX_NAMED])
            )

    # Tensors.

    def _load(
        self, folder: Path, *, is_adapter: bool, compares_tensors: bool = False, dtype: Any = torch.float32
    ) -> Any:
        """Return the folder's model, with its adapter if it holds one."""
        source = self.request["base"] if is_adapter else {"path": str(folder), "options": {}}
        if is_adapter and source["path"] is None:
            source = {**source, "path": str(folder / "base")}
        model = self._load_full_model(source, dtype=dtype)
        if compares_tensors:
            self._compare_tensors(model.state_dict(), self.request["tensors"])
        if is_adapter:
            size = source.get("num_embeddings") or 0
            if size and size > model.get_input_embeddings().num_embeddings:
                model.resize_token_embeddings(size, mean_resizing=False)
            model = peft.PeftModel.from_pretrained(model, str(folder))
            if compares_tensors:
                expected = self.request["adapter_tensors"]
                in_file: dict[str, Tensor] = {}
                for path in sorted(self.folder.glob("adapter_model*.safetensors")):
                    in_file.update(_tensors_in(path))
                self._compare_tensors(in_file, expected)
                loaded = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
                self._compare_tensors(loaded, {name: facts for name, facts in expected.items() if name in loaded})
        return model.eval()

    def _load_full_model(self, source: Json, *, dtype: torch.dtype) -> Any:
        auto_class = getattr(transformers, self.request["head_class"])
        options = {**source["options"], **self.trust, "dtype": dtype, "use_safetensors": True}
        if source.get("config"):
            options["config"] = transformers.AutoConfig.from_pretrained(source["config"], **self.trust)
            options["ignore_mismatched_sizes"] = True
        model, loading = auto_class.from_pretrained(source["path"], output_loading_info=True, **options)
        if not source.get("config") and source["path"] == str(self.folder):
            for status in ("missing", "mismatched", "unexpected"):
                if names := sorted(map(str, loading.get(f"{status}_keys") or ())):
                    listed = ", ".join(names[:MAX_NAMED])
                    self.problems.append(f"transformers reports {len(names)} {status} tensors: {listed}.")
        return model

    def _compare_tensors(self, tensors: Mapping[str, Tensor], expected: Json) -> None:
        """Compare tensors, which are loaded in float32 without changing their values, with the exported ones."""
        differences = [
            f"{name} ({difference})"
            for name, facts in expected.items()
            if (difference := _difference(tensors.get(name), facts)) is not None
        ]
        if differences:
            self.problems.append(
                f"{len(differences)} of {len(expected)} tensors differ from the exported ones: "
                f"{', '.join(differences[:MAX_NAMED])}."
            )

    def _compare_tensor_files(self) -> None:
        """Compare tensors file by file without loading the model, which does not fit in memory."""
        expected = {**self.request["tensors"], **self.request["adapter_tensors"]}
        differences, num_compared = [], 0
        for path in sorted(self.folder.rglob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a dict
                    if name not in expected:
                        continue
                    num_compared += 1
                    if (difference := _difference(file.get_tensor(name), expected[name])) is not None:
                        differences.append(f"{name} ({difference})")
        self.notes.append(f"{num_compared} of {len(expected)} tensors were compared in their files")
        if differences:
            listed = ", ".join(differences[:MAX_NAMED])
            self.problems.append(f"{len(differences)} tensors differ in the files: {listed}.")

    # Logits.

    def _compare_logits(self, logits: Sequence[Tensor], expected: Sequence[Tensor], tolerance: Json) -> None:
        distance = _distance(logits, expected, tolerance)
        self.answer["distance"] = max(distance, self.answer["distance"] or 0.0)
        limit, rule = tolerance["limit"], tolerance["rule"]
        if not distance <= limit and not self.problems and (rounding := self._rounding_distance(tolerance)) > limit / 2:
            limit, rule = 2 * rounding, f"twice the effect of rounding to {tolerance['dtype']} in this model"
            self.notes.append(f"a distance of {limit:.2g} was allowed, {rule}")
        if not distance <= limit:
            position = "median" if tolerance["is_median"] else "worst"
            self.problems.append(
                f"its logits differ from {tolerance['of']} by {distance:.2g} of their norm in the {position} position; "
                f"{limit:.2g} is allowed ({rule})."
            )

    def _rounding_distance(self, tolerance: Json) -> float:
        """Return the distance between the folder's own logits in the dtype of the training and in float32."""
        if tolerance["dtype"] == "float32":
            return 0.0
        dtype = getattr(torch, tolerance["dtype"])
        model = self._load(self.folder, is_adapter=self.request["is_adapter"], dtype=dtype)
        distance = _distance([_logits(model, row) for row in self.rows], self.logits, tolerance)
        return distance if math.isfinite(distance) else 0.0

    def _compare_merge(self) -> None:
        """Compare the merged model with the unmerged base and adapter in float32; see `LIMITS` in `verifier.py`."""
        model = self._load(Path(self.request["unmerged"]), is_adapter=True)
        unmerged = [_logits(model, row) for row in self.rows]
        if self.request["compares_logits"]:  # with the trained model, whose precision may be lower
            self._compare_logits(unmerged, [row["logits"] for row in self.rows], self.request["tolerance"])
        self._compare_logits(self.logits, unmerged, self.request["merge_tolerance"])
        if self.request["merged_dtype"] == "float32" or self.problems:
            return
        merged = model.merge_and_unload()
        distances = _distances([_logits(merged, row) for row in self.rows], unmerged)
        if float(distances.max()) > self.request["rounded_tolerance"]["limit"]:
            self.notes.append("peft's own merge differs from the adapter, so the rounded weights were not compared")
            return
        dtype = getattr(torch, self.request["merged_dtype"])
        auto_class = getattr(transformers, self.request["head_class"])
        written = auto_class.from_pretrained(self.folder, dtype=dtype, use_safetensors=True, **self.trust).state_dict()
        excess: dict[str, float] = {}
        for name, value in merged.state_dict().items():
            if name in written and value.is_floating_point() and value.shape == written[name].shape:
                step = torch.finfo(dtype).eps * value.abs().clamp(min=torch.finfo(dtype).tiny)
                step += 16 * torch.finfo(torch.float32).eps * value.abs().max()  # if base and adapter cancel out
                largest = float(((written[name].float() - value).abs() - 1.01 * step).max())
                if largest > 0:
                    excess[name] = largest
        if excess:
            names = sorted(excess, key=lambda name: -excess[name])
            self.problems.append(
                f"{len(names)} merged tensors differ from peft's own merge by more than rounding: "
                f"{', '.join(names[:MAX_NAMED])}."
            )


def digest(tensor: Tensor) -> str:
    """Return a digest of the values."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:32]


def _difference(tensor: Tensor | None, facts: Json) -> str | None:
    if tensor is None:
        return "missing"
    if list(tensor.shape) != facts["shape"]:
        return f"{tuple(tensor.shape)} instead of {tuple(facts['shape'])}"
    is_equal = digest(tensor.to(getattr(torch, facts["dtype"]))) == facts["digest"]
    return None if is_equal else "other values"


def _tensors_in(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        yield from [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118  # not a dict


def _read_rows(path: Path) -> list[Json]:
    """Return the rows as dicts with `inputs`, `positions` and `logits`."""
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
    parameters = set(inspect.signature(model.forward).parameters)
    base = getattr(model, "get_base_model", lambda: model)()
    parameters |= set(inspect.signature(base.forward).parameters)
    inputs = {name: value for name, value in row["inputs"].items() if name in parameters}
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    output = model(**inputs)
    logits = output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state
    flat = logits.float().reshape(-1, logits.shape[-1])
    selected: Tensor = flat if "positions" not in row else flat[row["positions"]]
    return selected


def _distances(logits: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Return the distance between the logits of each position, relative to the norm of the expected logits.

    The norm is that of the deviation from their mean, but at least its root mean square over all positions.
    """
    if [row.shape for row in logits] != [row.shape for row in expected]:
        return torch.full((1,), torch.inf)
    actual, reference = torch.cat(list(logits)), torch.cat(list(expected))
    centered = reference - reference.mean(-1, keepdim=True) if reference.shape[-1] > 2 else reference
    norm = centered.norm(dim=-1)
    relative: Tensor = (actual - reference).norm(dim=-1) / norm.clamp(min=float(norm.square().mean().sqrt()) or 1.0)
    return relative


def _distance(logits: Sequence[Tensor], expected: Sequence[Tensor], tolerance: Json) -> float:
    distances = _distances(logits, expected)
    return float(distances.median() if tolerance["is_median"] else distances.max())


def _first_difference(trained: Sequence[int], loaded: Sequence[int]) -> str:
    """Return the ids around the first difference between two lists."""
    pairs = enumerate(zip(trained, loaded, strict=False))
    index = next((index for index, (old, new) in pairs if old != new), min(len(trained), len(loaded)))
    first = max(0, index - 1)
    excerpts = [f"{'... ' if first else ''}{list(ids[first : first + 8])}" for ids in (trained, loaded)]
    return f"trained with {excerpts[0]}, loaded gives {excerpts[1]}"


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


if __name__ == "__main__":
    main()
